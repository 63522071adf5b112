"""Random rollouts, the update computed on them as driver and actor do it, and ways to change one thing; for
tests of plans."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from batches_of_ones import ones_rollouts
from ragged_rows import padded_step, without_padding
from torch import Tensor

from verl_rc.algorithm.losses import Aggregation
from verl_rc.algorithm.ppo.in_actor import corrected_current, loss_counts, with_interpolated_proximal
from verl_rc.algorithm.ppo.mini_batches import plan_mini_batches
from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.objective import policy_objective
from verl_rc.algorithm.ppo.train_batch import StepInputs, build_train_batch
from verl_rc.config.checks import check_run
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.run import RunConfig
from verl_rc.correction import require_finite
from verl_rc.records.batches import PolicyEvaluations, TokenScores, TrainBatch
from verl_rc.records.scored_batch import ScoredBatch

ROWS, WIDTH, GROUP = 40, 7, 4
EMPTY_ROW = 5

Given = Mapping[str, object]

ON_8_GPUS: Given = {
    "trainer.n_gpus_per_node": 8,
    "data.train_batch_size": 64,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 7168,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16_384,
}


@dataclass(frozen=True)
class Inputs:
    """What the driver knows before a step's updates."""

    scored: ScoredBatch
    evaluations: PolicyEvaluations


_BASE: dict[str, Any] = {
    "data": {
        "train_files": "unused.parquet",
        "val_files": "unused.parquet",
        "train_batch_size": 10,
        "max_prompt_length": 6,
        "max_response_length": 7,
    },
    "actor_rollout_ref": {
        "model": {"path": "unused"},
        "actor": {"ppo_mini_batch_size": 5, "ppo_micro_batch_size_per_gpu": 2},
        "rollout": {"n": 4, "tensor_model_parallel_size": 1},
    },
    "algorithm": {"adv_estimator": "grpo"},
    "trainer": {"device": "cpu", "n_gpus_per_node": 1},
}


def config_of(given: Given) -> RunConfig:
    """A small run with ``given`` values by dotted keys. Raises ``ValueError`` for what the loader refuses."""
    tree = copy.deepcopy(_BASE)
    for key, value in given.items():
        *path, leaf = key.split(".")
        owner = tree
        for part in path:
            owner = owner.setdefault(part, {})
        owner[leaf] = value
    config = RunConfig.model_validate(tree)
    check_run(config)
    return config


