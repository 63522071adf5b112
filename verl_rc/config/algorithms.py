"""The specification of every policy loss, average of token losses and advantage estimator, in one place.

The schema takes its options from here; checks, plan, ``explain`` and documents read the records; ``losses/``
and ``advantage/`` bind functions to their names. A new loss is an entry here and its function; so is a new
estimator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, Self

from pydantic import Field, model_validator

from verl_rc.config.schema import StrictModel, follows

LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


@dataclass(frozen=True)
class AggregationSpec:
    """How the losses ``l`` of tokens in the mask ``m`` become one number."""

    formula: str
    """The formula, with ``{term}`` for a token's loss."""
    divisors: str
    """Meaning of its symbols, with ``{counted}`` for the tokens that count and ``{factor}`` for
    ``loss_scale_factor``."""
    source: str = ""

    def average_of(self, term: str) -> str:
        """The formula of the average, with ``term`` for a token's loss."""
        return self.formula.format(term=term)


_SEQUENCES = "S = rows of the mini-batch, over all ranks, with at least one of these: {counted}"
AGGREGATIONS: Mapping[str, AggregationSpec] = {
    "token-mean": AggregationSpec(
        "1/N · Σ m {term}", "N = {counted} of the mini-batch, over all ranks", "DAPO, arXiv:2503.14476"
    ),
    "token-sum": AggregationSpec("Σ m {term}", "divided by nothing"),
    "seq-mean-token-sum": AggregationSpec("1/S · Σ m {term}", _SEQUENCES),
    "seq-mean-token-mean": AggregationSpec(
        "1/S · Σ_rows (1/n · Σ_t m {term})",
        f"n = {{counted}} of the row; {_SEQUENCES}",
        "GRPO, arXiv:2402.03300",
    ),
    "seq-mean-token-sum-norm": AggregationSpec(
        "1/(S·F) · Σ m {term}", f"F = {{factor}}; {_SEQUENCES}", "Dr. GRPO, arXiv:2503.20783"
    ),
}
"""Values of ``loss_agg_mode``."""


class RatioOptions(StrictModel):
    """Options of losses directly in ``actor_rollout_ref.actor``, as in verl."""

    clip_ratio: float = Field(0.2, ge=0)
    """Clip range of the ratio on both sides."""
    clip_ratio_low: float | None = follows("actor_rollout_ref.actor.clip_ratio", ge=0)
    """Clip range below 1; in ``dppo_tv`` a difference of probabilities, in ``dppo_kl`` nats."""
    clip_ratio_high: float | None = follows("actor_rollout_ref.actor.clip_ratio", ge=0)
    """Clip range above 1, in the same units."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual clip: largest loss of a token with a negative advantage, in multiples of the advantage's size.
    ``dppo_*``, ``aspo``: the largest ratio that counts."""
    tau_pos: float = Field(1.0, gt=0)
    """Temperature of ``sapo`` where the advantage is positive."""
    tau_neg: float = Field(1.05, gt=0)
    """Temperature of ``sapo`` where it is negative."""

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The clip ranges below and above 1, with ``clip_ratio`` for those that are null."""
        low, high = self.clip_ratio_low, self.clip_ratio_high
        return self.clip_ratio if low is None else low, self.clip_ratio if high is None else high


class PolicyLossOptions(StrictModel):
    """Options of losses in ``actor_rollout_ref.actor.policy_loss``."""

    dro_beta: float | None = Field(None, gt=0)
    """``dro``, which needs it: weight of the quadratic penalty."""
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """``clip_cov``: share of a mini-batch's tokens that is dropped, at least one."""
    clip_cov_lb: float = 1.0
    """``clip_cov``: covariance of advantage and log-prob above which a token may be dropped."""
    clip_cov_ub: float = 5.0
    """``clip_cov``: covariance below which a token may be dropped."""
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """``kl_cov``: share of a mini-batch's tokens that is penalised, at least one, by largest covariance."""
    ppo_kl_coef: float = Field(0.1, ge=0)
    """``kl_cov``: weight of the penalty on |log-prob − old log-prob|, per nat."""
    m2_threshold: float = Field(0.04, gt=0)
    """``m2po``: largest mean squared log-ratio of the kept tokens that go on in their direction, squared
    nats."""
    adv_ratio_target: float = Field(0.5, ge=0)
    """``bapo``: least weight of positive advantages, in multiples of that of negative ones."""
    ipo_eps: float = Field(0.3, gt=0, le=1)
    """``ipo``: largest change of a token's probability, up or down, within which it is trained on."""
    kl_tau: float = Field(0.0, ge=0)
    """``ipo``: weight of the squared log-ratio, per squared nat."""

    @model_validator(mode="after")
    def _some_covariance_is_between(self) -> "PolicyLossOptions":
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(
                "actor_rollout_ref.actor.policy_loss.clip_cov_lb must be below clip_cov_ub, got "
                f"{self.clip_cov_lb} and {self.clip_cov_ub}"
            )
        return self


