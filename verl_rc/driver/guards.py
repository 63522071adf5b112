"""What stands between sampling and update: tokens are those sampled, mismatch is bearable, the reward has not collapsed."""

import torch

from verl_rc.config.trainer import AlertAction
from verl_rc.data.batches import TrainBatch
from verl_rc.data.fingerprint import require_sampled_tokens
from verl_rc.data.samples import Samples
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.ledger import require_sampled_loss
from verl_rc.ppo.train_batch import ScoredStep

MISMATCH_METRIC = "rollout_corr/k3_kl"
"""What ``trainer.alerts.mismatch_limit`` bounds, nats per token."""


def may_train(run: Run, samples: Samples, scored_step: ScoredStep, record: StepRecord, step: int) -> bool:
    """Whether the step's updates are made; ``False`` leaves them out and books their tokens as withheld.

    Raises ``TokensChangedError`` when a row does not hold the token ids that were sampled, and ``LedgerError`` when sampled
    tokens are missing, or the loss would look at others than those that rollout correction kept.
    """
    batch, correction = scored_step.batch, scored_step.correction
    with record.stage("adv"):
        record.ledger.require_in_batch(int(torch.count_nonzero(batch.response_mask)))
        assert samples.rollouts.fingerprints is not None
        require_sampled_tokens(samples.rollouts.fingerprints, batch.tokens, batch.response_mask)
        require_sampled_loss(batch.loss_mask, batch.response_mask, None if correction is None else correction.keep_mask)
        collapse = run.reward_watch.observe(samples.scores)
    record.add({"alerts/reward_collapse": float(collapse is not None)})
    alerts, wanted = run.config.trainer.alerts, True
    if collapse is not None:
        wanted = _act(run, alerts.reward_collapse, "the reward has collapsed", collapse, step)
    if not run.config.algorithm.rollout_correction.bypass_mode:
        wanted = check_mismatch(run, record, step) and wanted
    record.add({"alerts/withheld_updates": float(not wanted)})
    return wanted


def check_mismatch(run: Run, record: StepRecord, step: int) -> bool:
    """Whether the step's mismatch allows an update; in bypass mode it is known after the update only."""
    alerts = run.config.trainer.alerts
    found, limit = record.value(MISMATCH_METRIC), alerts.mismatch_limit
    too_large = limit is not None and found is not None and not found <= limit
    record.add({"alerts/mismatch": float(too_large)})
    if not too_large:
        return True
    text = f"{MISMATCH_METRIC} is {found:.3g} nats, trainer.alerts.mismatch_limit={limit:g} at most was allowed"
    return _act(run, alerts.mismatch, "rollout and trainer disagree too much", text, step)


def after_update(run: Run, record: StepRecord, step: int) -> None:
    """Bypass mode: judge the mismatch, which the actor has measured in its update."""
    if run.config.algorithm.rollout_correction.bypass_mode:
        check_mismatch(run, record, step)


def withhold(batch: TrainBatch, record: StepRecord) -> None:
    """Book a batch that the actor does not train on."""
    record.ledger.book({"withheld": int(torch.count_nonzero(batch.response_mask))})


def _act(run: Run, action: AlertAction, title: str, text: str, step: int) -> bool:
    """Tell, and do what the action says; whether the update is still wanted."""
    consequence = {
        "warn": "training goes on",
        "skip": "this step's updates are left out; the engines get the weights anew and empty caches",
        "save_and_stop": "the run is saved and ends",
    }[action]
    run.tracker.alert(title, f"{text}; {consequence}", step)
    if action == "save_and_stop":
        run.stop.ask(f"{title} at step {step}: {text}")
    return action == "warn"
