"""open-instruct: ``{run}_rollouts_NNNNNN.jsonl``, which ``--save_traces`` writes: the engine's side alone."""

import math
from collections.abc import Iterator
from pathlib import Path

from verl_rc.data.token_rows import Row
from verl_rc.insight.run_folder.token_files import Layout, read_lines

FIELDS = {"response_ids": "response_tokens", "rollout_log_prob": "logprobs"}
"""Their names of the fields of tokens, which cover the response alone."""
_NOT_COMPUTED = 1.0
"""The value of a log-prob that the engine did not return."""


def _rows(_: int, path: Path, notes: list[str]) -> Iterator[Row]:
    for line in read_lines(path, notes):
        row = {ours: line.get(theirs) for ours, theirs in FIELDS.items()}
        log_probs = row["rollout_log_prob"]
        if isinstance(log_probs, list):
            computed = [value is not None and value != _NOT_COMPUTED for value in log_probs]
            row["rollout_log_prob"] = [
                value if is_computed else math.nan
                for value, is_computed in zip(log_probs, computed, strict=True)
            ]
            row["response_mask"] = computed
        yield {
            **row,
            "step": line.get("step"),
            "prompt_ids": line.get("prompt_tokens"),
            "group": line.get("prompt_idx"),
            "score": line.get("reward"),
            "advantage": line.get("advantage"),
            "source": line.get("dataset"),
            "finished": line.get("finish_reason") == "stop",
        }


LAYOUT = Layout(
    "open-instruct",
    ("*_rollouts_*.jsonl",),
    r"_rollouts_(\d+)\.jsonl$",
    _rows,
    facts={"logprobs_mode": "raw_logprobs"},
    holds_many_steps=True,
    lacks=(
        "open-instruct's traces hold the engine's log-probs alone: the gap cannot be told without the "
        "trainer's, nor which tokens are of tools.",
    ),
)