class LossOptions(RatioOptions, PolicyLossOptions):
    """The options of all losses in one record, as the functions read them."""

    def without_penalties(self) -> Self:
        """The options without penalties, the terms of a loss that no advantage multiplies."""
        return self.model_copy(update={"dro_beta": 0.0, "kl_tau": 0.0})


@dataclass(frozen=True)
class LossOption:
    """An option that a loss reads."""

    key: str
    """Its name below ``actor_rollout_ref.actor``."""
    symbol: str
    """Its symbol in the formula."""
    condition: str = ""
    """The tokens on which it acts, in words. Empty for all."""
    is_required: bool = False
    """Whether losses that read it need a value. All other losses refuse one."""

    def value(self, actor: StrictModel) -> float | None:
        """Return its value in a section ``actor_rollout_ref.actor``."""
        value: float | None = attrgetter(self.key)(actor)
        return value

    def in_words(self, actor: StrictModel) -> str:
        """The option as text: symbol, value and key."""
        return f"{self.symbol} = {self.value(actor):g}{self.condition and ' ' + self.condition} ({self.key})"


@dataclass(frozen=True)
class LossSpec:
    """A policy loss."""

    title: str
    formula: str
    """The loss ℓ of a token, or of a row; sg[…] has no gradient."""
    source: str
    ratio: Literal["token", "row", "product", "penalty", "none"]
    """Use of the old policy: the ratio of each token, the geometric mean of a row's ratios, their product, a
    penalty alone, or none."""
    gradient_through: Literal["ratio", "log_prob"]
    """The factor that has the gradient: the ratio, or log π while the ratio is a constant."""
    options: tuple[LossOption, ...] = ()
    only_negative: tuple[LossOption, ...] = ()
    """Options that have an effect only where the advantage is negative."""
    aggregation: LossAggregation | None = None
    """The average that overrides ``loss_agg_mode``, if any."""
    is_per_row: bool = False
    """Whether a row has one term, and one weight: the geometric mean of its tokens' weights."""
    clips_by_probability: bool = False
    """Whether a token is clipped by its two probabilities, not by their ratio alone."""
    reads_mini_batch: bool = False
    """Whether it depends on the whole mini-batch, which a pass without gradient reads first."""
    clipped: str | None = None
    """The tokens that ``actor/pg_clipfrac`` counts. None if it is not reported."""
    clipped_lower: str | None = None
    """The tokens that ``actor/pg_clipfrac_lower`` counts. None if it is not reported."""
    ppo_kl: Literal["clamped", "whole", "distance", "none"] = "clamped"
    """Values that ``actor/ppo_kl`` averages: old − current log-prob, clamped to ±20 nats as in the ratio, or
    whole; its absolute value; or none."""
    is_loss_mode: bool = True
    """Whether ``policy_loss.loss_mode`` chooses it. False: ``algorithm.rollout_correction.loss_type``
    does."""

    @property
    def is_of_tokens(self) -> bool:
        """Whether a token's share of the loss depends on no other token."""
        return self.ratio not in ("row", "product") and not self.is_per_row and not self.reads_mini_batch

    @property
    def reads_old_log_probs(self) -> bool:
        """Whether the loss reads the log-probs of the policy before the update."""
        return self.ratio != "none"


_LOW, _HIGH = LossOption("clip_ratio_low", "ε_low"), LossOption("clip_ratio_high", "ε_high")
_CAP = LossOption("clip_ratio_c", "c")
_TAU_POS, _TAU_NEG = LossOption("tau_pos", "τ", "where A > 0"), LossOption("tau_neg", "τ", "elsewhere")
_SURROGATE = "max(−A r, −A clip(r, 1−ε_low, 1+ε_high))"

