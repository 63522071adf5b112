"""Checks before an update: tokens are those sampled, the mismatch is within its limit, the reward has not
collapsed."""

import torch

from verl_rc.algorithm.health.findings import Findings
from verl_rc.algorithm.health.run_limits import RewardHistory
from verl_rc.algorithm.ppo.train_batch import StepInputs
from verl_rc.config.run import AlertAction, AlertsConfig
from verl_rc.metrics import Metric, Reduction
from verl_rc.metrics.sinks import Tracker
from verl_rc.records.batches import TrainBatch
from verl_rc.records.fingerprints import require_sampled_tokens
from verl_rc.records.ragged import Ragged
from verl_rc.trainer.step_record import Step, StepRecord
from verl_rc.trainer.stop import StopRequest

_SKIPPED = "this step's updates are left out; the next publication empties the engines' caches"


class Guards:
    """Act on findings as ``trainer.alerts`` says: alert, skip updates, or end the run."""

    def __init__(self, alerts: AlertsConfig, tracker: Tracker, stop: StopRequest) -> None:
        """``tracker`` gets the alerts; ``stop`` is asked to end the run."""
        self._alerts = alerts
        self._tracker = tracker
        self._stop = stop

    def decide_update(
        self,
        rewards: RewardHistory,
        inputs: StepInputs,
        findings: Findings,
        step: Step,
    ) -> bool:
        """Check the batch and act on the findings; returns whether its updates are made. A batch that is not
        trained on is booked as withheld.

        Raises ``TokensChangedError`` when a row does not hold what the engines returned, and ``LedgerError``
        when the batch does not hold all that they sampled for it.
        """
        batch, fingerprints, record = inputs.batch, inputs.scored.rollouts.fingerprints, step.record
        with record.stage("adv"):
            record.ledger.require_in_batch(int(torch.count_nonzero(batch.response_mask)))
            require_sampled_tokens(fingerprints, batch)
        collapse = rewards.collapse(self._alerts.reward_window)
        record.add({"alerts/reward_collapse": float(collapse is not None)})
        is_allowed = True
        if collapse is not None:
            is_allowed = self._act(
                self._alerts.reward_collapse, "the reward has collapsed", collapse, step.number
            )
        is_allowed = self.act(findings, step) and is_allowed
        record.add({"alerts/withheld_updates": float(not is_allowed)})
        if not is_allowed:
            withhold(batch, record)
        return is_allowed

    def act(self, findings: Findings, step: Step) -> bool:
        """Act on mismatch, gap and cause; returns whether they allow an update.

        Where the actor corrects, they are known only after the update.
        """
        if findings.k3_kl is None:
            return True
        allowed = [
            self._act_on_mismatch(findings.k3_kl, step.record, step.number),
            self._act_on_gap(findings, step.record, step.number),
            self._act_on_cause(findings.has_cause, step.number),
        ]
        return all(allowed)

    def _act_on_mismatch(self, k3_kl: float, record: StepRecord, step: int) -> bool:
        limit = self._alerts.mismatch_limit
        # Not `k3_kl > limit`: a mismatch that is NaN is too large.
        is_usual = limit is None or k3_kl <= limit
        record.add({"alerts/mismatch": float(not is_usual)})
        if is_usual:
            return True
        allowed = f"trainer.alerts.mismatch_limit={limit:g} at most was allowed"
        text = f"rollout_corr/k3_kl is {k3_kl:.3g} nats, {allowed}"
        return self._act(self._alerts.mismatch, "rollout and trainer disagree too much", text, step)

    def _act_on_gap(self, findings: Findings, record: StepRecord, step: int) -> bool:
        gap, limit = findings.mean_gap, findings.gap_limit
        if gap is None or limit is None:
            return True
        record.add_records([Metric("alerts/gap", float(gap > limit), Reduction.MAX)])
        return gap <= limit or self._alert_of_gap("this step's rollouts", gap, limit, step)

    def act_on_canary_gap(self, gap: float, limit: float, record: StepRecord, step: int) -> None:
        """Act on the mean gap of canary tokens, nats, when it is above the ``limit`` of what is usual."""
        if gap > limit:
            record.add_records([Metric("alerts/gap", 1.0, Reduction.MAX)])
            skipped = "the updates were made before, so none is left out"
            self._alert_of_gap("canary tokens", gap, limit, step, skipped)

    def _alert_of_gap(
        self, source: str, gap: float, limit: float, step: int, skipped: str = _SKIPPED
    ) -> bool:
        text = (
            f"{source}: mean |trainer - rollout log-prob| is {gap:.3g} nats, at most {limit:.3g} is usual in "
            "this run"
        )
        title = "the engines' log-probs are unusually far off"
        return self._act(self._alerts.gap, title, text, step, skipped)

    def _act_on_cause(self, has_cause: bool, step: int) -> bool:
        """Stop as configured when a cause of the gap is named, which no correction repairs: the alert was
        sent when it was found."""
        if not has_cause:
            return True
        if self._alerts.cause == "save_and_stop":
            self._stop.request(f"a cause of the gap was named at step {step}, see alerts.jsonl")
        return self._alerts.cause == "warn"

    def _act(self, action: AlertAction, title: str, text: str, step: int, skipped: str = _SKIPPED) -> bool:
        """Send an alert and do what the action says; returns whether the update is still wanted.

        ``skipped`` says what the action ``skip`` does.
        """
        consequence = {
            "warn": "training goes on",
            "skip": skipped,
            "save_and_stop": "the run is saved and ends",
        }[action]
        self._tracker.alert(title, f"{text}; {consequence}", step)
        if action == "save_and_stop":
            self._stop.request(f"{title} at step {step}: {text}")
        return action == "warn"


def withhold(batch: Ragged[TrainBatch], record: StepRecord) -> None:
    """Book a batch that the actor does not train on."""
    record.ledger.book({"withheld": int(torch.count_nonzero(batch.response_mask))})
