"""The words of the loop, one short function each."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from verl_rc.correction import CorrectionStatistics, require_finite
from verl_rc.correction.histogram import HISTOGRAM_EDGES
from verl_rc.data.batches import PolicyEvaluations, RolloutBatch, Timed, TrainBatch
from verl_rc.data.samples import Samples
from verl_rc.driver.run import Run
from verl_rc.driver.step_record import StepRecord
from verl_rc.metrics import Metric
from verl_rc.ppo.batch_metrics import batch_metrics, critic_metrics, policy_gap_metrics
from verl_rc.ppo.ledger import fates_in_update
from verl_rc.ppo.micro_batch_limits import actor_limit, critic_limit, log_prob_limit, reference_limit
from verl_rc.ppo.mini_batches import MiniBatchOptions, plan_mini_batches
from verl_rc.ppo.train_batch import ScoredStep, critic_batch
from verl_rc.rollout.sampling import request_seed
from verl_rc.weight_sync.proof import LogProbGap
from verl_rc.workers.orders import UpdateOrder


def evaluate(run: Run, rollouts: RolloutBatch, record: StepRecord) -> PolicyEvaluations:
    """What the trainer's models say about the sampled tokens: proximal policy, reference policy, critic, as far as needed."""
    evaluations = _proximal_policy(run, rollouts, record)
    if run.config.needs_reference:
        with record.stage("ref"):
            reference = _reference_log_probs(run, rollouts)
        record.add_busy("ref", reference.busy_seconds)
        evaluations.ref_log_prob = reference.result
    if run.critic is not None:
        with record.stage("values"):
            values = run.critic.compute_values(rollouts.tokens, critic_limit(run.config))
        record.add_busy("values", values.busy_seconds)
        evaluations.critic_values = values.result
    return evaluations


def _proximal_policy(run: Run, rollouts: RolloutBatch, record: StepRecord) -> PolicyEvaluations:
    """Log-probs of the proximal policy; refuses the step when they show that the engine holds other weights.

    In bypass mode nothing is computed: the rollout policy takes its place, and the actor makes the same check in its update.
    """
    if run.config.algorithm.rollout_correction.bypass_mode:
        return PolicyEvaluations(old_log_probs=rollouts.rollout_log_probs, batch_size=rollouts.batch_size)
    with record.stage("old_log_prob"):
        answer = run.actor.compute_log_probs(rollouts.tokens, log_prob_limit(run.config))
    record.add_busy("old_log_prob", answer.busy_seconds)
    scores = answer.result
    _check_gap(run, LogProbGap.between(scores.log_probs, rollouts.rollout_log_probs, rollouts.response_mask), record)
    return PolicyEvaluations(
        old_log_probs=scores.log_probs,
        entropys=scores.entropys,
        sum_pi_squared=scores.sum_pi_squared,
        batch_size=rollouts.batch_size,
    )


def _check_gap(run: Run, gap: LogProbGap, record: StepRecord) -> None:
    """Report the gap of the step's rollouts. Raises ``SyncProofError`` when the engine cannot have held the trainer's weights."""
    limit = run.gap_monitor.limit
    run.gap_monitor.check(gap, "this step's rollouts")
    record.add({"sync/rollout_gap_mean": gap.mean, "sync/rollout_gap_max": gap.maximum, "sync/gap_limit": limit})


def _reference_log_probs(run: Run, rollouts: RolloutBatch) -> Timed[Tensor]:
    if run.reference is None:  # LoRA: the actor without its adapters
        return run.actor.compute_reference_log_probs(rollouts.tokens, reference_limit(run.config))
    return run.reference.compute_log_probs(rollouts.tokens, reference_limit(run.config))


def describe_batch(
    run: Run, samples: Samples, evaluations: PolicyEvaluations, scored_step: ScoredStep, record: StepRecord
) -> None:
    """Everything there is to know about the batch before the update; moves the weight of the KL penalty."""
    data, rollouts = run.config.data, samples.rollouts
    record.add(
        batch_metrics(
            scored_step.batch, samples.scores, scored_step.rewards, rollouts, data.max_response_length, data.max_prompt_length
        )
    )
    record.add(policy_gap_metrics(rollouts, evaluations))
    if scored_step.reward_kl is not None:
        controller = run.progress.control.kl
        record.add({"actor/reward_kl_penalty": scored_step.reward_kl, "actor/reward_kl_penalty_coeff": controller.kl_coef})
        moved = controller.updated(scored_step.reward_kl, len(samples))
        run.progress.control = replace(run.progress.control, kl=moved)
    if scored_step.correction is not None:
        describe_correction(run, scored_step.correction.statistics, record)


