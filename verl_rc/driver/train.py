"""THE LOOP. Generate, reward, evaluate, correct, update, sync, validate, log: open this file first."""

from concurrent.futures import Future

from verl_rc.config.run import RunConfig
from verl_rc.driver import stages
from verl_rc.driver.announce import say
from verl_rc.driver.evaluate import validate
from verl_rc.driver.run import Run
from verl_rc.driver.setup import open_run
from verl_rc.driver.step_record import StepRecord
from verl_rc.ppo.train_batch import build_train_batch


def main(config: RunConfig, ray_started: "Future[None]") -> None:
    """Set a run up, train, and leave nothing behind but its folder."""
    with open_run(config, ray_started) as run:
        train(run)


def train(run: Run) -> None:
    """The training loop: one pass per step, one stage per line."""
    trainer = run.config.trainer
    start = StepRecord()
    stages.publish_weights(run, version=0, record=start)
    first = validate(run, start) if trainer.val_before_train or trainer.val_only else None
    run.tracker.log(start.metrics(), step=0)
    if trainer.val_only:
        return
    last = first
    for step, epoch, prompts in run.training_batches():
        record = StepRecord()
        rollouts = stages.generate(run, prompts, step, epoch, record)
        scored = stages.score(run, prompts, rollouts, record)
        evaluations = stages.evaluate_policies(run, rollouts, record)
        with record.stage("adv"):
            batch, correction = build_train_batch(rollouts, scored.scores, evaluations, run.config.algorithm)
        stages.describe_batch(run, batch, scored, rollouts, evaluations, correction, record)
        stages.update_policy(run, batch, step, record)
        stages.publish_weights(run, version=step, record=record)
        if run.is_due(trainer.test_freq, step):
            last = validate(run, record, step)
        stages.dump_rollouts(run, step, prompts, rollouts, scored, record)
        run.tracker.log({**record.metrics(), "training/global_step": step, "training/epoch": epoch}, step=step)
    say("written to %s: %s", run.folder, ", ".join(sorted(path.name for path in run.folder.iterdir())))
    if first is not None and last is not None:
        say("validation accuracy: %.3f -> %.3f", first, last)
