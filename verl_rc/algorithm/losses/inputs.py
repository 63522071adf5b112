"""The inputs of every policy loss, the reduction of token losses to a number and metrics, and the names of
losses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from torch import Tensor

from verl_rc.algorithm.losses.aggregate import Aggregation, token_mean
from verl_rc.config.algorithms import LossOptions, RatioOptions
from verl_rc.config.distillation import DistillationLossConfig
from verl_rc.config.models import ActorConfig
from verl_rc.config.user_code import NamedFunctions
from verl_rc.metrics.mergeable import Mean
from verl_rc.tensor_ops import LOG_RATIO_BOUND, bound_log_ratio

LossMetrics = Mapping[str, Mean[Tensor]]


@dataclass(frozen=True)
class Selection:
    """The tokens of the whole mini-batch that a loss selects."""

    advantage_mean: Tensor
    """0-d; mean advantage over the mini-batch's trained tokens; 0 where the order does not depend on it."""
    log_prob_mean: Tensor
    """0-d, nats; mean current log-prob over the same tokens, or 0."""
    score_threshold: Tensor
    """0-d, int64; tokens whose selection score is above it are selected."""
    share_at_threshold: Tensor
    """0-d, in [0, 1]; how much of each token with this very score is selected."""


@dataclass(frozen=True)
class RatioBounds:
    """The clip range that a loss sets for the whole mini-batch."""

    low: Tensor
    """0-d, float64; the lowest ratio."""
    high: Tensor
    """0-d, float64; the highest ratio."""


MiniBatchStatistics = Selection | RatioBounds
"""Numbers of the whole mini-batch that a loss needs; ``mini_batch_statistics`` computes them in a pass
without gradient."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """The tensors of one policy loss, [B, T] each, cleaned: NaN outside the masks is gone.

    Rejection enters through the difference of two masks: ratios of whole sequences are computed over
    ``response_mask``, sums run over ``loss_mask``. A rejected token whose log-prob is not finite counts with
    a log-ratio of 0.
    """

    ratio_denominator: Tensor
    """Nats; log-probs of the policy that the ratio divides by: proximal, or rollout in bypass mode."""
    log_probs: Tensor
    """Nats; the policy being updated; carries the gradient."""
    advantages: Tensor
    """In units of reward, or dimensionless when normalised."""
    loss_mask: Tensor
    """Bool; response tokens that were kept."""
    response_mask: Tensor
    """Bool; all response tokens."""
    denominator_mask: Tensor
    """Bool; tokens counted in denominators that are not handed in."""
    rollout_is_weights: Tensor | None = None
    """Dimensionless, detached, >= 0, or None for no correction."""
    parameters: LossOptions = field(default_factory=LossOptions)
    """The options of the losses."""
    aggregation: Aggregation = field(default_factory=lambda: Aggregation("token-mean"))
    """The mode and its denominators."""
    mini_batch_statistics: MiniBatchStatistics | None = None
    """Statistics of the whole mini-batch. None takes the tensors given as the mini-batch."""

    @property
    def unbounded_log_ratio(self) -> Tensor:
        """log(current / old) in nats; π_old is the ratio's denominator."""
        return self.log_probs - self.ratio_denominator

    @property
    def log_ratio(self) -> Tensor:
        """``unbounded_log_ratio`` clamped to ± ``LOG_RATIO_BOUND``."""
        # Unbounded, exp overflows float32 from 88.8 nats on, and an infinite ratio times an advantage of 0
        # is NaN.
        return bound_log_ratio(self.unbounded_log_ratio)

    def reduce(self, token_loss: Tensor, aggregation: Aggregation | None = None) -> Tensor:
        """Apply the importance weights to each token's loss and aggregate over ``loss_mask``."""
        if self.rollout_is_weights is not None:
            token_loss = token_loss * self.rollout_is_weights
        return (aggregation or self.aggregation).reduce(token_loss, self.loss_mask, self.denominator_mask)

    def mean_over_tokens(self, values: Tensor) -> Mean[Tensor]:
        """The mean of ``values`` over ``loss_mask``."""
        return token_mean(values, self.loss_mask)

    def ppo_kl_metrics(self) -> dict[str, Mean[Tensor]]:
        """Reports, for the losses that use ``log_ratio``, its negative mean (nats) and the share of tokens
        that it clamps."""
        clamped = self.unbounded_log_ratio.abs() > LOG_RATIO_BOUND
        return {
            "actor/ppo_kl": self.mean_over_tokens(-self.log_ratio),
            "actor/ppo_kl_clamped_fraction": self.mean_over_tokens(clamped),
        }


