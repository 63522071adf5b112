"""What a loss depends on changes it when perturbed, its constants have no gradient, the rest changes
nothing."""

from collections.abc import Iterator

import pytest
import torch
from planned_runs import EMPTY_ROW, Given, config_of, current_scores, loss_of, perturbed, step_inputs
from ragged_rows import padded_critic_batch
from torch import Tensor

from verl_rc.algorithm.losses import AGGREGATION_MODES, Aggregation
from verl_rc.algorithm.ppo.objective import value_objective
from verl_rc.config.algorithms import LOSS_MODES, POLICY_LOSSES
from verl_rc.config.run import RunConfig
from verl_rc.plan.run_plan.objective import PolicyPlan, plan_policy
from verl_rc.records.batches import CriticBatch, TokenScores, TrainBatch

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
REJECTION: Given = {f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": 1.3}
KEPT: Given = {**REJECTION, f"{CORRECTION}.rejection_denominator": "kept"}
TOKEN_WEIGHTS: Given = {f"{CORRECTION}.rollout_is": "token"}
BYPASS: Given = {f"{CORRECTION}.bypass_mode": True}
REINFORCE: Given = {**BYPASS, f"{CORRECTION}.loss_type": "reinforce"}
CORRECTIONS: dict[str, Given] = {
    "decoupled": {},
    "decoupled, weights": TOKEN_WEIGHTS,
    "decoupled, sequence weights": {
        f"{CORRECTION}.rollout_is": "sequence",
        f"{CORRECTION}.rollout_is_batch_normalize": True,
    },
    "decoupled, band": {**TOKEN_WEIGHTS, f"{CORRECTION}.rollout_is_threshold": "0.8_1.2"},
    "decoupled, rejection": REJECTION,
    "decoupled, kept": KEPT,
    "decoupled, weights, veto": {**TOKEN_WEIGHTS, f"{CORRECTION}.rollout_token_veto_threshold": 0.7},
    "decoupled, opsm": {f"{CORRECTION}.rollout_opsm_threshold": 0.05},
    "decoupled, exclude": {**REJECTION, f"{CORRECTION}.rejected_in_group_baseline": "exclude"},
    "decoupled, neutral": {f"{CORRECTION}.nonfinite_logprob": "neutral"},
    "bypass": BYPASS,
    "bypass, weights reported": {**BYPASS, **TOKEN_WEIGHTS},
    "bypass, rejection": {**BYPASS, **REJECTION},
    "bypass, kept": {**BYPASS, **KEPT},
    "reinforce": REINFORCE,
    "reinforce, weights": {**REINFORCE, **TOKEN_WEIGHTS},
    "reinforce, normalised": {**REINFORCE, **TOKEN_WEIGHTS, f"{CORRECTION}.rollout_is_batch_normalize": True},
    "reinforce, weights, kept": {**REINFORCE, **TOKEN_WEIGHTS, **KEPT},
    "reinforce, opsm": {**REINFORCE, f"{CORRECTION}.rollout_opsm_threshold": 0.05},
}
REGULARISERS: dict[str, Given] = {
    "alone": {},
    "entropy": {f"{ACTOR}.entropy_coeff": 0.5},
    "kl": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.5},
    "kl of weight 0": {
        f"{ACTOR}.use_kl_loss": True,
        f"{ACTOR}.kl_loss_coef": 0.0,
        f"{ACTOR}.entropy_coeff": -0.1,
    },
}
MODES: dict[str, Given] = {mode: {f"{ACTOR}.loss_agg_mode": mode} for mode in AGGREGATION_MODES}


LOSS_PARAMETERS: dict[str, Given] = {
    "dro": {f"{ACTOR}.policy_loss.dro_beta": 0.3},
    "clip_cov": {f"{ACTOR}.policy_loss.clip_cov_ratio": 0.1, f"{ACTOR}.policy_loss.clip_cov_lb": 0.1},
    "kl_cov": {f"{ACTOR}.policy_loss.kl_cov_ratio": 0.1},
}
"""Such that they act on a small batch."""


