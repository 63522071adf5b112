"""slime: ``train_data/{id}.pt``, which ``--dump-details`` writes. Format 2 of August 2026."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_rc.data.token_record import DamagedRecordError
from verl_rc.data.token_rows import Row
from verl_rc.insight.run_folder.token_files import Layout
from verl_rc.insight.run_folder.trainers.tensors import load_tensors

FIELDS = {
    "response_mask": "loss_masks",
    "rollout_log_prob": "rollout_log_probs",
    "old_log_prob": "log_probs",
    "entropy": "entropy",
    "advantage": "advantages",
    "ref_log_prob": "ref_log_probs",
}
"""Their names of the fields of tokens, which cover the response alone."""
_FORMAT = 2


def _rows(step: int, path: Path, _: list[str]) -> Iterator[Row]:
    dump = load_tensors(path)
    if not isinstance(dump, dict) or dump.get("format_version") != _FORMAT:
        version = dump.get("format_version") if isinstance(dump, dict) else None
        raise DamagedRecordError(f"its format_version must be {_FORMAT}, got {version}")
    rollouts, scores = _rollouts(path.parent.parent / "rollout_data" / path.name), dump.get("raw_reward")
    for sample in dump["samples"]:
        row, place = row_of(sample), sample.get("rollout_position")
        if isinstance(place, int) and place < len(rollouts):
            versions = rollouts[place].get("weight_versions") or [None]
            row |= {"group": rollouts[place].get("group_index"), "version": _number(versions[-1])}
        if isinstance(place, int) and isinstance(scores, list) and place < len(scores):
            row["score"] = scores[place]
        yield {**row, "step": step}


def row_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of a dump of slime or miles as a row: its tokens end with the response."""
    length, tokens = int(sample["response_lengths"]), sample["tokens"]
    truncated = sample.get("truncated")
    return {
        **{ours: sample[theirs] for ours, theirs in FIELDS.items() if sample.get(theirs) is not None},
        "prompt_ids": tokens[: len(tokens) - length],
        "response_ids": tokens[len(tokens) - length :],
        "finished": None if truncated is None else not truncated,
    }


def _rollouts(path: Path) -> list[Mapping[str, Any]]:
    """Samples of the rollout dump, which alone knows groups and versions; empty without the file."""
    if not path.is_file():
        return []
    dump = load_tensors(path)
    samples = dump.get("samples") if isinstance(dump, dict) else None
    return [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []


def _number(version: object) -> int | None:
    text = str(version)
    return int(text) if text.isdecimal() else None


LAYOUT = Layout(
    "slime",
    ("train_data/*.pt",),
    r"/train_data/(\d+)\.pt$",
    _rows,
    lacks=("slime's dumps hold no sum of squares and no engine; entropies come with --use-rollout-entropy.",),
)
