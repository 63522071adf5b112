"""miles: ``train_data/{id}_{rank}.pt``, which ``--dump-details`` writes. Read at its sources of November
2026."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_rc.data.token_record import DamagedRecordError
from verl_rc.data.token_rows import Row
from verl_rc.insight.run_folder.token_files import Layout
from verl_rc.insight.run_folder.trainers.slime import row_of
from verl_rc.insight.run_folder.trainers.tensors import load_tensors

_NUMBER = "sample_indices"
"""Number of a sample, by which rows are known that several ranks have."""
_NEEDED = ("tokens", "response_lengths", "loss_masks", "rollout_log_probs")


def _rows(step: int, path: Path, _: list[str]) -> Iterator[Row]:
    dump = load_tensors(path)
    columns = dump.get("rollout_data") if isinstance(dump, dict) else None
    if not isinstance(columns, dict) or any(name not in columns for name in _NEEDED):
        raise DamagedRecordError(f"its rollout_data must hold {', '.join(_NEEDED)}")
    if dump.get("cp_size", 1) != 1:
        raise DamagedRecordError(
            f"a sequence must lie on one rank; it was cut in {dump['cp_size']} by context parallelism"
        )
    count = len(columns["tokens"])
    per_sample = {
        name: values for name, values in columns.items() if isinstance(values, list) and len(values) == count
    }
    for index in range(count):
        sample: dict[str, Any] = {name: values[index] for name, values in per_sample.items()}
        yield {
            **row_of(sample),
            "step": step,
            "score": sample.get("raw_reward"),
            _NUMBER: sample.get(_NUMBER),
        }


LAYOUT = Layout(
    "miles",
    ("train_data/*_*.pt",),
    r"/train_data/(\d+)_\d+\.pt$",
    _rows,
    lacks=("miles's dumps hold no sum of squares, no engine, no group and no version of the weights.",),
    identity=_NUMBER,
)