def loss_choice(name: str) -> Given:
    chosen: dict[str, object] = {f"{ACTOR}.policy_loss.loss_mode": name}
    return {**chosen, **LOSS_PARAMETERS.get(name, {})}


def _matrix() -> Iterator[tuple[str, Given]]:
    for name, given in CORRECTIONS.items():
        for more, regulariser in REGULARISERS.items():
            yield f"{name}; {more}", {**given, **regulariser}
    for loss in LOSS_MODES:
        for name in (
            "decoupled",
            "decoupled, weights, veto",
            "decoupled, kept",
            "bypass, rejection",
            "bypass, kept",
        ):
            yield f"{loss}; {name}", {**CORRECTIONS[name], **loss_choice(loss)}
    for mode, given in MODES.items():
        for name in (
            "decoupled, rejection",
            "decoupled, kept",
            "bypass, rejection",
            "reinforce, weights, kept",
        ):
            for loss in ("vanilla", "geo_mean", "sapo"):
                refused = mode == "token-sum" and "kept" in name
                if not refused:
                    yield (
                        f"{mode}; {loss}; {name}",
                        {**CORRECTIONS[name], **given, **loss_choice(loss), **REGULARISERS["kl"]},
                    )


MATRIX = dict(_matrix())


def changed_mask(batch: TrainBatch, name: str, bypass: bool) -> Tensor:
    """A mask with other tokens in it that leaves the batch consistent: kept tokens stay response tokens.

    ``loss_mask`` loses tokens. ``response_mask`` gains rejected tokens (one in a row that had none), or,
    where the actor itself decides what is kept, loses some.
    """
    mask = getattr(batch, name).clone()
    if name == "loss_mask":
        rows, positions = mask.nonzero()[::3].T
        mask[rows, positions] = False
    elif bypass:
        mask[0, 2:] = False
    else:
        mask[1::2, -1] = True
        mask[EMPTY_ROW, 0] = True
    return mask


def changed_batch(batch: TrainBatch, name: str, bypass: bool) -> TrainBatch:
    changed = batch.clone()
    values = getattr(changed, name)
    if name == "tokens":
        changed.tokens.responses = values.responses + 1
    elif values.dtype == torch.bool:
        setattr(changed, name, changed_mask(batch, name, bypass))
    else:
        setattr(changed, name, perturbed(values))
    return changed


def fields_given(batch: TrainBatch) -> list[str]:
    return [name for name in batch.keys() if getattr(batch, name) is not None]  # noqa: SIM118  (a tensorclass, no mapping)


def live_fields(config: RunConfig) -> set[str]:
    """Which fields of the batch, or of the model's scores, change the loss."""
    current, batch = current_scores(), step_inputs(config).batch
    expected = loss_of(config, batch, current).detach()
    bypass = config.algorithm.rollout_correction.bypass_mode
    found = {
        name
        for name in fields_given(batch)
        if not torch.equal(loss_of(config, changed_batch(batch, name, bypass), current).detach(), expected)
    }
    assert current.entropies is not None
    others = {
        "log_probs": TokenScores(perturbed(current.log_probs), current.entropies),
        "entropies": TokenScores(current.log_probs, perturbed(current.entropies)),
    }
    return found | {
        name
        for name, scores in others.items()
        if not torch.equal(loss_of(config, batch, scores).detach(), expected)
    }


def fields_with_gradient(config: RunConfig) -> set[str]:
    """Which tensors a gradient of the loss reaches."""
    current, batch = current_scores(), step_inputs(config).batch
    leaves: dict[str, Tensor] = {"log_probs": current.log_probs}
    assert current.entropies is not None
    leaves["entropies"] = current.entropies
    for name in fields_given(batch):
        values = getattr(batch, name)
        if isinstance(values, Tensor) and values.is_floating_point():
            leaves[name] = values.clone().requires_grad_()
            setattr(batch, name, leaves[name])
    gradients = torch.autograd.grad(loss_of(config, batch, current), list(leaves.values()), allow_unused=True)
    return {
        name
        for name, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None and bool((gradient != 0).any())
    }


