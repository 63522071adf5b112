"""What the guards let pass, what they leave out, and how they end a run."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

import pytest
import torch
from ragged_rows import ragged
from small_models import small_run_config

from verl_rc.algorithm.health.findings import Findings
from verl_rc.algorithm.health.ranges import HealthHistory
from verl_rc.algorithm.health.run_limits import RewardHistory
from verl_rc.algorithm.health.signature_causes import RAW_OR_OTHER_TOKENS
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.algorithm.ppo.train_batch import StepInputs
from verl_rc.metrics.sinks import AlertCause
from verl_rc.records.batches import TokenBatch, TrainBatch
from verl_rc.records.fingerprints import TokensChangedError, fingerprints
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.weight_sync.proof import GapLimit, LogProbGap
from verl_rc.trainer.guards import Guards, withhold
from verl_rc.trainer.judge import record_and_judge, warn_of_ranges
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import Step, StepRecord
from verl_rc.trainer.stop import StoppedByAlertError, StopRequest

BYPASS = "algorithm.rollout_correction.bypass_mode=True"


class Tracker:
    def __init__(self) -> None:
        self.alerts: list[tuple[str, int]] = []
        self.texts: list[str] = []

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        assert (cause is not None) == title.startswith("gap: ")
        self.alerts.append((title, step))
        self.texts.append(text)


def make_run(*overrides: str) -> Any:
    config = small_run_config(Path("unused"), *overrides, "trainer.alerts.reward_window=1")
    tracker, stop = Tracker(), StopRequest()
    guards = Guards(config.trainer.alerts, cast(Any, tracker), stop)
    return SimpleNamespace(config=config, tracker=tracker, stop=stop, guards=guards)


def make_batch() -> Ragged[TrainBatch]:
    """Three rows of 1, 2 and 3 sampled tokens; the second one's last is a tool's."""
    lengths = torch.tensor([1, 2, 3])
    mask = torch.arange(3) < lengths[:, None]
    tokens = TokenBatch(
        prompts=torch.tensor([[0, 1], [1, 2], [0, 3]]),
        prompt_lengths=torch.tensor([1, 2, 1]),
        responses=torch.where(mask, 7, 0),
        response_lengths=lengths,
        batch_size=[3],
    )
    mask[1, 1] = False
    zeros = torch.zeros(3, 3)
    batch = TrainBatch(
        tokens=tokens,
        response_mask=mask,
        loss_mask=mask,
        advantages=zeros,
        old_log_probs=zeros,
        rollout_log_probs=zeros,
        policy_versions=torch.zeros(mask.shape, dtype=torch.int64),
        scores=torch.zeros(3),
        batch_size=[3],
    )
    return ragged(batch)


BEFORE = RewardHistory().with_scores(torch.ones(3), window=1)


def findings(**found: Any) -> Findings:
    return Findings(None, HealthHistory(), **{"k3_kl": 0.01, **found})


def step_of(run: Any, record: StepRecord, number: int = 3) -> Step:
    step = Step.after(RunState(step=number - 1), run.config)
    return replace(step, record=record)


def look(
    run: Any, batch: Ragged[TrainBatch], scores: Sequence[float], found: Findings | None = None
) -> tuple[bool, StepRecord]:
    """The step after one whose samples all had a score of 1."""
    record, sampled = StepRecord(), make_batch()
    numbers = fingerprints(sampled)
    scored = SimpleNamespace(
        rollouts=SimpleNamespace(fingerprints=numbers), scores=torch.tensor(list(scores))
    )
    record.ledger.add_sampled(int(sampled.response_mask.sum()))
    inputs = cast(StepInputs, SimpleNamespace(scored=scored, batch=batch))
    rewards = BEFORE.with_scores(scored.scores, window=1)
    wanted = run.guards.decide_update(rewards, inputs, found or findings(), step_of(run, record))
    return wanted, record


def test_a_healthy_step_trains() -> None:
    run = make_run()
    wanted, record = look(run, make_batch(), [1.0, 1.0, 1.0])
    assert wanted
    assert [
        record.values.get(f"alerts/{name}") for name in ("mismatch", "reward_collapse", "withheld_updates")
    ] == [0, 0, 0]
    assert run.tracker.alerts == []


def test_a_changed_token_ends_the_run() -> None:
    batch = make_batch()
    batch.responses[2] = 8
    with pytest.raises(TokensChangedError, match=r"1 of 3 rows have changed .*\[1\]"):
        look(make_run(), batch, [1.0, 1.0, 1.0])


def judged(run: Any, state: RunState, statistics: MagicMock) -> Findings:
    """What is found of the step after ``state`` with these statistics and a gap of 0."""
    before = Findings(state.rollout_gap_limit, state.health)
    with (
        patch("verl_rc.trainer.judge.HISTOGRAM_EDGES", ()),
        patch.object(LogProbGap, "from_statistics", return_value=LogProbGap(0.0, 0.0)),
    ):
        step = Step.after(state, run.config)
        return record_and_judge(cast(Services, run), before, Measured(statistics, statistics), step)


@pytest.mark.parametrize(
    ("action", "trains", "stops"),
    [("warn", True, False), ("skip", False, False), ("save_and_stop", False, True)],
)
@pytest.mark.parametrize("cause", ["mismatch", "reward_collapse"])
def test_every_action_of_every_alert(cause: str, action: str, trains: bool, stops: bool) -> None:
    run = make_run(f"trainer.alerts.{cause}={action}", "trainer.alerts.mismatch_limit=0.2")
    assert look(run, make_batch(), [1.0, 1.0, 1.0])[0]
    is_mismatch = cause == "mismatch"
    scores = [1.0] * 3 if is_mismatch else [0.0] * 3
    wanted, record = look(run, make_batch(), scores, findings(k3_kl=0.3 if is_mismatch else 0.1))
    assert wanted is trains
    assert record.values.get(f"alerts/{cause}") == 1
    assert record.values.get("alerts/withheld_updates") == (not trains)
    assert [step for _, step in run.tracker.alerts] == [3]
    run.stop.accept()
    assert run.stop.accepted is stops
    if stops:
        with pytest.raises(StoppedByAlertError, match="at step 3"):
            run.stop.end_if_accepted()
    else:
        run.stop.end_if_accepted()


@pytest.mark.parametrize(
    ("action", "trains", "stops"),
    [("warn", True, False), ("skip", False, False), ("save_and_stop", False, True)],
)
def test_an_unusual_gap_acts_as_configured_and_a_usual_one_does_not(
    action: str, trains: bool, stops: bool
) -> None:
    """C4: a gap above the calibrated limit ends nothing by itself."""
    run = make_run(f"trainer.alerts.gap={action}")
    for found, is_unusual in ((0.19, False), (0.21, True)):
        wanted, record = look(run, make_batch(), [1.0] * 3, findings(mean_gap=found, gap_limit=0.2))
        assert record.metrics().get("alerts/gap") == is_unusual
        assert wanted is (trains or not is_unusual)
    assert [title for title, _ in run.tracker.alerts] == ["the engines' log-probs are unusually far off"]
    assert run.stop.requested is stops


def test_canary_tokens_with_an_unusual_gap_count_in_a_step_whose_rollouts_had_a_usual_one() -> None:
    run = make_run()
    _, record = look(run, make_batch(), [1.0] * 3, findings(mean_gap=0.1, gap_limit=0.2))
    run.guards.act_on_canary_gap(0.3, 0.2, record, step=3)
    assert record.metrics()["alerts/gap"] == 1


def test_canary_tokens_with_an_unusual_gap_act_after_the_update() -> None:
    run, record = make_run("trainer.alerts.gap=save_and_stop"), StepRecord()
    run.guards.act_on_canary_gap(0.1, 0.2, record, step=3)
    assert (record.metrics().get("alerts/gap"), run.stop.requested) == (None, False)
    run.guards.act_on_canary_gap(0.3, 0.2, record, step=3)
    assert (record.metrics().get("alerts/gap"), run.stop.requested) == (1, True)
    run = make_run("trainer.alerts.gap=skip")
    run.guards.act_on_canary_gap(0.3, 0.2, record, step=3)
    assert run.tracker.texts[-1].endswith("the updates were made before, so none is left out")


COOLER = {
    "rollout_corr/missing_mass": 0.0,
    "rollout_corr/temperature_slope": -0.11,
    "rollout_corr/temperature_r2": 0.97,
    "rollout_corr/temperature_z": -500.0,
    "rollout_corr/logit_noise": 0.2,
}


@pytest.mark.parametrize(
    ("action", "trains", "stops"),
    [("warn", True, False), ("skip", False, False), ("save_and_stop", False, True)],
)
def test_a_cause_acts_from_its_second_step_until_it_is_gone(action: str, trains: bool, stops: bool) -> None:
    run = make_run(f"trainer.alerts.cause={action}", "algorithm.rollout_correction.diagnostics=full")
    run.gap_limit, state, found = GapLimit(plausible=1.0), RunState(), []
    for metrics in (COOLER, COOLER, {"rollout_corr/missing_mass": 0.0}):
        measured = MagicMock(k3_kl=0.01, nonfinite_fraction=0.0)
        measured.metrics.return_value = metrics
        judgement = judged(run, state, measured)
        state = replace(state, health=judgement.health, step=state.step + 1)
        found.append(look(run, make_batch(), [1.0] * 3, judgement)[0])
    assert found == [True, trains, True]
    assert run.tracker.alerts == [("gap: temperature", 2)]
    assert run.stop.requested is stops


def test_no_filter_is_blamed_that_the_configuration_says_is_mirrored() -> None:
    measured, run = (
        MagicMock(k3_kl=0.01, nonfinite_fraction=0.0),
        make_run("actor_rollout_ref.rollout.top_k=20"),
    )
    measured.metrics.return_value = {"rollout_corr/missing_mass": 0.04, "rollout_corr/missing_mass_z": 80.0}
    run.gap_limit = GapLimit(plausible=1.0)
    assert list(judged(run, RunState(), measured).health.causes.episodes) == [RAW_OR_OTHER_TOKENS.name]


def test_of_signatures_the_table_of_causes_speaks() -> None:
    run, record = make_run(), StepRecord()
    record.add({**COOLER, "rollout_corr/lag": 1.0, "rollout_corr/nonfinite_token_fraction": 0.1})
    warn_of_ranges(run.tracker, HealthHistory(), step_of(run, record, 1))
    (text,) = run.tracker.texts
    assert "nonfinite_token_fraction" in text
    assert "lag" not in text


@pytest.mark.parametrize(("limit", "k3_kl", "alarm"), [("null", 99.0, False), ("0.2", float("nan"), True)])
def test_limits_and_numbers_that_are_none(limit: str, k3_kl: float, alarm: bool) -> None:
    run = make_run(f"trainer.alerts.mismatch_limit={limit}")
    record = look(run, make_batch(), [1.0] * 3, findings(k3_kl=k3_kl))[1]
    assert record.values.get("alerts/mismatch") == alarm


def test_where_the_actor_corrects_the_mismatch_is_judged_after_the_update() -> None:
    run = make_run(BYPASS, "trainer.alerts.mismatch=save_and_stop", "trainer.alerts.mismatch_limit=0.2")
    wanted, record = look(run, make_batch(), [1.0] * 3, findings(k3_kl=None))
    assert wanted
    assert record.values.get("alerts/mismatch") is None
    run.guards.act(findings(k3_kl=0.5), step_of(run, record))
    assert record.values.get("alerts/mismatch") == 1
    assert run.stop.requested


def test_a_withheld_batch_is_booked() -> None:
    record = StepRecord()
    record.ledger.add_sampled(tokens=5)
    withhold(make_batch(), record)
    assert record.ledger.balanced_metrics()["ledger/withheld_tokens"] == 5
