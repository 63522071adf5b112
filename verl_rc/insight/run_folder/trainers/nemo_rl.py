"""NeMo-RL: ``train_data_stepN.jsonl`` of a log folder, on by default. Read at its sources
of November 2026."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_rc.data.token_rows import Row
from verl_rc.insight.run_folder.token_files import Layout, read_lines
from verl_rc.insight.run_folder.trainers.sequences import behind_the_prompt

FIELDS = {
    "response_ids": "token_ids",
    "response_mask": "token_loss_mask",
    "rollout_log_prob": "generation_logprobs",
    "old_log_prob": "prev_logprobs",
    "advantage": "advantages",
}
"""Their names of the fields of tokens; prompt and response in one list, token t at place t, padded at the
right."""


def _rows(step: int, path: Path, notes: list[str]) -> Iterator[Row]:
    for line in read_lines(path, notes):
        values = {ours: _unbatched(line.get(theirs)) for ours, theirs in FIELDS.items()}
        length = _unbatched(line.get("input_lengths"))
        if isinstance(length, int):
            values = {
                name: value[:length] if isinstance(value, list) else value for name, value in values.items()
            }
        row = behind_the_prompt(values)
        if row is not None:
            # With dynamic sampling ``rewards`` is of the batch before the filter.
            score = _unbatched(line.get("filtered_rewards", line.get("rewards")))
            yield {**row, "step": step, "score": score if isinstance(score, int | float) else None}


def _unbatched(value: Any) -> Any:
    """The element of a batch of one; any other value as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


LAYOUT = Layout(
    "NeMo-RL",
    ("train_data_step*.jsonl", "exp_*/train_data_step*.jsonl"),
    r"train_data_step(\d+)\.jsonl$",
    _rows,
    lacks=(
        "NeMo-RL's token files hold no entropy, no sum of squares, no group and no version of the weights; "
        "the engine's log-probs are raw unless policy.generation.vllm_cfg sets "
        "logprobs_mode=processed_logprobs.",
    ),
)
