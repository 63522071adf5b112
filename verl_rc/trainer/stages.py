"""Stages of the training loop, one function each; those of samples and weights are methods of supply and
publisher."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from verl_rc.algorithm.ppo.batch_metrics import batch_metrics, critic_metrics, policy_gap_metrics
from verl_rc.algorithm.ppo.choices import log_prob_limit, update_limit
from verl_rc.algorithm.ppo.mini_batches import plan_mini_batches
from verl_rc.algorithm.ppo.train_batch import StepInputs, build_train_batch, critic_batch
from verl_rc.algorithm.supply.ledger import accounts_of_update
from verl_rc.config.folder_owner import FolderClaim
from verl_rc.correction import require_finite
from verl_rc.records.batches import PolicyEvaluations, RolloutBatch, TokenScores
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.records.ragged import Column, Ragged, rows_of
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.runtime.exact.demand import require_exact
from verl_rc.runtime.rollout.sampling import request_seed
from verl_rc.runtime.weight_sync.proof import LogProbGap
from verl_rc.runtime.workers.updates import ActorReport, UpdateRequest
from verl_rc.trainer.cluster.remote import wait_for_all
from verl_rc.trainer.log import log
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import Step, StepRecord


def evaluate(services: Services, scored: ScoredBatch, step: Step) -> Ragged[PolicyEvaluations]:
    """Evaluate the sampled tokens with the trainer's models: proximal policy, frozen policies and critic, as
    far as the run needs them."""
    rollouts, rollout = scored.rollouts, services.config.actor_rollout_ref.rollout
    if rollout.enable_rollout_routing_replay and rollouts.experts_counts is None:
        raise RuntimeError(
            "the engines must record the experts that each token took, but the step's samples have none: the "
            "actor would take its own. Drop actor_rollout_ref.rollout.enable_rollout_routing_replay."
        )
    if rollout.has_filter and rollouts.support_counts is None:
        raise RuntimeError(
            "the engines must record which tokens their filter has left, but the step's samples have no such "
            "sets: the trainer would score them over the whole vocabulary. Drop "
            "actor_rollout_ref.rollout.top_p, top_k and min_p."
        )
    if step.corrector.config.score_centering.enabled:
        counts = rollouts.head_counts
        missing = rollouts.response_mask if counts is None else rollouts.response_mask & (counts == 0)
        if missing.any():
            raise RuntimeError(
                "the engines must report the most likely tokens beside each sampled one, but "
                f"{int(missing.sum())} of the step's {int(rollouts.response_mask.sum())} sampled tokens have "
                "none: drop algorithm.rollout_correction.score_centering, or use vLLM."
            )
    proximal = _proximal_policy(services, rollouts, step)
    reference = _reference(services, rollouts, step.record)
    taught = _teachers(services, scored, step.record)
    values = None
    if services.critic is not None:
        values = step.record.timed(
            "values",
            services.critic.compute_values,
            rollouts.tokens,
            update_limit(services.config.critic),
        )
    columns = {**proximal, **reference, **taught, "critic_values": values}
    return Ragged(PolicyEvaluations, {}, rollouts.lengths).become(PolicyEvaluations, **columns)


def _reference(services: Services, rollouts: Ragged[RolloutBatch], record: StepRecord) -> dict[str, Tensor]:
    """The field of ``PolicyEvaluations`` that comes from the reference policy, by name."""
    config = services.config
    if not config.needs_reference:
        return {}
    limit = log_prob_limit(config.actor_rollout_ref.ref)
    if config.has_reference_model:
        score = services.frozen["reference"].compute_log_probs
        return {"reference_log_probs": record.timed("ref", score, rollouts.tokens, limit).log_probs}
    # LoRA: the actor without its adapters
    score_actor = services.actor.compute_reference_log_probs
    return {"reference_log_probs": record.timed("ref", score_actor, rollouts.tokens, limit)}


def _teachers(services: Services, scored: ScoredBatch, record: StepRecord) -> dict[str, Tensor]:
    """The fields of ``PolicyEvaluations`` that come from teachers, by name: each scores its rows."""
    tokens, of_rows = scored.rollouts.tokens, dict[str, dict[int, Column]]()
    distillation = services.config.distillation
    for name, teacher in distillation.teachers.items():
        role = distillation.role(name)
        rows = [row for row, prompt in enumerate(scored.rows) if teacher.key in (None, prompt.data_source)]
        if not rows:
            continue
        own_tokens = tokens if len(rows) == len(tokens) else tokens.take(rows)
        limit = log_prob_limit(services.config.frozen_policies[role].config)
        scores = record.timed("teacher", services.frozen[role].compute_log_probs, own_tokens, limit)
        for field in ("log_probs", "top_ids", "top_log_probs"):
            if field in scores.columns:
                values = rows_of(scores.columns[field], own_tokens.lengths["BR"])
                of_rows.setdefault(f"teacher_{field}", {}).update(zip(rows, values, strict=True))
    return {
        field: torch.from_numpy(np.concatenate([values[row] for row in range(len(tokens))]))
        for field, values in of_rows.items()
    }


def _proximal_policy(
    services: Services, rollouts: Ragged[RolloutBatch], step: Step
) -> dict[str, Tensor | None]:
    """The fields of ``PolicyEvaluations`` that come from the proximal policy, by name; none where the mode of
    correction does not need it.

    Raises ``InexactError`` when they differ from the engine's in exact mode.
    """
    policy = services.config.actor_rollout_ref
    is_read = step.corrector.evaluates_proximal(step.number)
    if not is_read and not policy.exact:
        return {}
    scores = step.record.timed(
        "old_log_prob",
        services.actor.compute_log_probs,
        rollouts.tokens,
        log_prob_limit(policy.rollout),
    )
    require_exact(policy, scores.log_probs, rollouts, step.number - 1, f"step {step.number}")
    if not is_read:  # they were compared, no more
        return {}
    return _as_evaluations(scores)


def _as_evaluations(scores: Ragged[TokenScores]) -> dict[str, Tensor | None]:
    return {
        "proximal_log_probs": scores.log_probs,
        "entropies": scores.entropies,
        "sum_pi_squared": scores.sum_pi_squared,
        "varentropies": scores.varentropies,
    }


def find_rejected(
    services: Services, calibrated_limit: float | None, step: Step, scored: ScoredBatch
) -> list[int]:
    """The groups, by their place, of which rejection in the driver keeps no token. Rules that look at
    advantages reject nothing here.

    Raises ``NonFiniteLogProbError`` and ``SyncProofError`` as ``record_and_judge`` does, which sees the other
    groups alone.
    """
    rollouts, limit = scored.rollouts, log_prob_limit(services.config.actor_rollout_ref.rollout)
    proximal = step.record.timed("find_rejected", services.actor.compute_log_probs, rollouts.tokens, limit)
    evaluations = Ragged(PolicyEvaluations, {}, rollouts.lengths).become(
        PolicyEvaluations, **_as_evaluations(proximal)
    )
    advantages = torch.zeros_like(rollouts.rollout_log_probs)
    correction = step.corrector.before_update(scored, evaluations, advantages, step.number - 1)
    assert correction is not None  # AlgorithmConfig: the driver corrects
    require_finite(correction.statistics.nonfinite_fraction, step.corrector.config)
    gap = LogProbGap.from_statistics(correction.statistics)
    if gap is not None and services.config.async_training.is_synchronous:
        services.gap_limit.calibrate(gap, calibrated_limit, "this step's rollouts")
    could, kept = (
        torch.zeros(len(scored.prompts), dtype=torch.int64).index_add(
            0, rollouts.group_ids, rollouts.row_sums(mask)
        )
        for mask in (rollouts.comparable_mask, rollouts.comparable_mask & correction.keep_mask)
    )
    places: list[int] = ((could > 0) & (kept == 0)).nonzero().flatten().tolist()
    return places


def correct(
    services: Services, scored: ScoredBatch, evaluations: Ragged[PolicyEvaluations], step: Step
) -> StepInputs:
    """Rewards, advantages and, in the driver's mode, rollout correction: the batch to train on. Records its
    metrics, and writes its samples as JSON lines to ``trainer.rollout_data_dir`` where that is set."""
    config, record = services.config, step.record
    with record.stage("adv"):
        inputs = build_train_batch(
            scored,
            evaluations,
            config.algorithm,
            step.corrector,
            step.control.kl_coef,
            step.number - 1,
            config.async_training.max_token_age,
        )
    record.add(batch_metrics(inputs, config.data.max_response_length, config.data.max_prompt_length))
    if inputs.correction is not None:
        record.add(policy_gap_metrics(scored.rollouts, evaluations))
    if inputs.reward_kl is not None:
        coefficient = step.control.kl_coef
        record.add(
            {"actor/reward_kl_penalty": inputs.reward_kl, "actor/reward_kl_penalty_coeff": coefficient}
        )
    if config.trainer.rollout_data_dir is not None:
        with record.stage("dump_rollout_generations"):
            write_samples(config.trainer.rollout_data_dir, scored, step.number)
    return inputs


def update_critic(services: Services, inputs: StepInputs, step: Step) -> list[OptimizerStep]:
    """One optimizer step per mini-batch and epoch, none without a critic; returns what became of them."""
    if services.critic is None:
        return []
    critic = services.config.critic
    rows = critic_batch(inputs)
    step.record.add(critic_metrics(rows))
    mini_batches = plan_mini_batches(
        num_tokens := rows.row_sums(rows.response_mask),
        num_tokens,
        rows_per_mini_batch=critic.ppo_mini_batch_size * services.config.actor_rollout_ref.rollout.n,
        epochs=critic.ppo_epochs,
        shuffle=critic.shuffle,
        seed=request_seed({"seed": services.config.trainer.seed, "step": step.number}),
    )
    report = step.record.timed(
        "update_critic", services.critic.update, rows, mini_batches, update_limit(critic)
    )
    step.record.add_records(report.metrics)
    return report.steps


def update_actor(services: Services, gap_limit: float | None, inputs: StepInputs, step: Step) -> ActorReport:
    """One optimizer step per mini-batch and epoch. ``gap_limit`` is the calibrated limit of the mean gap,
    nats; None before it is calibrated."""
    batch, correction = inputs.batch, inputs.correction
    actor, rollout = services.config.actor_rollout_ref.actor, services.config.actor_rollout_ref.rollout
    record = step.record
    mini_batches = plan_mini_batches(
        batch.row_sums(batch.untruncated_mask),
        batch.row_sums(batch.loss_mask),
        rows_per_mini_batch=actor.ppo_mini_batch_size * rollout.n,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=request_seed({"seed": services.config.trainer.seed, "step": step.number}),
        denominator=step.corrector.config.rejection_denominator,
    )
    is_limited = services.config.async_training.is_synchronous
    entropy_coeff = None if inputs.mean_entropy is None else step.control.entropy_bonus(inputs.mean_entropy)
    if entropy_coeff is not None:
        record.add({"actor/entropy_coeff": entropy_coeff})
    request = UpdateRequest(
        step.corrector,
        policy_version=step.number - 1,
        gap_limit=services.gap_limit.fault(gap_limit) if is_limited else None,
        learning_rate_factor=1.0 if correction is None else correction.learning_rate_factor(),
        entropy_coeff=entropy_coeff,
        measures_survival=services.is_due(rollout.sync_proof.survival_freq, step.number),
    )
    report = record.timed(
        "update_actor",
        services.actor.update,
        batch,
        mini_batches,
        update_limit(actor),
        request,
    )
    record.add_records(report.metrics)
    planned_tokens = [mini.num_loss_tokens for mini in mini_batches]
    left_out = {
        "truncated": batch.response_mask & ~batch.untruncated_mask,
        "rejected": batch.untruncated_mask & ~batch.loss_mask,
    }
    record.ledger.book({account: int(torch.count_nonzero(mask)) for account, mask in left_out.items()})
    record.ledger.book(accounts_of_update(planned_tokens, report.loss_tokens, report.steps, actor.ppo_epochs))
    if actor.use_kl_loss:
        record.add({"actor/kl_coef": actor.kl_loss_coef})
    return report


def refresh_reference(services: Services, inputs: StepInputs, step: Step) -> None:
    """Make the reference policy the actor, where that is due, and log how far apart they had been before the
    step's updates."""
    batch, frequency = inputs.batch, services.config.actor_rollout_ref.ref.sync_freq
    if not services.config.refreshes_reference or step.number % frequency:
        return
    assert batch.reference_log_probs is not None
    distances = (batch.old_log_probs - batch.reference_log_probs)[batch.response_mask].double()
    with step.record.stage("ref"):
        wait_for_all(services.actor.processes.refresh_reference())
    log(
        "step %d: the reference is the actor now; their divergence falls from %.3g nats a token to 0",
        step.number,
        float(distances.mean()) if len(distances) else 0.0,
    )


def write_samples(folder: str, scored: ScoredBatch, step: int) -> None:
    """``<folder>/<step>.jsonl``: input, output, ground truth, score and the reward's extras of every
    sample."""
    path = Path(folder) / f"{step}.jsonl"
    rows = zip(scored.rows, scored.texts, scored.scores.tolist(), strict=True)
    with (
        FolderClaim(path.parent, "samples"),
        path.open("w", encoding="utf-8", errors="backslashreplace") as file,
    ):  # JSON's own way to write half a surrogate pair
        for index, (row, text, value) in enumerate(rows):
            extras = {name: column[index] for name, column in scored.extras.items()}
            own = {
                "input": row.prompt,
                "output": text,
                "gts": row.ground_truth,
                "score": value,
                "step": step,
            }
            file.write(json.dumps({**own, **extras, **own}, ensure_ascii=False, default=str) + "\n")
