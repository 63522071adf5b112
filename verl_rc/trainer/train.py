"""THE LOOP of a run: open this file first.

    prompts ─> supply.take ──────> scored samples        gen, reward: engines sample, the driver scores
                  │
               stages.evaluate ──> evaluations           old_log_prob, ref, teacher, values
                  │
               stages.correct ───> batch to train on     adv: advantages, and correction in the driver
                  │
               judge, guards ────> findings              is the step fit to train on?
                  │
               update ───────────> new weights           update_critic, update_actor
                  │
               supply.publish ───> engines               update_weights, sync_canary
                  │
               validate, finish ─> metrics, checkpoint   testing, save_checkpoint

The words on the right are those of ``timing_s/*``. While ranks compute, from evaluate to update, the driver
scores and replaces the groups that end meanwhile; their errors surface there.
"""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from verl_rc.algorithm.health.findings import Findings
from verl_rc.algorithm.health.run_limits import (
    LeftOutUpdates,
    count_nonfinite_updates,
    count_skipped_updates,
)
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.algorithm.ppo.train_batch import StepInputs
from verl_rc.config.folder_owner import OWNER_FILE
from verl_rc.config.run import RunConfig
from verl_rc.runtime.checkpoint import RunState
from verl_rc.trainer import checkpoints, guards, profiling, stages
from verl_rc.trainer.cluster.remote import while_ranks_compute
from verl_rc.trainer.evaluate import validate
from verl_rc.trainer.judge import record_and_judge, warn_of_ranges
from verl_rc.trainer.log import log
from verl_rc.trainer.report_at_end import draw_curves, report_at_end
from verl_rc.trainer.services import Services
from verl_rc.trainer.setup import open_run
from verl_rc.trainer.step_record import Pace, Step, StepRecord
from verl_rc.trainer.supply.supply import Supply
from verl_rc.trainer.token_records import TokenRecorder
from verl_rc.trainer.weights import Publisher


def main(config: RunConfig, ray_started: "Future[None]") -> None:
    """Set up a run, train, and release its processes; its folder remains."""
    with (
        report_at_end(config.trainer) as end,
        open_run(config, ray_started, end.close) as (services, state),
        services.stop.listening(),
        checkpoints.full_disk_explained(services.checkpoints),
    ):
        train(services, state)


def train(services: Services, state: RunState) -> RunState:
    """The training loop: one pass per step. Returns the state after the last step."""
    config, trainer = services.config, services.config.trainer
    publisher = Publisher(services, state)
    supply = Supply(services, state, publisher)
    recorder = TokenRecorder(services, state.step)
    pace = Pace()
    first_accuracy, last_accuracy = start(services, state, publisher), None
    if trainer.val_only:
        return state
    if state.step >= services.total_steps:
        log("all %d steps are done: raise trainer.total_training_steps to go on", services.total_steps)
    while state.step < services.total_steps:
        step = Step.after(state, config)
        profiling.begin(services, step.number)
        find_rejected = partial(stages.find_rejected, services, state.rollout_gap_limit, step)
        scored = supply.take(step.number, step.record, find_rejected)
        with while_ranks_compute(supply.decide_ended_groups):
            evaluations = stages.evaluate(services, scored, step)
            inputs = stages.correct(services, scored, evaluations, step)
            before = Findings(state.rollout_gap_limit, state.health)
            # Of what the driver measured. Where the actor corrects, ``update`` judges what it measured.
            findings = record_and_judge(services, before, inputs.measured, step)
            rewards = state.rewards.with_scores(scored.scores, trainer.alerts.reward_window)
            outcome = Outcome(findings, state.left_out)
            if services.guards.decide_update(rewards, inputs, findings, step):
                outcome = update(services, outcome, inputs, step)
        stages.refresh_reference(services, inputs, step)
        if services.is_due(config.async_training.trigger_parameter_sync_step, step.number):
            supply.publish(step.number, step.record)
        if services.is_due(trainer.test_freq, step.number):
            last_accuracy = validate(services, publisher, step.record, step.number)
        supply.admit(step.record)
        health = warn_of_ranges(services.tracker, outcome.findings.health, step)
        recorder.write(inputs, step)
        control = step.control.after_penalty(inputs.reward_kl, len(scored))
        if inputs.mean_entropy is not None:
            control = control.after_entropy(inputs.mean_entropy)
        state = replace(
            state,
            step=step.number,
            supply=supply.close_step(step.number, step.record),
            prompts=services.prompts.state_dict(),
            control=control.after_correction(inputs.measured or outcome.measured).state,
            rollout_gap_limit=outcome.findings.next_gap_limit,
            canary_gap_limit=publisher.canary_gap_limit,
            left_out=outcome.left_out,
            rewards=rewards,
            health=health,
        )
        finish_step(services, state, step.record)
        pace = pace.after_step(step.record.seconds, step.number, services.placement)
    log(
        "written to %s: %s",
        services.folder,
        ", ".join(sorted(path.name for path in services.folder.iterdir() if path.name != OWNER_FILE)),
    )
    log("training curves: %s", draw_curves(services.folder))
    if first_accuracy is not None and last_accuracy is not None:
        log("validation accuracy: %.3f -> %.3f", first_accuracy, last_accuracy)
    return state


@dataclass(frozen=True)
class Outcome:
    """What a step found and left out."""

    findings: Findings
    left_out: LeftOutUpdates
    measured: Measured | None = None
    """The measurements of rollout correction in the actor. None where the driver corrects."""


def update(services: Services, before: Outcome, inputs: StepInputs, step: Step) -> Outcome:
    """Update the critic, and the actor once the critic's warm-up is over."""
    left_out, critic_steps = before.left_out, stages.update_critic(services, inputs, step)
    nonfinite = count_nonfinite_updates(left_out.nonfinite_critic, "critic", critic_steps)
    left_out = replace(left_out, nonfinite_critic=nonfinite)
    if step.number < services.config.trainer.critic_warmup:
        guards.withhold(inputs.batch, step.record)
        return replace(before, left_out=left_out)
    report = stages.update_actor(services, before.findings.next_gap_limit, inputs, step)
    left_out = replace(
        left_out,
        skipped=count_skipped_updates(left_out.skipped, report.loss_tokens),
        nonfinite_actor=count_nonfinite_updates(left_out.nonfinite_actor, "actor", report.steps),
    )
    findings = record_and_judge(services, before.findings, report.measured, step)
    if report.measured is not None:
        services.guards.act(findings, step)  # too late to skip this update: it alerts, or ends the run
    return Outcome(findings, left_out, report.measured)


def finish_step(services: Services, state: RunState, record: StepRecord) -> None:
    """Write a trace and a checkpoint if due, log the step, and commit the checkpoint, in this order: a
    committed step has metrics. End the run if a request to end it was accepted."""
    profiling.end(services, state.step)
    checkpoints.write(services, state, record)
    record.log(services.tracker, state.step, {"training/global_step": state.step})
    checkpoints.commit(services, state.step)
    services.stop.end_if_accepted()


def start(services: Services, state: RunState, publisher: Publisher) -> float | None:
    """Publish the first weights; returns the accuracy of the first validation, or None.

    A resumed run validates only with ``val_only``.
    """
    trainer = services.config.trainer
    record = StepRecord()
    step = state.step
    publisher.publish(step, record, canary="always")
    validates = trainer.val_only or (trainer.val_before_train and step == 0)
    accuracy = validate(services, publisher, record, step) if validates else None
    if validates or step == 0:
        record.log(services.tracker, step)
    return accuracy