def operand_names(plan: PolicyPlan) -> Iterator[str]:
    """The tensors that the loss of a mini-batch whose log-probs are finite depends on."""
    yield "log_probs"
    if plan.entropy_coeff != 0:
        yield "entropies"
    reads_old = plan.spec is None or plan.spec.reads_old_log_probs
    interpolates = plan.mode == "interpolated" and reads_old
    if reads_old and not interpolates:
        yield "old_log_probs"
    in_actor = plan.mode != "decoupled"
    if interpolates or (in_actor and (plan.applies_weights or plan.rejects_tokens)):
        yield "rollout_log_probs"
    yield "advantages"
    if plan.applies_weights and not in_actor:
        yield "rollout_is_weights"
    if plan.kl_loss_coef:
        yield "reference_log_probs"
    yield "loss_mask"
    if in_actor or _reads_response_mask(plan):
        yield "response_mask"


def _reads_response_mask(plan: PolicyPlan) -> bool:
    """Whether tokens outside ``loss_mask`` matter: in a denominator, or in the ratio of a whole row."""
    is_counted = plan.counted_tokens == "original" and plan.aggregations != {"token-sum"}
    return is_counted or plan.spec is None or plan.spec.ratio in ("row", "product")


@pytest.mark.parametrize("name", list(MATRIX))
def test_the_operands_are_what_the_loss_depends_on(name: str) -> None:
    config = config_of(MATRIX[name])
    operands = set(operand_names(plan_policy(config)))
    assert live_fields(config) == operands
    assert fields_with_gradient(config) == operands & {"log_probs", "entropies"}


@pytest.mark.parametrize("name", [name for name in MATRIX if "bypass" in name or "reinforce" in name])
def test_weights_and_masks_made_in_the_actor_are_constants(name: str) -> None:
    config, gradients = config_of(MATRIX[name]), []
    for detach in (False, True):
        current = current_scores()
        loss_of(config, step_inputs(config).batch, current, detach).backward()
        gradients.append(current.log_probs.grad)
    assert torch.equal(*gradients)


def test_every_loss_and_every_average_is_walked() -> None:
    assert {plan_policy(config_of(given)).loss for given in MATRIX.values()} == set(POLICY_LOSSES)
    assert {config_of(given).actor_rollout_ref.actor.loss_agg_mode for given in MATRIX.values()} == set(
        AGGREGATION_MODES
    )


def test_of_a_loss_of_the_users_own_everything_is_assumed() -> None:
    plan = plan_policy(config_of({f"{ACTOR}.policy_loss.loss_mode": "my_losses:mine"}))
    assert plan.spec is None
    assert {"old_log_probs", "response_mask", "loss_mask"} <= set(operand_names(plan))


def test_the_critics_operands() -> None:
    config = config_of({"algorithm.adv_estimator": "gae"})
    step = step_inputs(config)
    batch = padded_critic_batch(step).clone()  # other tests share INPUTS
    values = perturbed(batch.critic_values, seed=1)

    def loss(of: CriticBatch, current: Tensor) -> Tensor:
        totals = Aggregation("token-mean", num_tokens=int(of.response_mask.sum()))
        return value_objective(current, of, config.critic, totals).loss

    expected, live = loss(batch, values), set()
    for name in ("tokens", "response_mask", "critic_values", "returns"):
        live |= (
            {name}
            if not torch.equal(loss(changed_batch(batch, name, bypass=False), values), expected)
            else set()
        )
    assert not torch.equal(loss(batch, perturbed(values)), expected)
    assert live == {"response_mask", "critic_values", "returns"}
    leaves = [values.requires_grad_(), batch.critic_values.requires_grad_(), batch.returns.requires_grad_()]
    current, *constants = torch.autograd.grad(loss(batch, values), leaves, allow_unused=True)
    assert current is not None
    assert constants == [None, None]