_NO_TOKEN = "no token"

POLICY_LOSSES: Mapping[str, LossSpec] = {
    "vanilla": LossSpec(
        title="PPO's clipped surrogate with dual clip",
        formula=f"{_SURROGATE}, and at most −A c where A < 0",
        source="arXiv:1707.06347, arXiv:1912.09729",
        ratio="token",
        gradient_through="ratio",
        options=(_LOW, _HIGH, _CAP),
        only_negative=(_LOW, _CAP),
        clipped="−A clip(r, 1−ε_low, 1+ε_high) > −A r",
        clipped_lower="A < 0 and r > c",
    ),
    "up": LossSpec(
        title="Unbounded positive asymmetric optimisation",
        formula="−A with the gradient of −A log π(y) where A > 0; elsewhere −A r, at least −A (1−ε_low) and "
        "at most −A c",
        source="arXiv:2607.06987, UP-GRPO",
        ratio="token",
        gradient_through="ratio",
        options=(_LOW, _CAP),
        only_negative=(_LOW, _CAP),
        clipped="A < 0 and r < 1−ε_low",
        clipped_lower="A < 0 and r > c",
    ),
    "gspo": LossSpec(
        title="Group sequence policy optimisation",
        formula="max(−A s, −A clip(s, 1−ε_low, 1+ε_high))",
        source="arXiv:2507.18071",
        ratio="row",
        gradient_through="ratio",
        options=(_LOW, _HIGH),
        only_negative=(_LOW,),
        ppo_kl="whole",
        clipped="−A clip(s, 1−ε_low, 1+ε_high) > −A s",
        clipped_lower=_NO_TOKEN,
    ),
    "luspo": LossSpec(
        title="Length-unbiased sequence policy optimisation",
        formula="max(−A s, −A clip(s, 1−ε_low, 1+ε_high)), s as in gspo",
        source="arXiv:2602.05261, TRL",
        ratio="row",
        gradient_through="ratio",
        options=(_LOW, _HIGH),
        only_negative=(_LOW,),
        aggregation="seq-mean-token-sum",
        ppo_kl="whole",
        clipped="−A clip(s, 1−ε_low, 1+ε_high) > −A s",
        clipped_lower=_NO_TOKEN,
    ),
    "gpg": LossSpec(
        title="Group policy gradient",
        formula="−A log π(y)",
        source="arXiv:2504.02546",
        ratio="none",
        gradient_through="log_prob",
        ppo_kl="none",
    ),
    "cispo": LossSpec(
        title="Clipped importance-sampling policy optimisation",
        formula="−A sg[clip(r, 1−ε_low, 1+ε_high)] log π(y)",
        source="arXiv:2506.13585",
        ratio="token",
        gradient_through="log_prob",
        options=(_LOW, _HIGH),
        clipped="r < 1−ε_low or r > 1+ε_high",
        clipped_lower=_NO_TOKEN,
    ),
    "geo_mean": LossSpec(
        title="Geometric-mean policy optimisation",
        formula="−Ā exp(mean over the row of d), d = log r, at most ε_high where A > 0 and at least −ε_low "
        "where A < 0",
        source="arXiv:2507.20673",
        ratio="row",
        gradient_through="ratio",
        options=(_LOW, _HIGH),
        only_negative=(_LOW,),
        aggregation="seq-mean-token-sum",
        is_per_row=True,
        clipped="A > 0 and log r outside −ε_low to ε_high",
        clipped_lower="A < 0 and log r outside −ε_low to ε_high",
    ),
    "sapo": LossSpec(
        title="Soft adaptive policy optimisation",
        formula="−A (4/τ) sigmoid(τ (r − 1))",
        source="arXiv:2511.20347",
        ratio="token",
        gradient_through="ratio",
        options=(_TAU_POS, _TAU_NEG),
        only_negative=(_TAU_NEG,),
        aggregation="seq-mean-token-mean",
        clipped=_NO_TOKEN,
        clipped_lower=_NO_TOKEN,
    ),
    "clip_cov": LossSpec(
        title="Clip-Cov",
        formula=f"{_SURROGATE}, and 0 for a drawn share of the tokens with cov_low < C < cov_high",
        source="arXiv:2505.22617",
        ratio="token",
        gradient_through="ratio",
        options=(
            _LOW,
            _HIGH,
            LossOption("policy_loss.clip_cov_ratio", "share"),
            LossOption("policy_loss.clip_cov_lb", "cov_low"),
            LossOption("policy_loss.clip_cov_ub", "cov_high"),
        ),
        only_negative=(_LOW,),
        reads_mini_batch=True,
        clipped="tokens left out of the loss",
    ),
    "kl_cov": LossSpec(
        title="KL-Cov",
        formula="−A r, plus κ |log π(y) − log π_old(y)| for the share of the tokens with the largest C",
        source="arXiv:2505.22617",
        ratio="token",
        gradient_through="ratio",
        options=(LossOption("policy_loss.kl_cov_ratio", "share"), LossOption("policy_loss.ppo_kl_coef", "κ")),
        reads_mini_batch=True,
        ppo_kl="distance",
    ),
    "dppo_tv": LossSpec(
        title="Divergence PPO with total variation",
        formula="−A sg[min(r, c)] log π(y), while π(y) − π_old(y) has not moved by more than ε_high up or "
        "ε_low down",
        source="arXiv:2602.04879",
        ratio="token",
        gradient_through="log_prob",
        options=(_LOW, _HIGH, _CAP),
        only_negative=(_LOW,),
        clips_by_probability=True,
        clipped="A > 0 and π − π_old > ε_high, or A ≤ 0 and π − π_old < −ε_low",
        clipped_lower="other tokens with r > c",
    ),
    "dppo_kl": LossSpec(
        title="Divergence PPO with the binary KL divergence",
        formula="−A sg[min(r, c)] log π(y), while the binary KL of π_old(y) and π(y) is not above ε_high up "
        "or ε_low down",
        source="arXiv:2602.04879",
        ratio="token",
        gradient_through="log_prob",
        options=(_LOW, _HIGH, _CAP),
        only_negative=(_LOW,),
        clips_by_probability=True,
        clipped="A > 0, π > π_old and KL > ε_high, or A ≤ 0, π < π_old and KL > ε_low; KL = binary KL of "
        "π_old and π",
        clipped_lower="other tokens with r > c",
    ),
    "m2po": LossSpec(
        title="Second-moment trust policy optimisation",
        formula="−A r. Of the tokens that go on in their direction (A > 0, r > 1 or A < 0, r < 1) those with "
        "the largest (log r)² have 0, so many that the mean of the others is at most τ",
        source="arXiv:2510.01161, AReaL",
        ratio="token",
        gradient_through="ratio",
        options=(LossOption("policy_loss.m2_threshold", "τ"),),
        reads_mini_batch=True,
        clipped="tokens left out of the loss",
    ),
    "bapo": LossSpec(
        title="Balanced policy optimisation with an adaptive clip",
        formula="max(−A r, −A clip(r, low, high)), and at most −A c where A < 0; low is moved from 0.6 to "
        "0.9, and high raised from 1.2 by 0.05, at most to 3, until the positive terms weigh κ times the "
        "negative ones",
        source="arXiv:2510.18927, WooooDyy/BAPO",
        ratio="token",
        gradient_through="ratio",
        options=(
            LossOption("policy_loss.adv_ratio_target", "κ"),
            _CAP,
        ),
        only_negative=(_CAP,),
        reads_mini_batch=True,
        clipped="−A clip(r, low, high) > −A r",
        clipped_lower="A < 0 and r > c",
    ),
    "ipo": LossSpec(
        title="Prime-rl's loss of that name, its default since August 2026",
        formula="−A r, while |π(y) − π_old(y)| ≤ ε, plus τ (log r)²",
        source="prime-rl, ipo_loss",
        ratio="token",
        gradient_through="ratio",
        options=(LossOption("policy_loss.ipo_eps", "ε"), LossOption("policy_loss.kl_tau", "τ")),
        clips_by_probability=True,
        clipped="|π − π_old| > ε",
        clipped_lower=_NO_TOKEN,
    ),
    "aspo": LossSpec(
        title="Asymmetric importance sampling policy optimisation",
        formula="−A sg[min(1/r, c)] log π(y) where A > 0, while r ≤ 1+ε_high; −A sg[min(r, c)] log π(y) "
        "elsewhere, while r ≥ 1−ε_low",
        source="arXiv:2510.06062, Archer2.0",
        ratio="token",
        gradient_through="log_prob",
        options=(_LOW, _HIGH, _CAP),
        only_negative=(_LOW,),
        clipped="A > 0 and r > 1+ε_high, or A ≤ 0 and r < 1−ε_low",
        clipped_lower="other tokens with 1/r > c where A > 0, r > c where A ≤ 0",
    ),
    "topr": LossSpec(
        title="Tapered off-policy REINFORCE",
        formula="−A log π(y) where A > 0, −A sg[min(s, 1)] log π(y) elsewhere; s = product of the row's r",
        source="arXiv:2503.14286",
        ratio="product",
        gradient_through="log_prob",
        clipped=_NO_TOKEN,
        clipped_lower="A < 0 and s > 1",
    ),
    "vespo": LossSpec(
        title="Variational sequence-level soft policy optimisation",
        formula="−A sg[s^k e^(λ − λ s)] log π(y), s = product of the row's r; k = 2 and λ = 3 where A ≥ 0, "
        "else k = 3 and λ = 2",
        source="arXiv:2602.10693, TRL",
        ratio="product",
        gradient_through="log_prob",
        clipped=_NO_TOKEN,
        clipped_lower=_NO_TOKEN,
    ),
    "dro": LossSpec(
        title="Direct reward optimisation",
        formula="−A log π(y) + β/2 (log π(y) − log π_old(y))²",
        source="arXiv:2405.19107",
        ratio="penalty",
        gradient_through="log_prob",
        options=(LossOption("policy_loss.dro_beta", "β", is_required=True),),
        ppo_kl="whole",
    ),
    "reinforce": LossSpec(
        title="REINFORCE with importance weights",
        formula="−A log π(y)",
        source="Williams 1992, arXiv:1205.4839",
        ratio="none",
        gradient_through="log_prob",
        is_loss_mode=False,
        ppo_kl="whole",
    ),
}
"""Every policy loss that a configuration can choose by name."""
LOSS_MODES = tuple(name for name, spec in POLICY_LOSSES.items() if spec.is_loss_mode)
"""Names for ``actor.policy_loss.loss_mode``."""
LOSS_OPTIONS = tuple(dict.fromkeys(option for spec in POLICY_LOSSES.values() for option in spec.options))
"""Every option that some loss reads."""

