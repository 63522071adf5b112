"""Which tensors decide an update, and in what part: read from the configuration, before anything runs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from verl_rc.config.run import RunConfig
from verl_rc.ppo.choices import covariance_loss_name, needs_statistics_first, policy_loss_name

RatioKind = Literal["token", "row", "penalty", "none"]
"""Where a loss reads the old policy: a ratio of each token, one of each row, only a penalty, or nowhere."""


@dataclass(frozen=True)
class LossFacts:
    """What a policy loss looks at."""

    ratio: RatioKind
    gradient_through: Literal["ratio", "log_prob"]
    """What carries the gradient: the ratio itself, or log π while the ratio is a constant."""
    options: tuple[str, ...] = ()
    """Keys of ``actor_rollout_ref.actor`` that it reads."""
    aggregation: str | None = None
    """Its own average, whatever ``loss_agg_mode`` says; None: that mode."""
    only_negative: tuple[str, ...] = ()
    """Those of its options that act only where the advantage is negative."""

    @property
    def reads_old_log_probs(self) -> bool:
        """Whether the policy before the update matters at all."""
        return self.ratio != "none"


_CLIPS = ("clip_ratio_low", "clip_ratio_high")
_COVARIANCE_BAND = ("policy_loss.clip_cov_ratio", "policy_loss.clip_cov_lb", "policy_loss.clip_cov_ub")
_LOW = ("clip_ratio_low",)
LOSS_FACTS = {
    "vanilla": LossFacts("token", "ratio", (*_CLIPS, "clip_ratio_c"), only_negative=(*_LOW, "clip_ratio_c")),
    "gspo": LossFacts("row", "ratio", _CLIPS, only_negative=_LOW),
    "gpg": LossFacts("none", "log_prob"),
    "cispo": LossFacts("token", "log_prob", _CLIPS),
    "geo_mean": LossFacts("row", "ratio", _CLIPS, "seq-mean-token-sum", only_negative=_LOW),
    "sapo": LossFacts("token", "ratio", ("tau_pos", "tau_neg"), "seq-mean-token-mean", only_negative=("tau_neg",)),
    "clip_cov": LossFacts("token", "ratio", (*_CLIPS, *_COVARIANCE_BAND), only_negative=_LOW),
    "kl_cov": LossFacts("token", "ratio", ("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")),
    "dppo_tv": LossFacts("token", "log_prob", (*_CLIPS, "clip_ratio_c"), only_negative=_LOW),
    "dppo_kl": LossFacts("token", "log_prob", (*_CLIPS, "clip_ratio_c"), only_negative=_LOW),
    "dro": LossFacts("penalty", "log_prob", ("policy_loss.dro_beta",)),
    "reinforce": LossFacts("none", "log_prob"),
}
"""Every policy loss that a configuration can choose by name."""


@dataclass(frozen=True)
class Operand:
    """A tensor that a loss depends on."""

    name: str
    """Field of ``TokenScores``, ``TrainBatch`` or ``CriticBatch``; ``values`` are the critic's current ones."""
    has_gradient: bool
    """False: a constant of the loss."""


@dataclass(frozen=True)
class PolicyPlan:
    """The actor's objective."""

    loss: str
    """Name of the policy loss that runs."""
    facts: LossFacts | None
    """None: a loss of the user's own, which may look at everything."""
    bypass: bool
    """The current policy is corrected in the actor; else the proximal one in the driver."""
    weights: bool
    """Importance weights multiply the token losses."""
    rejects: bool
    """Tokens with finite log-probs can be rejected."""
    denominator: Literal["original", "kept"]
    """What is counted in denominators: response tokens, or kept ones."""
    aggregation: str
    """Average of the policy term."""
    regulariser_aggregation: str
    """Average of the entropy and KL terms."""
    entropy_coeff: float
    """0: entropy is only reported."""
    kl_loss_coef: float | None
    """None: no KL term; 0: it is only reported."""
    statistics_passes: int
    """Passes without gradient over each mini-batch that come first, for statistics that its loss needs."""
    operands: tuple[Operand, ...]
    """Everything that changes the loss of a mini-batch whose log-probs are finite."""

    @property
    def old_policy(self) -> Literal["proximal", "rollout"]:
        """The policy behind ``old_log_probs``."""
        return "rollout" if self.bypass else "proximal"

    @property
    def aggregations(self) -> set[str]:
        """Averages of all terms that are in the loss."""
        has_regulariser = self.entropy_coeff != 0 or bool(self.kl_loss_coef)
        return {self.aggregation} | ({self.regulariser_aggregation} if has_regulariser else set())


@dataclass(frozen=True)
class ValuePlan:
    """The critic's objective."""

    aggregation: str
    operands: tuple[Operand, ...] = (
        Operand("values", has_gradient=True),
        Operand("old_values", has_gradient=False),
        Operand("returns", has_gradient=False),
        Operand("response_mask", has_gradient=False),
    )
    """Everything that changes the loss."""


def plan_policy(config: RunConfig) -> PolicyPlan:
    """The actor's objective under ``config``."""
    actor, correction = config.actor_rollout_ref.actor, config.algorithm.rollout_correction
    loss = policy_loss_name(actor, correction)
    facts = LOSS_FACTS.get(loss)
    bypass = correction.bypass_mode
    own_aggregation = None if facts is None else facts.aggregation
    plan = PolicyPlan(
        loss=loss,
        facts=facts,
        bypass=bypass,
        weights=correction.rollout_is is not None and (not bypass or correction.loss_type == "reinforce"),
        rejects=correction.rejects,
        denominator=correction.rejection_denominator,
        aggregation=own_aggregation or actor.loss_agg_mode,
        regulariser_aggregation=actor.loss_agg_mode,
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else None,
        statistics_passes=int(bypass and needs_statistics_first(correction))
        + int(covariance_loss_name(actor, correction) is not None),
        operands=(),
    )
    names = dict.fromkeys(_operand_names(plan))
    operands = tuple(Operand(name, has_gradient=name in ("log_probs", "entropys")) for name in names)
    return replace(plan, operands=operands)


def plan_value(config: RunConfig) -> ValuePlan | None:
    """The critic's objective under ``config``; None without a critic."""
    return ValuePlan(str(config.critic.loss_agg_mode)) if config.needs_critic else None


def _operand_names(plan: PolicyPlan) -> Iterator[str]:
    yield "log_probs"
    if plan.entropy_coeff != 0:
        yield "entropys"
    if plan.facts is None or plan.facts.reads_old_log_probs:
        yield "old_log_probs"
    if plan.bypass and (plan.weights or plan.rejects):
        yield "rollout_log_probs"
    yield "advantages"
    if plan.weights and not plan.bypass:
        yield "rollout_is_weights"
    if plan.kl_loss_coef:
        yield "ref_log_prob"
    if not plan.bypass:
        yield "loss_mask"
    if plan.bypass or _reads_response_mask(plan):
        yield "response_mask"


def _reads_response_mask(plan: PolicyPlan) -> bool:
    """Whether tokens that are not in ``loss_mask`` count somewhere: in a denominator, or in the ratio of a whole row."""
    is_counted = plan.denominator == "original" and plan.aggregations != {"token-sum"}
    return is_counted or plan.facts is None or plan.facts.ratio == "row"
