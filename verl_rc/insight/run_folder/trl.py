"""TRL: ``trainer_state.json``, which every checkpoint has. Read at TRL 1.16."""

import json
from collections.abc import Iterator
from pathlib import Path

from verl_rc.insight.run_folder.lines import as_step, numbers_of, open_text

SOURCE = "TRL's trainer_state.json"
STATE = "trainer_state.json"
NAMES = {
    "reward": "critic/score/mean",
    "grad_norm": "actor/grad_norm",
    "loss": "actor/pg_loss",
    "learning_rate": "actor/lr",
    "entropy": "actor/update_entropy",
    "completions/mean_length": "response_length/mean",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "response_length/clip_ratio",
    "sampling/sampling_logp_difference/mean": "sync/rollout_gap_mean",  # mean |trainer - engine|, nats
    "sampling/sampling_logp_difference/max": "sync/rollout_gap_max",
}
"""Their metrics whose meaning is that of the catalogue's; importance ratios are clipped before the mean."""


def newest_state(path: Path) -> Path | None:
    """The state of a run's folder: its own, or that of its last checkpoint."""
    if path.is_file():
        return path if path.name == STATE else None
    states = [(_step_of(folder), folder / STATE) for folder in path.glob("checkpoint-*")]
    candidates = [path / STATE, *(state for _, state in sorted(states, reverse=True))]
    return next((state for state in candidates if state.is_file()), None)


def logged_steps(state: Path, path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and metrics of each line of a state's log; nothing where it has none. ``path``: what the user has
    named, the state itself or its folder."""
    try:
        with open_text(state, path if path.is_dir() else None) as file:
            history = json.load(file)["log_history"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    for line in history if isinstance(history, list) else ():
        step = as_step(line.pop("step", None)) if isinstance(line, dict) else None
        if step is not None:
            yield step, numbers_of(line)


def _step_of(folder: Path) -> int:
    number = folder.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1