EstimatorInput = Literal[
    "group_ids",
    "values",
    "reward_baselines",
    "component_scores",
    "old_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
]
"""Arguments of ``compute_advantages`` that some estimators read."""
EstimatorOption = Literal[
    "gamma", "lam", "norm_adv_by_std_in_grpo", "turn_credit", "gdpo_reward_keys", "gdpo_reward_weights"
]
"""Keys of ``algorithm`` that some estimators read."""


@dataclass(frozen=True)
class EstimatorSpec:
    """An advantage estimator. It reads ``response_mask`` and the rewards of tokens, and what ``inputs``
    names."""

    title: str
    formula: str
    """The advantage A of a token; s is the row's score, g its group: the rows that answer the same prompt."""
    source: str
    inputs: tuple[EstimatorInput, ...] = ()
    """With ``group_ids`` it compares the rows of a prompt. ``component_scores`` replace rewards, and so a KL
    penalty in them. ``rollout_is_weights`` come only where there are any."""
    options: tuple[EstimatorOption, ...] = ()
    never_negative: bool = False
    """Whether no advantage is below 0."""
    needs_several_samples: bool = False
    """Whether a row alone in its group gets 0. All other estimators that compare rows give it its own score,
    as in verl."""
    subtracts_total: bool = False
    """Whether it subtracts the score of a whole response from returns to go. Rewards of turns then count at
    the end of the response, as their sum; else a late turn would have to earn again what earlier turns have
    earned."""
    whitens: bool = False
    """Whether advantages are whitened over the batch, once the function has estimated them."""
    spans_batch: bool = False
    """Whether the function looks at more than the rows of a prompt: it then gets the batch as one grid."""
    same_as: str | None = None
    """The estimator that this name is an alias of, if any."""

    @property
    def compares_groups(self) -> bool:
        """Whether the rows of a prompt are compared."""
        return "group_ids" in self.inputs


