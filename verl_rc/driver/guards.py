"""What stands between sampling and update: tokens are those sampled, mismatch is bearable, the reward has not
collapsed."""

import torch

from verl_rc.config.run import AlertAction
from verl_rc.correction import CorrectionStatistics
from verl_rc.data.batches import TrainBatch, require_sampled_tokens
from verl_rc.data.samples import Samples
from verl_rc.driver.services import Services
from verl_rc.driver.step_record import StepRecord
from verl_rc.health.causes import CAUSE
from verl_rc.health.guards import RewardHistory
from verl_rc.ppo.ledger import require_sampled_loss
from verl_rc.ppo.train_batch import ScoredStep

_SKIPPED = "this step's updates are left out; the next publication empties the engines' caches"


def decide_update(
    services: Services,
    rewards: RewardHistory,
    samples: Samples,
    scored: ScoredStep,
    record: StepRecord,
    step: int,
) -> bool:
    """Judge the step and act on what is found, as ``trainer.alerts`` says; returns whether its updates are
    made.

    Raises ``TokensChangedError`` when a row does not hold the token ids that were sampled, and
    ``LedgerError`` when sampled tokens are missing, or the loss would look at others than those that rollout
    correction kept.
    """
    batch = scored.batch
    with record.stage("adv"):
        record.ledger.require_in_batch(int(torch.count_nonzero(batch.response_mask)))
        assert samples.rollouts.fingerprints is not None
        require_sampled_tokens(samples.rollouts.fingerprints, batch.tokens, batch.response_mask)
        require_sampled_loss(batch.loss_mask, batch.response_mask, scored.keep_mask)
    alerts = services.config.trainer.alerts
    collapse = rewards.collapse(alerts.reward_window, alerts.reward_drop)
    record.add({"alerts/reward_collapse": float(collapse is not None)})
    wanted = True
    if collapse is not None:
        wanted = _act(services, alerts.reward_collapse, "the reward has collapsed", collapse, step)
    if not services.config.algorithm.rollout_correction.in_actor:
        wanted = act_on_mismatch(services, scored.statistics, record, step) and wanted
    wanted = act_on_gap(services, record, step) and wanted
    wanted = act_on_cause(services, record, step) and wanted
    record.add({"alerts/withheld_updates": float(not wanted)})
    return wanted


def act_on_mismatch(
    services: Services, statistics: CorrectionStatistics | None, record: StepRecord, step: int
) -> bool:
    """Alert and stop as configured when the step's mismatch, if measured, is too large; returns whether it
    allows an update.

    Where the actor corrects, the mismatch is known after the update alone.
    """
    alerts = services.config.trainer.alerts
    limit, found = alerts.mismatch_limit, None if statistics is None else statistics.k3_kl
    # Not `found > limit`: a mismatch that is NaN is too large.
    if limit is None or found is None or found <= limit:
        record.add({"alerts/mismatch": 0.0})
        return True
    record.add({"alerts/mismatch": 1.0})
    text = (
        f"rollout_corr/k3_kl is {found:.3g} nats, trainer.alerts.mismatch_limit={limit:g} at most was allowed"
    )
    return _act(services, alerts.mismatch, "rollout and trainer disagree too much", text, step)


def act_on_gap(services: Services, record: StepRecord, step: int) -> bool:
    """Alert and stop as configured when the rollouts' gap, if judged, is unusual; returns whether it allows
    an update."""
    found, limit = record.value("sync/rollout_gap_mean"), record.value("sync/gap_limit")
    if found is None or limit is None:
        return True
    record.add({"alerts/gap": float(found > limit)})
    return found <= limit or _act_on_gap(services, "this step's rollouts", found, limit, step)


def act_on_canary_gap(services: Services, found: float, limit: float, record: StepRecord, step: int) -> None:
    """Alert and stop as configured when the gap of canary tokens is unusual."""
    if found > limit:
        record.add({"alerts/gap": 1.0})
        skipped = "the updates were made before, so none is left out"
        _act_on_gap(services, "canary tokens", found, limit, step, skipped)


def _act_on_gap(
    services: Services, where: str, found: float, limit: float, step: int, skipped: str = _SKIPPED
) -> bool:
    text = (
        f"{where}: mean |trainer - rollout log-prob| is {found:.3g} nats, at most {limit:.3g} is usual in "
        "this run"
    )
    title = "the engines' log-probs are unusually far off"
    return _act(services, services.config.trainer.alerts.gap, title, text, step, skipped)


def act_on_cause(services: Services, record: StepRecord, step: int) -> bool:
    """Stop as configured when a cause of the gap is named, which no correction repairs; returns whether it
    allows an update."""
    if not record.value(CAUSE):
        return True
    action = services.config.trainer.alerts.cause
    if action == "save_and_stop":
        services.stop.request(f"a cause of the gap was named at step {step}, see alerts.jsonl")
    return action == "warn"


def book_withheld(batch: TrainBatch, record: StepRecord) -> None:
    """Book a batch that the actor does not train on."""
    record.ledger.book({"withheld": int(torch.count_nonzero(batch.response_mask))})


def _act(
    services: Services, action: AlertAction, title: str, text: str, step: int, skipped: str = _SKIPPED
) -> bool:
    """Send an alert and do what the action says; returns whether the update is still wanted.

    ``skipped`` says what the action ``skip`` does.
    """
    consequence = {
        "warn": "training goes on",
        "skip": skipped,
        "save_and_stop": "the run is saved and ends",
    }[action]
    services.tracker.alert(title, f"{text}; {consequence}", step)
    if action == "save_and_stop":
        services.stop.request(f"{title} at step {step}: {text}")
    return action == "warn"
