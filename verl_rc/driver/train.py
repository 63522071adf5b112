"""THE LOOP. Generate, reward, evaluate, correct, update, sync, validate, log: open this file first."""

from concurrent.futures import Future

from verl_rc.config.run import RunConfig
from verl_rc.data.batches import PolicyEvaluations, TrainBatch
from verl_rc.driver import checkpoints, guards, stages, weights
from verl_rc.driver.announce import say
from verl_rc.driver.evaluate import validate
from verl_rc.driver.run import Run
from verl_rc.driver.sample import sample_batch
from verl_rc.driver.setup import open_run
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.train_batch import build_train_batch


def main(config: RunConfig, ray_started: "Future[None]") -> None:
    """Set a run up, train, and leave nothing behind but its folder."""
    with open_run(config, ray_started) as run, run.stop.listening(), checkpoints.full_disk_explained(run):
        train(run)


def train(run: Run) -> None:
    """The training loop: one pass per step, one stage per line."""
    trainer, algorithm = run.config.trainer, run.config.algorithm
    first = last = start(run)
    if trainer.val_only:
        return
    if run.progress.step >= run.total_steps:
        say("all %d steps are done: raise trainer.total_training_steps to go on", run.total_steps)
    for step, epoch, prompts in run.training_batches():
        record = StepRecord()
        samples = sample_batch(run, prompts, step, epoch, record)
        evaluations = stages.evaluate(run, samples.rollouts, record)
        with record.stage("adv"):
            scored_step = build_train_batch(samples, evaluations, algorithm, run.progress.control)
        stages.describe_batch(run, samples, evaluations, scored_step, record)
        if guards.may_train(run, samples, scored_step, record, step):
            update(run, scored_step.batch, evaluations, step, record)
        else:
            guards.withhold(scored_step.batch, record)
        weights.publish(run, version=step, record=record)
        if run.is_due(trainer.test_freq, step):
            last = validate(run, record, step)
        stages.dump_rollouts(run, samples, step, record)
        checkpoints.write(run, step, record)
        record.log(run.tracker, step, {"training/global_step": step, "training/epoch": epoch})
        checkpoints.commit(run, step)
        run.stop.obey()
    say("written to %s: %s", run.folder, ", ".join(sorted(path.name for path in run.folder.iterdir())))
    if first is not None and last is not None:
        say("validation accuracy: %.3f -> %.3f", first, last)


def update(run: Run, batch: TrainBatch, evaluations: PolicyEvaluations, step: int, record: StepRecord) -> None:
    """The critic, and the actor once the critic's warm-up is over."""
    stages.update_critic(run, batch, evaluations, step, record)
    if step < run.config.trainer.critic_warmup:
        guards.withhold(batch, record)
        return
    stages.update_actor(run, batch, step, record)
    guards.after_update(run, record, step)


def start(run: Run) -> float | None:
    """Give the engines their weights; validate first if that is wanted, and return the accuracy. A resumed run goes right on."""
    trainer, record, step = run.config.trainer, StepRecord(), run.progress.step
    weights.publish(run, version=step, record=record, with_canary=True)
    wanted = trainer.val_only or (trainer.val_before_train and step == 0)
    accuracy = validate(run, record, step) if wanted else None
    if wanted or step == 0:
        record.log(run.tracker, step)
    return accuracy