def make_inputs() -> Inputs:
    """Rows of which some are short and one is empty; every log-ratio is large for some tokens and small for
    others."""
    generator = torch.Generator().manual_seed(3)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, WIDTH, generator=generator)

    lengths = torch.randint(1, WIDTH, (ROWS,), generator=generator)
    lengths[EMPTY_ROW], lengths[0] = 0, WIDTH
    scale = torch.tensor([0.05, 0.2, 0.4, 0.8]).repeat(ROWS // 4)[:, None]
    rollout = -2.5 * torch.rand(ROWS, WIDTH, generator=generator) - 0.05
    proximal = (rollout + scale * noise(1.0)).clamp_max(0.0)
    evaluations = PolicyEvaluations(
        proximal_log_probs=proximal,
        entropies=noise(0.1) + 1.0,
        reference_log_probs=proximal + noise(0.3),
        critic_values=noise(0.5),
        sum_pi_squared=torch.rand(ROWS, WIDTH, generator=generator),
        varentropies=noise(0.1).square(),
        teacher_log_probs=proximal + noise(0.6),
        teacher_top_ids=torch.randint(9, (ROWS, WIDTH, 3), generator=generator, dtype=torch.int32),
        teacher_top_log_probs=-0.5 - 2 * torch.rand(ROWS, WIDTH, 3, generator=generator),
        batch_size=[ROWS],
    )
    scored = ScoredBatch(
        ones_rollouts(rollout, lengths, GROUP),
        reward_baselines=torch.randn(ROWS, generator=generator),
        component_scores=torch.randn(ROWS, 2, generator=generator),
        scores=torch.randn(ROWS, generator=generator),
    )
    return Inputs(scored, evaluations)


INPUTS = make_inputs()


def current_scores() -> TokenScores:
    """What the model says in the middle of an update: log-probs away from the proximal ones, and entropies;
    leaves."""
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    spread = torch.tensor([0.05, 0.3, 0.6, 1.6]).repeat(ROWS // 4)[:, None]
    log_probs = (INPUTS.evaluations.proximal_log_probs + spread * noise).requires_grad_()
    return TokenScores(log_probs, (noise.abs() + 0.5).requires_grad_())


def step_inputs(config: RunConfig, inputs: Inputs = INPUTS) -> Any:
    """What the driver hands to the actor, padded."""
    return padded_step(driver_inputs(config, inputs))


def driver_inputs(config: RunConfig, inputs: Inputs = INPUTS) -> StepInputs:
    """What the driver hands to the actor."""
    evaluations, algorithm = inputs.evaluations.clone(), config.algorithm
    if algorithm.rollout_correction.mode != "decoupled":
        evaluations.proximal_log_probs = None
    corrector = corrector_of(algorithm.rollout_correction)
    rows = without_padding(inputs.scored, evaluations)
    return build_train_batch(*rows, algorithm, corrector, algorithm.kl_ctrl.kl_coef, current_version=0)


def loss_of(config: RunConfig, batch: TrainBatch, current: TokenScores, detach: bool = False) -> Tensor:
    """The actor's loss of the whole batch as one mini-batch; ``detach`` keeps gradients out of the correction
    by force."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    log_probs = current.log_probs.detach() if detach else current.log_probs
    if width := config.distillation.top_tokens:  # the teacher's pass has found so many tokens
        assert batch.teacher_top_ids is not None
        assert batch.teacher_top_log_probs is not None
        batch = batch.clone(recurse=False)
        ids, batch.teacher_top_log_probs = (
            batch.teacher_top_ids[..., :width],
            batch.teacher_top_log_probs[..., :width],
        )
        current = replace(current, candidate_log_probs=current.log_probs[..., None] - 0.1 * ids)
    batch, (num_tokens, num_sequences) = corrected(batch, log_probs, correction)
    totals = Aggregation(
        actor.loss_agg_mode,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        loss_scale_factor=actor.loss_scale_factor,
    )
    return policy_objective(
        current, batch, actor, correction, totals, distillation=config.distillation.loss
    ).loss


def corrected(
    batch: TrainBatch, log_probs: Tensor, config: RolloutCorrectionConfig
) -> tuple[TrainBatch, tuple[int, int]]:
    """What a loss is computed on and what it is divided by, with the whole batch as one mini-batch, in either
    mode."""
    (mini_batch,) = plan_mini_batches(
        batch.untruncated_mask.sum(-1),
        batch.loss_mask.sum(-1),
        rows_per_mini_batch=len(log_probs),
        epochs=1,
        shuffle=False,
        seed=0,
        denominator=config.rejection_denominator,
    )
    counts = mini_batch.num_tokens, mini_batch.num_sequences
    if config.mode == "decoupled":
        return batch, counts
    if config.proximal == "interpolate":  # one of 100 updates since the rollouts of the step before
        batch = with_interpolated_proximal(
            batch, log_probs.detach(), policy_version=1, updates=1, updates_per_step=99
        )
        log_probs = batch.old_log_probs
    batch, statistics = corrected_current(batch, log_probs.detach(), config, policy_version=0)
    if config.nonfinite_logprob == "raise":
        require_finite(statistics.nonfinite_fraction, config)
    if config.rejection_denominator == "kept":
        num_tokens, num_sequences = loss_counts(batch).tolist()
        counts = num_tokens, num_sequences
    return batch, counts


_BATCHES: dict[tuple[str, int], tuple[Inputs, TrainBatch]] = {}
"""Of ``outcome``, by the section that makes them, and by the inputs, which stay alive."""


def outcome(config: RunConfig, inputs: Inputs = INPUTS) -> tuple[bytes, ...]:
    """Loss and gradients that training on ``inputs`` comes to."""
    current = current_scores()
    key = config.algorithm.model_dump_json(), id(inputs)
    if key not in _BATCHES:
        _BATCHES[key] = inputs, step_inputs(config, inputs).batch
    loss = loss_of(config, _BATCHES[key][1], current)
    leaves = [current.log_probs, current.entropies]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    results = [tensor.detach() for tensor in (loss, *gradients) if tensor is not None]
    return tuple((tensor + 0.0).numpy().tobytes() for tensor in results)  # zeros without their sign


def perturbed(values: Tensor, seed: int = 9) -> Tensor:
    """Other values of the same kind, of similar size."""
    generator = torch.Generator().manual_seed(seed)
    if values.is_floating_point():
        return values + 0.5 * torch.randn(values.shape, generator=generator)
    return values + 1