def describe_correction(run: Run, statistics: CorrectionStatistics, record: StepRecord) -> None:
    """``rollout_corr/*`` of the step, and its histogram; moves an adaptive threshold.

    Raises ``NonFiniteLogProbError`` when too many log-probs are not finite.
    """
    config, control = run.config.algorithm.rollout_correction, run.progress.control
    metrics = statistics.metrics(control.correction(config))
    require_finite(metrics, config)
    record.add(metrics)
    if config.diagnostics == "full":
        record.add_histogram("rollout_corr/log_ratio", HISTOGRAM_EDGES, statistics.numbers().histograms[0])
    if control.threshold is not None:
        record.add({"rollout_corr/rollout_rs_adaptive_threshold": control.threshold.threshold})
        run.progress.control = replace(control, threshold=control.threshold.updated(statistics))


def update_critic(run: Run, batch: TrainBatch, evaluations: PolicyEvaluations, step: int, record: StepRecord) -> None:
    """One optimizer step per mini-batch and epoch; does nothing without a critic."""
    if run.critic is None:
        return
    critic, rows = run.config.critic, critic_batch(batch, evaluations)
    record.add(critic_metrics(rows))
    options = MiniBatchOptions(
        rows_per_mini_batch=(critic.ppo_mini_batch_size or 1) * run.config.actor_rollout_ref.rollout.n,
        epochs=critic.ppo_epochs or 1,
        shuffle=bool(critic.shuffle),
        seed=request_seed({"seed": run.config.trainer.seed, "step": step}),
    )
    mini_batches = plan_mini_batches(rows.response_mask, rows.response_mask, options)
    with record.stage("update_critic"):
        answer = run.critic.update(rows, mini_batches, critic_limit(run.config))
    record.add_busy("update_critic", answer.busy_seconds)
    record.add_records(answer.result)
    run.nonfinite_updates.observe("critic", _grad_norms("critic", answer.result))


def update_actor(run: Run, batch: TrainBatch, step: int, record: StepRecord) -> None:
    """One optimizer step per mini-batch and epoch; in bypass mode the correction is described here."""
    actor, correction = run.config.actor_rollout_ref.actor, run.config.algorithm.rollout_correction
    options = MiniBatchOptions(
        rows_per_mini_batch=actor.ppo_mini_batch_size * run.config.actor_rollout_ref.rollout.n,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=request_seed({"seed": run.config.trainer.seed, "step": step}),
        denominator=correction.rejection_denominator,
    )
    mini_batches = plan_mini_batches(batch.response_mask, batch.loss_mask, options)
    limit = run.gap_monitor.limit if correction.bypass_mode else None
    order = UpdateOrder(run.progress.control.correction(correction), policy_version=step - 1, gap_limit=limit)
    with record.stage("update_actor"):
        answer = run.actor.update(batch, mini_batches, actor_limit(run.config), order)
    record.add_busy("update_actor", answer.busy_seconds)
    report = answer.result
    record.add_records(report.metrics)
    norms, planned = _grad_norms("actor", report.metrics), [mini.num_loss_tokens for mini in mini_batches]
    record.ledger.book({"rejected": int(torch.count_nonzero(batch.response_mask & ~batch.loss_mask))})
    record.ledger.book(fates_in_update(planned, report.kept_tokens, norms, actor.ppo_epochs))
    run.skipped_updates.observe(report.kept_tokens)
    run.nonfinite_updates.observe("actor", norms)
    if actor.use_kl_loss:
        record.add({"actor/kl_coef": actor.kl_loss_coef})
    if report.correction is not None:
        describe_correction(run, report.correction, record)
    if report.gap is not None:
        _check_gap(run, report.gap, record)


def _grad_norms(role: str, records: Sequence[Metric]) -> list[float]:
    """Gradient norms before clipping, one for each optimizer step."""
    return [record.value for record in records if record.name == f"{role}/grad_norm"]


def dump_rollouts(run: Run, samples: Samples, step: int, record: StepRecord) -> None:
    """Write the step's samples as JSON lines to ``trainer.rollout_data_dir``, when that is set."""
    if run.config.trainer.rollout_data_dir is None:
        return
    with record.stage("dump_rollout_generations"):
        write_samples(run.config.trainer.rollout_data_dir, samples, step)


def write_samples(folder: str, samples: Samples, step: int) -> None:
    """``<folder>/<step>.jsonl``: input, output, ground truth, score and the reward's extras of every sample."""
    path = Path(folder) / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = zip(samples.rows, samples.texts, samples.scores.tolist(), strict=True)
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:  # JSON's own way to write half a surrogate pair
        for index, (row, text, value) in enumerate(rows):
            extras = {name: column[index] for name, column in samples.extras.items()}
            sample = {"input": row.messages, "output": text, "gts": row.ground_truth, "score": value, "step": step, **extras}
            file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
