"""SkyRL: ``dumped_data/global_step_N_training_input.pkl``, which ``trainer.dump_data_batch=true`` writes.

Read at its sources of November 2026; no class of theirs is imported.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_rc.data.token_record import Array, DamagedRecordError
from verl_rc.data.token_rows import Row
from verl_rc.insight.run_folder.token_files import Layout
from verl_rc.insight.run_folder.trainers.tensors import load_mapping, load_tensors

FIELDS = {
    "response_mask": "loss_mask",
    "rollout_log_prob": "rollout_logprobs",
    "old_log_prob": "action_log_probs",
    "advantage": "advantages",
    "ref_log_prob": "base_action_log_probs",
}
"""Their names of the fields of tokens, ``[B, R]``; their ``response_mask`` marks the response."""
_NEEDED = ("sequences", "attention_mask", "response_mask", "loss_mask", "rollout_logprobs")
_PACKAGES = ("skyrl", "skyrl_train")


def _rows(step: int, path: Path, _: list[str]) -> Iterator[Row]:
    state = load_mapping(path, _PACKAGES).state
    if not isinstance(state, dict) or not isinstance(state.get("batch_dict"), dict):
        raise DamagedRecordError("its batch must have been pickled with its state")
    columns = {name: _tensor(value) for name, value in state["batch_dict"].items()}
    absent = [name for name in _NEEDED if columns.get(name) is None]
    if absent:
        raise DamagedRecordError(f"its batch must hold {', '.join(absent)}")
    metadata = state.get("metadata") or {}
    count = len(columns["sequences"]) - int(metadata.get("pad_size") or 0)
    groups = _groups(metadata.get("policy_prompt_boundaries"), count)
    for index in range(count):
        sequence = columns["sequences"][index][columns["attention_mask"][index].astype(bool)]
        is_present = columns["response_mask"][index].astype(bool)
        length = int(is_present.sum())
        yield {
            **{
                ours: columns[theirs][index][is_present]
                for ours, theirs in FIELDS.items()
                if columns.get(theirs) is not None
            },
            "step": step,
            "prompt_ids": sequence[: len(sequence) - length],
            "response_ids": sequence[len(sequence) - length :],
            "group": None if groups is None else groups[index],
        }


def _tensor(value: Any) -> Any:
    """The array of a pickled value; None for another object."""
    if (
        not isinstance(value, Mapping)
        or value.get("type") != "tensor"
        or not isinstance(value["data"], bytes)
    ):
        return None
    return load_tensors(value["data"])


def _groups(boundaries: Any, count: int) -> Array | None:
    """The prompt of each row, from (first row, row after the last) of every prompt; None where not known."""
    if not isinstance(boundaries, list) or not all(isinstance(bounds, list | tuple) for bounds in boundaries):
        return None
    groups = np.full(count, -1)
    for number, (first, end) in enumerate(boundaries):
        groups[first:end] = number
    return groups


LAYOUT = Layout(
    "SkyRL",
    ("global_step_*_training_input.pkl", "dumped_data/global_step_*_training_input.pkl"),
    r"/global_step_(\d+)_training_input\.pkl$",
    _rows,
    facts={"logprobs_mode": "raw_logprobs"},
    lacks=(
        "SkyRL's dumps hold no reward, no entropy, no sum of squares and no version of the weights; its "
        "engine reports raw log-probs, which agree with the trainer's at temperature 1 alone.",
    ),
)
