"""THE LOOP. Generate, reward, evaluate, correct, update, sync, validate, log: open this file first."""

from concurrent.futures import Future

from verl_rc.algorithm.health.guards import count_nonfinite_updates, count_skipped_updates
from verl_rc.algorithm.ppo.control import Control
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.algorithm.ppo.modes import Mode, correction_mode
from verl_rc.algorithm.ppo.train_batch import ScoredStep, build_train_batch
from verl_rc.config.folder_owner import OWNER_FILE
from verl_rc.config.run import RunConfig
from verl_rc.records.batches import PolicyEvaluations
from verl_rc.runtime.checkpoint import RunState
from verl_rc.trainer import checkpoints, guards, stages
from verl_rc.trainer.cluster.remote import beside_ranks
from verl_rc.trainer.evaluate import validate
from verl_rc.trainer.judge import judge, judge_health
from verl_rc.trainer.log import log
from verl_rc.trainer.report_at_end import draw_curves, report_at_end
from verl_rc.trainer.services import Services
from verl_rc.trainer.setup import open_run
from verl_rc.trainer.step_record import Pace, StepRecord
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


def train(services: Services, state: RunState) -> None:
    """The training loop: one pass per step, one stage per line. What changes ``state`` assigns to it, here or
    in ``update``."""
    config, trainer = services.config, services.config.trainer
    publisher = Publisher(services, state)
    supply = Supply(services, state, publisher)
    recorder = TokenRecorder(services, state.step)
    pace = Pace()
    first_accuracy, last_accuracy = start(services, state, publisher), None
    if trainer.val_only:
        return
    if state.step >= services.total_steps:
        log("all %d steps are done: raise trainer.total_training_steps to go on", services.total_steps)
    while state.step < services.total_steps:
        step = state.step + 1
        record = StepRecord()
        control = Control.from_config(config.algorithm, state.control)
        mode = correction_mode(
            control.correction(config.algorithm.rollout_correction),
            by_age=not config.async_training.is_synchronous,
        )
        samples = supply.take(record)
        with beside_ranks(supply.decide_ended_groups):
            evaluations = stages.evaluate(services, samples.rollouts, mode, step, record)
            with record.stage("adv"):
                scored = build_train_batch(
                    samples,
                    evaluations,
                    config.algorithm,
                    mode,
                    control.kl_coef,
                    state.step,
                    config.async_training.max_token_age,
                )
            stages.record_batch(services, samples, evaluations, scored, control, record, step)
            findings = judge(services, state, scored.measured, control, record)
            state.health, state.rollout_gap_limit = findings.health, findings.next_gap_limit
            state.rewards = state.rewards.with_scores(samples.scores, trainer.alerts.reward_window)
            updated = (
                update(services, state, scored, evaluations, control, mode, record)
                if services.guards.decide_update(state.rewards, samples, scored, findings, record, step)
                else None
            )
        state.control = (
            control.after_penalty(scored.reward_kl, len(samples))
            .after_correction(scored.measured or updated)
            .state
        )
        if services.is_due(config.async_training.trigger_parameter_sync_step, step):
            supply.publish(step, record)
        if services.is_due(trainer.test_freq, step):
            last_accuracy = validate(services, publisher, record, step)
        supply.admit(record)
        state.health = judge_health(services.tracker, state.health, record, step)
        recorder.write(samples, evaluations, scored, control, record, step)
        state.supply = supply.close_step(record)
        state.prompts, state.canary_gap_limit = services.prompts.state_dict(), publisher.canary_gap_limit
        state.step = step
        finish_step(services, state, record)
        pace = pace.after_step(record.seconds, step, services.placement)
    log(
        "written to %s: %s",
        services.folder,
        ", ".join(sorted(path.name for path in services.folder.iterdir() if path.name != OWNER_FILE)),
    )
    log("training curves: %s", draw_curves(services.folder))
    if first_accuracy is not None and last_accuracy is not None:
        log("validation accuracy: %.3f -> %.3f", first_accuracy, last_accuracy)


def update(
    services: Services,
    state: RunState,
    scored: ScoredStep,
    evaluations: PolicyEvaluations,
    control: Control,
    mode: Mode,
    record: StepRecord,
) -> Measured | None:
    """Update the critic, and the actor once the critic's warm-up is over.

    Returns what rollout correction in the actor measured, None where the driver corrects.
    """
    config = services.config
    step = state.step + 1
    correction = config.algorithm.rollout_correction
    limit = config.trainer.max_nonfinite_updates
    critic_steps = stages.update_critic(services, scored, evaluations, step, record)
    state.nonfinite_critic_updates = count_nonfinite_updates(
        state.nonfinite_critic_updates, "critic", critic_steps, limit
    )
    if step < config.trainer.critic_warmup:
        guards.withhold(scored.batch, record)
        return None
    report = stages.update_actor(services, state, scored.batch, mode, record)
    state.skipped_updates = count_skipped_updates(
        state.skipped_updates, report.loss_tokens, correction.max_skipped_updates
    )
    state.nonfinite_actor_updates = count_nonfinite_updates(
        state.nonfinite_actor_updates, "actor", report.steps, limit
    )
    if report.measured is not None:  # the actor has corrected
        findings = judge(services, state, report.measured, control, record)
        state.health, state.rollout_gap_limit = findings.health, findings.next_gap_limit
        services.guards.act(findings, record, step)
    return report.measured


def finish_step(services: Services, state: RunState, record: StepRecord) -> None:
    """Write a checkpoint if one is due, log the step, and commit the checkpoint, in this order: a committed
    step has metrics. End the run if a request to end it was accepted."""
    checkpoints.write(services, state, record)
    record.log(services.tracker, state.step, {"training/global_step": state.step})
    checkpoints.commit(services, state.step)
    services.stop.end_if_accepted()


def start(services: Services, state: RunState, publisher: Publisher) -> float | None:
    """Publish the first weights; returns the accuracy of the first validation, None without one.

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