PolicyLoss = Callable[[PolicyLossInputs], tuple[Tensor, LossMetrics]]

_FUNCTIONS: NamedFunctions[PolicyLoss] = NamedFunctions(
    "policy loss",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    remedy="Weights are there with algorithm.rollout_correction.rollout_is, mini_batch_statistics only for "
    "losses of verl_rc that read the whole mini-batch.",
)


register_policy_loss = _FUNCTIONS.register
"""Decorator that makes a function known as a policy loss under a name. Raises ``ValueError`` when another
function has it."""
policy_loss_names = _FUNCTIONS.names
"""The names of all registered policy losses."""
resolve_policy_loss = _FUNCTIONS.resolve
"""Finds a policy loss by its registered name, or imports it by ``module:function``. Raises ``ValueError``
when there is no such loss."""


def loss_options(section: RatioOptions | DistillationLossConfig) -> LossOptions:
    """The options of the losses in a section of the configuration."""
    parts = (section, section.policy_loss) if isinstance(section, ActorConfig) else (section,)
    return read_loss_options(
        {
            name: getattr(part, name)
            for part in parts
            for name in LossOptions.model_fields.keys() & type(part).model_fields
        }
    )


def read_loss_options(section: Mapping[str, object]) -> LossOptions:
    """The options of the losses in a mapping with keys of ``actor_rollout_ref.actor``, and maybe others.

    The keys of ``policy_loss`` are looked for in that subsection first, then beside the others. None stands
    for the default.

    Raises:
        ValueError: when a number is outside its range.
    """
    options = {
        name: part[name]
        for part in (section, section.get("policy_loss"))
        if isinstance(part, Mapping)
        for name in LossOptions.model_fields
        if part.get(name) is not None
    }
    try:
        return LossOptions.model_validate(options)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(item) for item in error.errors())) from error


def _explain(item: ErrorDetails) -> str:
    message = item["msg"]
    if not item["loc"]:  # of a check that spans options and names them itself
        return message.removeprefix("Value error, ")
    return (
        f"actor_rollout_ref.actor.{item['loc'][0]} must be {message.removeprefix('Input should be ')}, got "
        f"{item['input']!r}"
    )


def clean_policy_loss_inputs(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Check shapes, turn masks into booleans and cut every value that must not count.

    Raises:
        ValueError: when a tensor is not [B, T] of the shape of ``log_probs``.
    """
    _check_shapes(inputs)
    response_mask, loss_mask = inputs.response_mask.bool(), inputs.loss_mask.bool()
    log_probs = _at_least_float32(inputs.log_probs)
    denominator = _at_least_float32(inputs.ratio_denominator).detach()
    # Cut here and not after the exponential: where() passes 0 * inf = NaN back through the branch that
    # it drops. A kept token is never cut: the check of the gradient norm must see its NaN.
    finite = log_probs.detach().isfinite() & denominator.isfinite()
    usable = loss_mask | (response_mask & finite)
    weights = inputs.rollout_is_weights
    return PolicyLossInputs(
        ratio_denominator=denominator.where(usable, 0),
        log_probs=log_probs.where(usable, 0),
        advantages=_at_least_float32(inputs.advantages).detach().where(response_mask | loss_mask, 0),
        loss_mask=loss_mask,
        response_mask=response_mask | loss_mask,
        denominator_mask=inputs.denominator_mask.bool(),
        rollout_is_weights=None
        if weights is None
        else _at_least_float32(weights).detach().where(loss_mask, 0),
        parameters=inputs.parameters,
        aggregation=inputs.aggregation,
        mini_batch_statistics=inputs.mini_batch_statistics,
    )


def _check_shapes(inputs: PolicyLossInputs) -> None:
    shape = inputs.log_probs.shape
    tensors = {
        "old_log_probs": inputs.ratio_denominator,
        "advantages": inputs.advantages,
        "loss_mask": inputs.loss_mask,
        "response_mask": inputs.response_mask,
        "denominator_mask": inputs.denominator_mask,
        "rollout_is_weights": inputs.rollout_is_weights,
    }
    wrong = {name: tuple(t.shape) for name, t in tensors.items() if t is not None and t.shape != shape}
    if len(shape) != 2 or wrong:
        raise ValueError(
            f"the tensors of a policy loss must be [B, T] like log_probs, {tuple(shape)}; got "
            f"{wrong or 'that'}"
        )


def _at_least_float32(values: Tensor) -> Tensor:
    # bfloat16 has steps of 0.03 nats at 5 nats: no product or exponential may be rounded to it.
    return values.to(torch.promote_types(values.dtype, torch.float32))