_GRPO = EstimatorSpec(
    title="Group-relative advantages; Dr. GRPO without the division",
    formula="(s − mean_g) / (std_g + 1e-6); undivided without norm_adv_by_std_in_grpo",
    source="arXiv:2402.03300, arXiv:2503.20783",
    inputs=("group_ids",),
    options=("norm_adv_by_std_in_grpo", "turn_credit"),
)
_RLOO = EstimatorSpec(
    title="Leave-one-out baseline",
    formula="s − mean of the group's other scores",
    source="arXiv:2402.14740",
    inputs=("group_ids",),
    options=("turn_credit",),
)
_TOKEN_BASELINE = EstimatorSpec(
    title="Optimal token baseline",
    formula="G_t − Σ_g W_t G_t / Σ_g W_t, W_t = Σ_{u≤t} (1 − 2 π_u + Σ_v π_u(v)²) w_u²; G_t = r_t + G_{t+1}",
    source="arXiv:2602.07078",
    inputs=("group_ids", "old_log_probs", "sum_pi_squared", "rollout_is_weights"),
)

ADVANTAGE_ESTIMATORS: Mapping[str, EstimatorSpec] = {
    "gae": EstimatorSpec(
        title="Generalised advantage estimation",
        formula="δ_t + γ λ A_{t+1}, δ_t = r_t + γ V_{t+1} − V_t; whitened over the batch",
        source="arXiv:1506.02438",
        inputs=("values",),
        options=("gamma", "lam"),
        whitens=True,
    ),
    "grpo": _GRPO,
    "grpo_passk": EstimatorSpec(
        title="Pass@k training",
        formula="(s_max − s_second) / (std_g + 1e-6) for the best row, 0 for others; undivided without "
        "norm_adv_by_std_in_grpo",
        source="arXiv:2503.19595",
        inputs=("group_ids",),
        options=("norm_adv_by_std_in_grpo",),
        never_negative=True,
        needs_several_samples=True,
    ),
    "rloo": _RLOO,
    "reinforce_plus_plus": EstimatorSpec(
        title="REINFORCE++",
        formula="G_t = r_t + γ G_{t+1}; whitened over the batch",
        source="arXiv:2501.03262",
        options=("gamma",),
        whitens=True,
    ),
    "reinforce_plus_plus_baseline": EstimatorSpec(
        title="REINFORCE++ with baseline",
        formula="s − mean_g; whitened over the batch",
        source="arXiv:2501.03262",
        inputs=("group_ids",),
        options=("turn_credit",),
        whitens=True,
    ),
    "remax": EstimatorSpec(
        title="ReMax",
        formula="G_t − score of the prompt's greedy response; G_t = r_t + G_{t+1}",
        source="arXiv:2310.10505",
        inputs=("reward_baselines",),
        subtracts_total=True,
    ),
    "opo": EstimatorSpec(
        title="Length-weighted baseline",
        formula="s − Σ_g n s / Σ_g n, n = response tokens of a row",
        source="arXiv:2505.23585",
        inputs=("group_ids",),
        needs_several_samples=True,
    ),
    "gpg": EstimatorSpec(
        title="Group policy gradient",
        formula="α (s − mean_g), α = rows / rows whose score is not 0",
        source="arXiv:2504.02546",
        inputs=("group_ids",),
        spans_batch=True,
    ),
    "gdpo": EstimatorSpec(
        title="Parts of the reward, normalised one by one",
        formula="Σ_k w_k (s_k − mean_g) / (std_g + 1e-6); whitened over the batch",
        source="arXiv:2601.05242",
        inputs=("group_ids", "component_scores"),
        options=("gdpo_reward_keys", "gdpo_reward_weights"),
        whitens=True,
    ),
    "optimal_token_baseline": _TOKEN_BASELINE,
    "tir_optimal_token_baseline": replace(
        _TOKEN_BASELINE, title="Optimal token baseline, response tokens lined up across tool output"
    ),
    "grpo_vectorized": replace(_GRPO, same_as="grpo"),
    "rloo_vectorized": replace(
        _RLOO,
        title="Leave-one-out baseline, as verl's second implementation of it",
        needs_several_samples=True,
    ),
}
"""Names for ``algorithm.adv_estimator``."""
