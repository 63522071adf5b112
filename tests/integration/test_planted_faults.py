"""Faults planted in the real loop: each is named before an optimizer step is taken on what it spoilt; what
alerts do there."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from real_steps import (
    RealRun,
    RetokenisingEngines,
    cache_resets,
    last_metrics,
    move_weights,
    plant,
    real_step,
    weights_of,
    with_values,
)

from verl_rc.algorithm.health.run_limits import NonFiniteGradientsError, RewardHistory
from verl_rc.algorithm.ppo.train_batch import StepInputs
from verl_rc.algorithm.supply.ledger import LedgerError
from verl_rc.correction import NonFiniteLogProbError
from verl_rc.records.batches import TrainBatch
from verl_rc.records.fingerprints import TokensChangedError
from verl_rc.records.ragged import Column, Ragged
from verl_rc.runtime.distributed.child_process import RemoteError
from verl_rc.runtime.weight_sync.proof import SyncProofError
from verl_rc.trainer import stages
from verl_rc.trainer.step_record import StepRecord
from verl_rc.trainer.stop import StoppedByAlertError, StopRequest

LEARNING_RATE = 0.02
NO_CANARY = {"actor_rollout_ref.rollout.sync_proof.canary_freq": 0, "trainer.test_freq": -1}
OWN_ROLLOUTS, CANARY = "this step's rollouts", "canary tokens of rollout engine 0"


@pytest.fixture
def stepped_run(faulty_run: RealRun) -> Iterator[RealRun]:
    """The run after an update that is not published yet; healed afterwards."""
    publisher, state = faulty_run.publisher, faulty_run.state
    publisher.publish(state.step, StepRecord())
    faulty_run.states.append(replace(state, canary_gap_limit=publisher.canary_gap_limit))
    move_weights(faulty_run, LEARNING_RATE)
    yield faulty_run
    plant(faulty_run, None)


def test_healthy_steps_pass_with_gaps_of_fp32_rounding(stepped_run: RealRun) -> None:
    before = weights_of(stepped_run)
    metrics = real_step(stepped_run)
    assert weights_of(stepped_run) != before
    assert metrics["sync/canary_mean_gap"] < 1e-5
    assert metrics["sync/rollout_gap_max"] < 1e-4
    assert (
        metrics["ledger/trained_tokens"] + metrics["ledger/rejected_tokens"]
        == metrics["ledger/sampled_tokens"]
        > 0
    )


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("skipped_sync", SyncProofError, CANARY),
        ("half_loaded_tensor", SyncProofError, CANARY),
        ("one_tensor_not_sent", SyncProofError, r"all 2[0-9] tensors must be sent, missing"),
        ("stale_prefix_cache", SyncProofError, CANARY),
        (
            "older_version",
            RuntimeError,
            r"must come from weight version [0-9]+, but [0-9]+ tokens come from version \[",
        ),
        ("nan_log_prob", NonFiniteLogProbError, r"may have a log-prob that is NaN or infinite, got [0-9.]+%"),
        (
            "missing_log_prob",
            RemoteError,
            r"every one of the [0-9]+ tokens of request [0-9]*9 needs a log-prob, .* returned none",
        ),
        ("shifted_log_probs", SyncProofError, CANARY),
        ("nan_log_probs", NonFiniteLogProbError, r"may have a log-prob that is NaN or infinite, got 100.00%"),
    ],
)
def test_a_worker_that_goes_wrong(
    stepped_run: RealRun, fault: str, error: type[Exception], message: str
) -> None:
    before = weights_of(stepped_run)
    plant(stepped_run, fault)
    with pytest.raises(error, match=message):
        real_step(stepped_run)
    assert weights_of(stepped_run) == before


@pytest.mark.parametrize(
    "fault", ["skipped_sync", "half_loaded_tensor", "other_temperature", "shifted_log_probs"]
)
def test_what_a_canary_would_find_shows_in_the_steps_own_rollouts_too(
    stepped_run: RealRun, fault: str
) -> None:
    before = weights_of(stepped_run)
    plant(stepped_run, fault)
    with pytest.raises(SyncProofError, match=OWN_ROLLOUTS):
        real_step(with_values(stepped_run, NO_CANARY))
    assert weights_of(stepped_run) == before


def test_responses_that_were_text_in_between(stepped_run: RealRun) -> None:
    before = weights_of(stepped_run)
    with pytest.raises(SyncProofError, match=OWN_ROLLOUTS):
        real_step(with_values(stepped_run, NO_CANARY, engines=RetokenisingEngines(stepped_run)))
    assert weights_of(stepped_run) == before


Rows = Ragged[TrainBatch]


def changed(batch: Rows, name: str, column: Column) -> Rows:
    return replace(batch, columns={**batch.columns, name: column})


def other_token(batch: Rows) -> Rows:
    responses = batch.columns["responses"].copy()
    responses[batch.lengths["BR"][:5].sum()] += 1
    return changed(batch, "responses", responses)


def shifted_response(batch: Rows) -> Rows:
    """By one to the right; the last token falls out."""
    return changed(batch, "response_mask", np.append(False, batch.columns["response_mask"][:-1]))


def exchanged_rows(batch: Rows) -> Rows:
    return batch.take([0, 1, 2, 7, 4, 5, 6, 3, *range(8, len(batch))])


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            other_token,
            TokensChangedError,
            r"the token ids that were sampled, .* 1 of 16 rows have changed .* \[5\]",
        ),
        (exchanged_rows, TokensChangedError, r"2 of 16 rows have changed .* \[3, 7\]"),
        (
            shifted_response,
            LedgerError,
            r"must hold the [0-9]+ sampled tokens that have no account yet, it holds [0-9]+",
        ),
    ],
)
def test_a_batch_that_is_spoilt_between_sampling_and_update(
    stepped_run: RealRun,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Rows], Rows],
    error: type[Exception],
    message: str,
) -> None:
    build = stages.build_train_batch

    def build_and_spoil(*arguments: Any) -> StepInputs:
        step = build(*arguments)
        return replace(step, batch=spoil(step.batch))

    monkeypatch.setattr(stages, "build_train_batch", build_and_spoil)
    before = weights_of(stepped_run)
    with pytest.raises(error, match=message):
        real_step(with_values(stepped_run, NO_CANARY))
    assert weights_of(stepped_run) == before


def alerting(run: RealRun, action: str, kind: str) -> RealRun:
    """The run with an alert that every step sets off, and a stop request of its own."""
    values = {f"trainer.alerts.{kind}": action}
    if kind == "mismatch":
        return with_values(
            run, {**NO_CANARY, **values, "trainer.alerts.mismatch_limit": 1e-30}, stop=StopRequest()
        )
    state = replace(run.state, rewards=RewardHistory().with_scores(torch.full((16,), 100.0), window=1))
    alert = with_values(run, {**NO_CANARY, **values, "trainer.alerts.reward_window": 1}, stop=StopRequest())
    return replace(alert, states=[state])


def alerts_of(run: RealRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.services.folder / "alerts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["mismatch", "reward_collapse"])
@pytest.mark.parametrize("action", ["warn", "skip", "save_and_stop"])
def test_what_an_alert_does(stepped_run: RealRun, kind: str, action: str) -> None:
    run = alerting(stepped_run, action, kind)
    before, resets, step = weights_of(run), cache_resets(run), run.state.step + 1
    if action == "save_and_stop":
        with pytest.raises(StoppedByAlertError, match=f"at step {step}: "):
            real_step(run)
        assert (run.services.folder / f"global_step_{step}").is_dir()
    else:
        real_step(run)
        assert not (run.services.folder / f"global_step_{step}").exists()
    assert (weights_of(run) == before) == (action != "warn")
    metrics = last_metrics(run)
    assert metrics["step"] == step
    assert metrics[f"alerts/{kind}"] == 1
    withheld = metrics["ledger/sampled_tokens"] if action != "warn" else 0
    assert metrics["ledger/withheld_tokens"] == withheld
    assert cache_resets(run) == [
        count + 2 for count in resets
    ]  # the engines got weights before the step and after it
    alert = alerts_of(run)[-1]
    assert alert["step"] == step
    cause = {
        "mismatch": "rollout_corr/k3_kl is ",
        "reward_collapse": "the mean score of the last 1 steps is ",
    }
    assert alert["text"].startswith(cause[kind])


def test_gradients_that_are_not_finite_are_left_out_counted_and_end_the_run(stepped_run: RealRun) -> None:
    run = with_values(stepped_run, NO_CANARY)
    before = weights_of(run)
    plant(run, "nan_gradient")
    metrics = real_step(run)
    assert metrics["actor/nonfinite_gradients"] == 1
    assert metrics["ledger/nonfinite_tokens"] == metrics["ledger/sampled_tokens"]
    assert metrics["ledger/trained_tokens"] == 0
    real_step(run)
    with pytest.raises(
        NonFiniteGradientsError, match="the actor's gradients must be finite, but those of 3 optimizer steps"
    ):
        real_step(run)
    assert weights_of(run) == before
