"""Every accepted option of rollout correction changes the loss or its gradient, or is listed here with what
it is for."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from batches_of_ones import ones_rollouts
from planned_runs import corrected
from pydantic import ValidationError
from ragged_rows import padded_step_of
from small_models import small_run_config

from verl_rc.algorithm.losses import Aggregation
from verl_rc.algorithm.ppo.control import Control
from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.objective import policy_objective
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.errors import ConfigError
from verl_rc.config.rollout_correction import REJECTION_RULES, WEIGHT_LEVELS, RolloutCorrectionConfig
from verl_rc.correction import NonFiniteLogProbError, measure, require_finite
from verl_rc.records.batches import PolicyEvaluations, RolloutBatch, TokenScores, positions_mask
from verl_rc.records.heads import head_column
from verl_rc.records.scored_batch import ScoredBatch

METRICS_ONLY = {"diagnostics"}
"""Options that change what is measured, never what is trained on."""
RUN_CONTROL = {"nonfinite_stop_fraction"}
"""Options that decide when a run stops."""
LEARNING_RATE = {"scale_lr_by_ess"}
"""Options that change how far an update goes."""
NEXT_STEP = {"rollout_rs_target_acceptance"}
"""Options that act on the steps after the one they see."""

Fields = dict[str, object]
Outcome = tuple[bytes, ...]
Choice = tuple[tuple[object, ...], ...]
Batch = tuple[RolloutBatch, PolicyEvaluations, torch.Tensor]

ROWS, WIDTH, GROUP = 320, 8, 4

BOUNDS: Mapping[str, tuple[object, object]] = {
    "token_k1": (1.4, "0.4_1.4"),
    "token_k2": (0.1, 0.3),
    "token_k3": (0.1, 0.3),
    "seq_sum_k1": (1.6, "0.4_1.6"),
    "seq_sum_k2": (0.4, 0.8),
    "seq_sum_k3": (0.4, 0.8),
    "seq_mean_k1": (1.1, "0.7_1.1"),
    "seq_mean_k2": (0.06, 0.12),
    "seq_mean_k3": (0.06, 0.12),
    "seq_max_k2": (0.2, 0.5),
    "seq_max_k3": (0.2, 0.4),
    "token_tv": (0.1, 0.2),
    "token_bkl": (0.05, 0.1),
    "token_kpop": (0.05, 0.1),
    "seq_max_tv": (0.1, 0.2),
    "seq_max_bkl": (0.05, 0.1),
    "turn_sum_k1": (1.6, "0.4_1.6"),
    "turn_mean_k1": (1.1, "0.7_1.1"),
}
"""Two bounds for every rule, of which each rejects something the other keeps."""

REJECTIONS: list[Fields] = [
    {},
    *(
        {"rollout_rs": rule, "rollout_rs_threshold": bound}
        for rule, bounds in BOUNDS.items()
        for bound in bounds
    ),
    {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "1.6,0.06"},
    {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.4_1.6,0.12"},
    {"rollout_rs": "seq_max_k2,seq_sum_k1,token_tv", "rollout_rs_threshold": "0.5,0.4_1.6,0.2"},
]

AXES: Mapping[str, list[Fields]] = {
    "rollout_is": [{"rollout_is": level} for level in (None, *WEIGHT_LEVELS)],
    "rollout_is_threshold": [{"rollout_is_threshold": bound} for bound in (2.0, 1.2, "0.8_1.2", "0.85_1.6")],
    "rollout_is_batch_normalize": [{"rollout_is_batch_normalize": value} for value in (False, True)],
    "rejection": [REJECTIONS[0], REJECTIONS[1], REJECTIONS[2], REJECTIONS[17], REJECTIONS[-1]],
    "rollout_token_veto_threshold": [{"rollout_token_veto_threshold": value} for value in (None, 0.6, 0.4)],
    "rollout_opsm_threshold": [{"rollout_opsm_threshold": value} for value in (None, 0.02, 0.1)],
    "bypass_mode": [{"bypass_mode": value} for value in (False, True)],
    "proximal": [{"proximal": value} for value in ("recompute", "interpolate")],
    "loss_type": [{"loss_type": value} for value in ("ppo_clip", "reinforce", "topr")],
    "rejection_denominator": [{"rejection_denominator": value} for value in ("original", "kept")],
    "rejected_in_group_baseline": [{"rejected_in_group_baseline": value} for value in ("include", "exclude")],
    "score_centering": [
        {"score_centering": value}
        for value in (
            {"enabled": False},
            {"enabled": True, "top_k": 3},
            {"enabled": True, "top_k": 3, "tail": "none"},
        )
    ],
    "nonfinite_logprob": [
        {"nonfinite_logprob": value} for value in ("reject_sequence", "reject_token", "neutral", "raise")
    ],
}
"""Values of every option that must have an effect; a rule and its bounds are one choice."""

BASES: Mapping[str, Fields] = {
    "nothing": {},
    "decoupled": {
        "rollout_is": "token",
        "rollout_rs": "seq_mean_k3",
        "rollout_rs_threshold": 0.12,
        "rollout_token_veto_threshold": 0.4,
        "rejection_denominator": "kept",
    },
    "bypass": {
        "bypass_mode": True,
        "loss_type": "reinforce",
        "rollout_is": "sequence",
        "rollout_rs": "token_k2",
        "rollout_rs_threshold": 0.3,
        "rollout_opsm_threshold": 0.1,
    },
}
"""What all other options are while two are walked."""
UNREACHABLE: Mapping[str, set[str]] = {"bypass": {"rejected_in_group_baseline", "proximal"}}
"""Options of which only one value is accepted next to that base."""


def is_metrics_only(option: str, fields: Fields) -> bool:
    """What has no effect in a combination that is accepted all the same, each with its reason."""
    own_ratio = bool(fields.get("bypass_mode")) and fields.get("loss_type", "ppo_clip") != "reinforce"
    # The loss's ratio is itself train over rollout: weights serve rollout_is_* only (preset ppo_is_bypass).
    return own_ratio and option in ("rollout_is", "rollout_is_threshold")


def make_batch(*, broken: bool) -> Batch:
    """Groups of rows whose gap goes from almost none to large, some of one token, one empty, some of two
    turns; and their scores."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    lengths[5], lengths[9], lengths[:4] = 0, 1, WIDTH
    mask = positions_mask(lengths, WIDTH)
    mask[10::2, 3] = False
    scale = torch.tensor([0.05, 0.2, 0.4, 0.8]).repeat(ROWS // GROUP)[:, None]
    shift = 0.3 * torch.randn(ROWS, 1, generator=generator)
    rollout = -2.5 * torch.rand(ROWS, WIDTH, generator=generator) - 0.05
    ratios = scale * (torch.randn(ROWS, WIDTH, generator=generator) + shift)
    ratios[:4] = 0.02
    ratios[torch.arange(4), torch.arange(4)] = -0.95  # what a veto rejects and means over rows do not see
    proximal = torch.where(mask, rollout + ratios, 0.0)
    rollout = torch.where(mask, rollout, 0.0)
    if broken:
        rollout[6::20, 0], rollout[11::25, 0] = -torch.inf, torch.nan
    evaluations = PolicyEvaluations(
        proximal_log_probs=proximal, entropies=torch.zeros(ROWS, WIDTH), batch_size=[ROWS]
    )
    rollouts = ones_rollouts(rollout, lengths, GROUP)
    rollouts.response_mask = mask
    # Heads of three tokens with probabilities 0.5, 0.3 and 0.1 beside every response token.
    head = head_column(np.array([[1, 2, 3]]), np.log([[0.5, 0.3, 0.1]]))
    rollouts.tokens.head_counts = torch.where(mask, 6, 0)
    rollouts.tokens.head_ids = torch.from_numpy(np.tile(head.values, (ROWS, WIDTH)))
    return rollouts, evaluations, torch.randn(ROWS, generator=generator)


FINITE, BROKEN = make_batch(broken=False), make_batch(broken=True)
"""One batch with finite log-probs, and the same with some rollout log-probs that are not."""


def outcome_of(config: RolloutCorrectionConfig) -> Outcome:
    """What training on both batches comes to."""
    return (*train_on(config, *FINITE), *train_on(config, *BROKEN))


def outcome_unmeasured(config: RolloutCorrectionConfig) -> Outcome:
    """The same, with the few metrics that take the least time.

    A synchronous batch has the versions that interpolation reads with full diagnostics alone.
    """
    diagnostics = "full" if config.proximal == "interpolate" else "core"
    return outcome_of(config.model_copy(update={"diagnostics": diagnostics}))


def train_on(
    config: RolloutCorrectionConfig,
    rollouts: RolloutBatch,
    evaluations: PolicyEvaluations,
    scores: torch.Tensor,
) -> Outcome:
    """Loss and gradient of one mini-batch, as the actor computes them; the error's name where one is
    raised."""
    algorithm = AlgorithmConfig(
        adv_estimator="grpo", norm_adv_by_std_in_grpo=False, rollout_correction=config
    )
    if config.mode != "decoupled":
        evaluations = evaluations.clone()
        evaluations.proximal_log_probs = None
    proximal = FINITE[1].proximal_log_probs
    try:
        batch = padded_step_of(
            ScoredBatch(rollouts, scores),
            evaluations,
            algorithm,
            corrector_of(config),
            kl_coef=0.0,
            current_version=0,
        ).batch
        noise = torch.randn(proximal.shape, generator=torch.Generator().manual_seed(5))
        log_probs = proximal + (0.0 if config.bypass_mode else 0.1) * noise
        batch, (num_tokens, num_sequences) = corrected(batch, log_probs, config)
    except NonFiniteLogProbError as error:
        return (type(error).__name__.encode(),)
    log_probs.requires_grad_()
    totals = Aggregation("token-mean", num_tokens=num_tokens, num_sequences=num_sequences)
    candidates = torch.tensor([0.4, 0.3, 0.2]).log().repeat(*log_probs.shape, 1).requires_grad_()
    scores = TokenScores(log_probs, torch.zeros_like(log_probs), candidate_log_probs=candidates)
    loss = policy_objective(scores, batch, ACTOR, config, totals).loss
    loss.backward()
    assert log_probs.grad is not None
    gradients = [tensor.grad for tensor in (log_probs, candidates) if tensor.grad is not None]
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    return tuple(tensor.detach().numpy().tobytes() for tensor in (loss, *gradients))


ACTOR = small_run_config(Path("unused")).actor_rollout_ref.actor


def accepted(fields: Fields) -> RolloutCorrectionConfig | None:
    """The configuration, or None where it is refused."""
    try:
        return RolloutCorrectionConfig.model_validate(fields)
    except ValidationError:
        return None


def choices(base: Fields) -> Iterable[Fields]:
    """All values of every two axes on top of ``base``; the axes not walked stay as they are."""
    for first, second in itertools.combinations(AXES, 2):
        for one, two in itertools.product(AXES[first], AXES[second]):
            others = {
                key: value for key, value in base.items() if key not in (*keys_of(first), *keys_of(second))
            }
            yield {**others, **one, **two}


def keys_of(axis: str) -> tuple[str, ...]:
    return ("rollout_rs", "rollout_rs_threshold") if axis == "rejection" else (axis,)


def key_of(config: RolloutCorrectionConfig) -> Choice:
    """The values of all axes, in their order."""
    return tuple(tuple(getattr(config, name) for name in keys_of(axis)) for axis in AXES)


def without_effect(outcomes: Mapping[Choice, Outcome], axis: str) -> list[str]:
    """Pairs of accepted configurations that differ in one axis alone and train the same."""
    position = list(AXES).index(axis)
    alike: dict[Choice, dict[Outcome, object]] = defaultdict(dict)
    found, compared = [], 0
    names = [name for each in AXES for name in keys_of(each)]
    for key, outcome in outcomes.items():
        fields = dict(zip(names, itertools.chain(*key), strict=True))
        if is_metrics_only(axis, fields):
            continue
        seen = alike[key[:position] + key[position + 1 :]]
        compared += len(seen)
        if outcome in seen:
            found.append(f"{axis}: {key[position]} as {seen[outcome]} with {fields}")
        seen[outcome] = key[position]
    assert compared, f"nothing was compared for {axis}"
    return found


@pytest.mark.parametrize("base", list(BASES))
def test_every_change_of_one_option_has_an_effect(base: str) -> None:
    outcomes: dict[Choice, Outcome] = {}
    for fields in choices(BASES[base]):
        config = accepted(fields)
        if config is not None and key_of(config) not in outcomes:
            outcomes[key_of(config)] = outcome_unmeasured(config)
    assert len(outcomes) > 150
    walked = [axis for axis in AXES if axis not in UNREACHABLE.get(base, ())]
    assert [text for axis in walked for text in without_effect(outcomes, axis)] == []


@pytest.mark.parametrize(
    "mode",
    [{}, {"proximal": "interpolate"}, {"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce"}],
    ids=str,
)
def test_every_rule_and_every_bound_rejects_something_else(mode: Fields) -> None:
    assert set(BOUNDS) == set(REJECTION_RULES)
    outcomes = [
        outcome_unmeasured(RolloutCorrectionConfig.model_validate({**mode, **rejection}))
        for rejection in REJECTIONS
    ]
    assert len(set(outcomes)) == len(REJECTIONS)


def test_every_field_is_walked_or_listed() -> None:
    walked = {key for axis in AXES for key in keys_of(axis)}
    listed = METRICS_ONLY | RUN_CONTROL | LEARNING_RATE | NEXT_STEP
    assert walked | listed == set(RolloutCorrectionConfig.model_fields)
    assert not walked & listed


def metric_names(fields: Fields) -> dict[str, float]:
    rollouts, evaluations, _ = FINITE
    config = RolloutCorrectionConfig.model_validate(fields)
    mask = rollouts.response_mask
    return measure(evaluations.proximal_log_probs, rollouts.rollout_log_probs, mask, config).metrics(config)


METRICS_CHANGES: list[tuple[Fields, Fields]] = [
    ({}, {"diagnostics": "core"}),
    ({"bypass_mode": True}, {"bypass_mode": True, "rollout_is": "sequence"}),
    (
        {"bypass_mode": True, "rollout_is": "token"},
        {"bypass_mode": True, "rollout_is": "token", "rollout_is_threshold": 1.2},
    ),
]


@pytest.mark.parametrize(("one", "other"), METRICS_CHANGES, ids=str)
def test_metrics_only_options_change_metrics_and_nothing_else(one: Fields, other: Fields) -> None:
    first, second = (outcome_of(RolloutCorrectionConfig.model_validate(fields)) for fields in (one, other))
    assert first == second
    assert metric_names(one) != metric_names(other)


def test_run_control_decides_when_a_run_stops() -> None:
    require_finite(0.02, RolloutCorrectionConfig(nonfinite_stop_fraction=0.03))
    with pytest.raises(NonFiniteLogProbError):
        require_finite(0.02, RolloutCorrectionConfig(nonfinite_stop_fraction=0.01))


@pytest.mark.parametrize("rule", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_a_target_acceptance_moves_the_next_steps_threshold(rule: str) -> None:
    outcomes = set()
    for target in (None, 0.5, 0.9):
        fields: Fields = {"rollout_rs": rule, "rollout_rs_threshold": 1.3, "diagnostics": "full"}
        config = RolloutCorrectionConfig.model_validate({**fields, "rollout_rs_target_acceptance": target})
        algorithm = AlgorithmConfig(adv_estimator="grpo", rollout_correction=config)
        control, (rollouts, evaluations, scores) = Control.from_config(algorithm), FINITE
        for _ in range(2):
            mode = corrector_of(control.correction(config))
            step = padded_step_of(ScoredBatch(rollouts, scores), evaluations, algorithm, mode, 0.0, 0)
            control = control.after_correction(step.measured)
        outcomes.add(step.batch.loss_mask.numpy().tobytes())
    assert len(outcomes) == 3


CANNOT_BITE: Mapping[str, tuple[Fields, str]] = {
    "threshold without weights": ({"rollout_is_threshold": 3.0}, "bounds nothing"),
    "normalised weights in PPO clip": (
        {"bypass_mode": True, "rollout_is": "token", "rollout_is_batch_normalize": True},
        "takes no weights",
    ),
    "stop fraction next to raise": (
        {"nonfinite_logprob": "raise", "nonfinite_stop_fraction": 0.5},
        "never read",
    ),
    "total variation up to 1": (
        {"rollout_rs": "token_tv", "rollout_rs_threshold": 1.0},
        "below 1,",
    ),
    "binary KL above its largest value": (
        {"rollout_rs": "seq_max_bkl", "rollout_rs_threshold": 19.0},
        "below 18.5,",
    ),
    "k2 above the safety bound's": (
        {"rollout_rs": "token_k2", "rollout_rs_threshold": 201.0},
        "below 200,",
    ),
}
"""Combinations that would have no effect, and a part of what the refusal says."""


@pytest.mark.parametrize("name", list(CANNOT_BITE))
def test_what_cannot_bite_is_refused(name: str) -> None:
    fields, reason = CANNOT_BITE[name]
    with pytest.raises(ValidationError, match=reason):
        RolloutCorrectionConfig.model_validate(fields)


def test_a_denominator_of_a_sum_is_refused() -> None:
    overrides = ["rejection_denominator=kept", "rollout_rs=token_k2", "rollout_rs_threshold=0.1"]
    with pytest.raises(ConfigError):
        small_run_config(
            Path("unused"),
            "actor_rollout_ref.actor.loss_agg_mode=token-sum",
            *(f"algorithm.rollout_correction.{override}" for override in overrides),
        )


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("broken", [-torch.inf, torch.nan])
def test_a_neutral_token_counts_as_ratio_one(broken: float, bypass: bool) -> None:
    """In bypass mode the engine's log-prob is in the ratio, else that of the proximal policy."""
    rollouts, evaluations, scores = make_batch(broken=False)
    (rollouts.rollout_log_probs if bypass else evaluations.proximal_log_probs)[1, 0] = broken
    config = RolloutCorrectionConfig(bypass_mode=bypass, nonfinite_logprob="neutral")
    parts = train_on(config, rollouts, evaluations, scores)
    loss, gradient = (torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts)
    assert torch.isfinite(loss).all()
    assert gradient.view(ROWS, WIDTH)[1, 0] != 0
