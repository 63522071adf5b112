"""The loop with formulas for processes: a resumed run goes on as the undisturbed one, and that takes every
field of its state."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from compared_runs import without_times
from formula_run import STEPS, World, live

from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.correction import measure
from verl_rc.records.batches import Timed
from verl_rc.runtime.checkpoint import RunState, SavedRun
from verl_rc.trainer import train

INTERRUPTED = 2
TIMES = ("timing_", "perf/")


pytestmark = pytest.mark.usefixtures("no_processes")


def told(folder: Path) -> list[dict[str, Any]]:
    """Metrics of the steps after the interruption, times apart, and what was complained about."""
    files = [folder / name for name in ("metrics.jsonl", "alerts.jsonl") if (folder / name).exists()]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    lines = [line for line in lines if line["step"] > INTERRUPTED]
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in lines]


def outcome(folder: Path, world: World) -> tuple[Any, ...]:
    """Everything that a run leaves: weights, the state of every step, metrics and alerts."""
    states = [
        SavedRun.load(folder / f"global_step_{step}").state for step in range(INTERRUPTED + 1, STEPS + 1)
    ]
    return (
        world.trained,
        world.updates,
        [str(dataclasses.asdict(without_times(state))) for state in states],
        told(folder),
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def undisturbed(whole: Path) -> tuple[Any, ...]:
    """What the run leaves that nothing happens to."""
    if not (whole / "weights").exists():
        world = live(whole, RunState(tracker_run_id="run of the tracker"))
        world.save(whole / "weights")
    world = World()
    world.load(whole / "weights")
    return outcome(whole, world)


def resumed(whole: Path, folder: Path, **forgotten: Any) -> tuple[Any, ...]:
    """What the run leaves that goes on from the checkpoint, with some fields of its state forgotten."""
    checkpoint = whole / f"global_step_{INTERRUPTED}"
    state = dataclasses.replace(SavedRun.load(checkpoint).state, **forgotten)
    return outcome(folder, live(folder, state, checkpoint))


def test_the_scenario_moves_every_field(undisturbed: tuple[Any, ...], whole: Path) -> None:
    beginning, state = RunState(), SavedRun.load(whole / f"global_step_{INTERRUPTED}").state
    names = [one.name for one in dataclasses.fields(state)]
    unmoved = [name for name in names if getattr(state, name) == getattr(beginning, name)]
    assert not unmoved
    assert [line.get("alerts/reward_collapse") for line in undisturbed[3]][:2] == [1.0, 1.0]


def test_a_resumed_run_leaves_what_the_undisturbed_one_leaves(
    undisturbed: tuple[Any, ...], whole: Path, tmp_path: Path
) -> None:
    assert resumed(whole, tmp_path) == undisturbed


FIELDS = [one.name for one in dataclasses.fields(RunState)]


@pytest.mark.parametrize("field", FIELDS)
def test_a_run_that_forgets_a_field_leaves_something_else(
    undisturbed: tuple[Any, ...], whole: Path, tmp_path: Path, field: str
) -> None:
    try:
        found = resumed(whole, tmp_path, **{field: getattr(RunState(), field)})
    except RuntimeError:  # steps done and groups trained on do not belong together
        assert field in ("step", "supply")
    else:
        assert found != undisturbed


THRESHOLD = "rollout_corr/rollout_rs_adaptive_threshold"


class CorrectingActor(World):
    """Its updates are told a threshold, and correct where the driver does not."""

    def __init__(self) -> None:
        super().__init__()
        self.thresholds: list[float] = []

    def update(self, batch: Any, mini_batches: Any, limit: Any, request: Any) -> Any:
        self.thresholds.append(request.corrector.config.rollout_rs_threshold)
        answer = super().update(batch, mini_batches, limit, request)
        if request.corrector.config.mode == "decoupled":
            return answer
        rows, config = batch.padded(range(len(batch))), request.corrector.config
        rollout, mask = rows.rollout_log_probs, rows.response_mask
        measured = Measured(
            measure(rollout + 0.3, rollout, mask, config), measure(rollout + 0.01, rollout, mask, config)
        )
        return Timed(dataclasses.replace(answer.result, measured=measured), answer.busy_seconds)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_a_step_has_one_control_and_moves_all_of_it(tmp_path: Path, mode: str) -> None:
    """The threshold in force is that of the step's beginning, also in the update; both the weight of the KL
    penalty, which the driver moves, and the threshold move from there."""
    world = CorrectingActor()
    bypass = f"algorithm.rollout_correction.bypass_mode={mode == 'bypass'}"
    live(tmp_path, RunState(), None, bypass, "trainer.alerts.mismatch_limit=null", world=world)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    assert world.thresholds == [line[THRESHOLD] for line in steps]
    assert len({*world.thresholds}) == len({line["actor/reward_kl_penalty_coeff"] for line in steps}) == STEPS


class Broken(World):
    """The engine returns NaN for one token of each step's first response, or for all tokens."""

    def __init__(self, everywhere: bool = False) -> None:
        super().__init__()
        self.everywhere = everywhere

    def sample(self, requests: Any) -> list[Any]:
        samples = super().sample(requests)
        for sample in samples if self.everywhere else samples[:1]:
            sample.parts[0].log_probs[: None if self.everywhere else 1] = float("nan")
        return samples


@pytest.mark.parametrize("rule", ["reject_sequence", "reject_token", "neutral"])
def test_a_log_prob_of_the_engine_that_is_no_number_is_dealt_with_as_configured(
    tmp_path: Path, rule: str
) -> None:
    keys = (
        f"algorithm.rollout_correction.nonfinite_logprob={rule}",
        "algorithm.rollout_correction.nonfinite_stop_fraction=0.5",
    )
    live(tmp_path, RunState(), None, *keys, world=Broken())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    assert len(steps) == STEPS
    for line in steps:
        assert line["rollout_corr/nonfinite_token_fraction"] > 0
        without_numbers = [name for name, value in line.items() if not isinstance(value, int | float)]
        assert without_numbers == (["actor/grad_norm"] if line["step"] == 2 else [])  # that World's own


def test_log_probs_of_which_none_is_a_number_calibrate_nothing(tmp_path: Path) -> None:
    keys = (
        "algorithm.rollout_correction.nonfinite_logprob=neutral",
        "algorithm.rollout_correction.nonfinite_stop_fraction=1",
    )
    state = RunState()
    live(tmp_path, state, None, *keys, world=Broken(everywhere=True))
    assert (state.rollout_gap_limit, state.canary_gap_limit) == (None, None)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not [name for line in lines for name in line if name.endswith("_gap") or "gap_mean" in name]
    assert lines[0]["sync/canary_nonfinite_tokens"] > 0


@pytest.mark.parametrize(
    ("frequency", "said"),
    [(-1, []), (3, ["validation accuracy: 0.100 -> 0.500"])],  # steps 0, 3 and, the last, 4
)
def test_the_closing_line_is_about_two_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frequency: int, said: list[str]
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(train, "log", lambda message, *numbers: lines.append(message % numbers))
    monkeypatch.setattr(train, "validate", lambda *arguments: (arguments[-1] + 1) / 10)
    live(tmp_path, RunState(), None, "trainer.val_before_train=True", f"trainer.test_freq={frequency}")
    assert [line for line in lines if line.startswith("validation")] == said
