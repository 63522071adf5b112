"""Losses of micro-batches against float64 loops, what some need of their mini-batch, and bypass mode's
correction."""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from bypass_cases import CASES, case_batch, case_config, case_id
from small_models import add_heads, make_train_batch, small_run_config
from torch import Tensor

from verl_rc.algorithm.losses import Aggregation, MiniBatchStatistics, PolicyLossInputs, mini_batch_statistics
from verl_rc.algorithm.losses.selection import selection_scores
from verl_rc.algorithm.ppo.choices import mini_batch_loss_name, needs_statistics_first
from verl_rc.algorithm.ppo.in_actor import corrected_current, loss_counts, with_interpolated_proximal
from verl_rc.algorithm.ppo.objective import policy_objective, statistics_inputs, value_objective
from verl_rc.config.models import ActorConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.records.batches import CriticBatch, TokenScores, TrainBatch
from verl_rc.records.heads import heads

LENGTHS, REJECTED = [7, 2, 5, 0, 1, 6], (2,)


def correction(denominator: str = "original", **fields: object) -> RolloutCorrectionConfig:
    rule = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0} if denominator == "kept" else {}
    return RolloutCorrectionConfig.model_validate({**rule, "rejection_denominator": denominator, **fields})


def objective_of(
    batch: TrainBatch, log_probs: torch.Tensor, entropies: torch.Tensor, denominator: str
) -> torch.Tensor:
    actor = small_run_config(
        Path("unused"), "actor_rollout_ref.actor.entropy_coeff=0.1"
    ).actor_rollout_ref.actor
    counted = batch.loss_mask if denominator == "kept" else batch.response_mask
    totals = Aggregation(
        "token-mean", num_tokens=int(counted.sum()), num_sequences=int(counted.any(-1).sum())
    )
    return policy_objective(
        TokenScores(log_probs, entropies), batch, actor, correction(denominator), totals
    ).loss


def expected_loss(
    batch: TrainBatch, log_probs: torch.Tensor, entropies: torch.Tensor, denominator: str
) -> float:
    """PPO clip (0.2, dual clip 3) times weight, less 0.1 x entropy, over kept tokens, by the tokens that
    count."""
    total = 0.0
    weights = batch.rollout_is_weights
    assert weights is not None
    for row, column in batch.loss_mask.nonzero().tolist():
        advantage = float(batch.advantages[row, column])
        ratio = math.exp(float(log_probs[row, column]) - float(batch.old_log_probs[row, column]))
        loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
        if advantage < 0:
            loss = min(loss, -3.0 * advantage)
        total += loss * float(weights[row, column]) - 0.1 * float(entropies[row, column])
    return total / int((batch.loss_mask if denominator == "kept" else batch.response_mask).sum())


@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_loss_equals_a_float64_loop(denominator: str) -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    log_probs = batch.old_log_probs + 0.4 * torch.randn(6, 7, generator=torch.Generator().manual_seed(3))
    entropies = torch.rand(6, 7, generator=torch.Generator().manual_seed(4))
    loss = objective_of(batch, log_probs, entropies, denominator)
    assert float(loss) == pytest.approx(expected_loss(batch, log_probs, entropies, denominator), rel=1e-5)


def test_more_entropy_means_less_loss_and_rejected_tokens_have_no_gradient() -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    log_probs = batch.old_log_probs.clone().requires_grad_()
    entropies = torch.ones(6, 7, requires_grad=True)
    objective_of(batch, log_probs, entropies, "original").backward()
    assert entropies.grad is not None
    assert log_probs.grad is not None
    assert bool((entropies.grad[batch.loss_mask] < 0).all())
    assert not entropies.grad[~batch.loss_mask].any()
    assert not log_probs.grad[~batch.loss_mask].any()


def test_the_kl_term_is_added_with_its_weight_over_kept_tokens() -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    batch.reference_log_probs = batch.old_log_probs - 0.3
    overrides = ["actor_rollout_ref.actor.kl_loss_coef=0.5", "actor_rollout_ref.actor.kl_loss_type=k2"]
    plain, with_kl = (
        small_run_config(
            Path("unused"), f"actor_rollout_ref.actor.use_kl_loss={use}", *overrides
        ).actor_rollout_ref.actor
        for use in (False, True)
    )
    totals = Aggregation("token-mean", num_tokens=int(batch.response_mask.sum()), num_sequences=5)
    scores = TokenScores(batch.old_log_probs, None)
    without = policy_objective(scores, batch, plain, correction(), totals)
    found = policy_objective(scores, batch, with_kl, correction(), totals)
    kept, counted = int(batch.loss_mask.sum()), int(batch.response_mask.sum())
    assert float(found.loss - without.loss) == pytest.approx(0.5 * (0.3**2 / 2) * kept / counted, rel=1e-4)
    assert float(found.averages["actor/kl_loss"].value) == pytest.approx(0.3**2 / 2, rel=1e-4)


def test_bypass_mode_chooses_reinforce_where_it_is_asked_for() -> None:
    batch = make_train_batch(LENGTHS)
    log_probs = batch.old_log_probs + 0.7
    actor = small_run_config(Path("unused")).actor_rollout_ref.actor
    totals = Aggregation("token-sum")
    config = correction(bypass_mode=True, loss_type="reinforce")
    scores = TokenScores(log_probs, torch.zeros_like(log_probs))
    loss = policy_objective(scores, batch, actor, config, totals).loss
    assert batch.rollout_is_weights is not None
    expected = -(batch.advantages * log_probs * batch.rollout_is_weights)[batch.loss_mask].double().sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_value_loss_equals_a_float64_loop() -> None:
    generator = torch.Generator().manual_seed(5)
    batch = make_train_batch(LENGTHS)
    old, returns, values = (torch.randn(6, 7, generator=generator) for _ in range(3))
    critic_batch = CriticBatch(
        tokens=batch.tokens,
        response_mask=batch.response_mask,
        critic_values=old,
        returns=returns,
        batch_size=[6],
    )
    config = small_run_config(Path("unused"), "critic.cliprange_value=0.4").critic
    total = 0.0
    for row, column in batch.response_mask.nonzero().tolist():
        value, before, target = (float(tensor[row, column]) for tensor in (values, old, returns))
        clipped = min(max(value, before - 0.4), before + 0.4)
        total += 0.5 * max((value - target) ** 2, (clipped - target) ** 2)
    tokens = int(batch.response_mask.sum())
    found = value_objective(values, critic_batch, config, Aggregation("token-mean", num_tokens=tokens)).loss
    assert float(found) == pytest.approx(total / tokens, rel=1e-5)


KL_COV: Mapping[str, object] = {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2}
BAPO: Mapping[str, object] = {"loss_mode": "bapo", "adv_ratio_target": 2.0}
M2PO: Mapping[str, object] = {"loss_mode": "m2po", "m2_threshold": 1e-3}
CLIP_COV: Mapping[str, object] = {
    "loss_mode": "clip_cov",
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": 0.0,
    "clip_cov_ub": 9.0,
}
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 4, 2, 3]]]


def actor(fields: Mapping[str, object]) -> ActorConfig:
    return ActorConfig.model_validate({"use_dynamic_bsz": True, "policy_loss": fields})


def current(batch: TrainBatch) -> Tensor:
    noise = 0.05 * torch.randn(batch.old_log_probs.shape, generator=torch.Generator().manual_seed(5))
    return torch.where(batch.response_mask, batch.old_log_probs + noise, 0.0)


def alone(tensor: Tensor) -> Tensor:
    return tensor


def statistics_of(config: ActorConfig, batch: TrainBatch, split: list[list[int]]) -> MiniBatchStatistics:
    log_probs = current(batch)
    seen = [statistics_inputs(batch[rows], log_probs[rows], config, correction()) for rows in split]
    name = mini_batch_loss_name(config, RolloutCorrectionConfig())
    assert name is not None
    return mini_batch_statistics(name, seen, alone, alone)


def expected_kl_cov(batch: TrainBatch) -> tuple[float, float, set[tuple[int, int]]]:
    """Means, and the three tokens with the largest covariances."""
    log_probs = current(batch).double()
    tokens = [(row, t) for row in range(6) for t in range(7) if batch.loss_mask[row, t]]
    assert len(tokens) == 16
    advantage = sum(float(batch.advantages[at]) for at in tokens) / 16
    log_prob = sum(float(log_probs[at]) for at in tokens) / 16
    by_covariance = sorted(
        tokens, key=lambda at: (float(batch.advantages[at]) - advantage) * (float(log_probs[at]) - log_prob)
    )
    return advantage, log_prob, set(by_covariance[-3:])


@pytest.mark.parametrize("split", SPLITS, ids=len)
def test_kl_cov_selects_the_largest_covariances_of_the_mini_batch(split: list[list[int]]) -> None:
    """16 tokens are in the loss; a share of 0.2 of them is 3."""
    config, batch = actor(KL_COV), make_train_batch(LENGTHS, REJECTED)
    found = statistics_of(config, batch, split)
    advantage, log_prob, expected = expected_kl_cov(batch)
    assert [float(found.advantage_mean), float(found.log_prob_mean)] == pytest.approx(
        [advantage, log_prob], rel=1e-5
    )
    inputs = statistics_inputs(batch, current(batch), config, correction())
    scores = selection_scores("kl_cov", inputs, found.advantage_mean, found.log_prob_mean)
    assert {(row, t) for row, t in (scores >= found.score_threshold).nonzero().tolist()} == expected
    assert found.share_at_threshold == 1


@pytest.mark.parametrize("split", SPLITS, ids=len)
@pytest.mark.parametrize("advantage", [0.0, 0.1])
def test_equal_covariances_are_selected_the_same_however_the_mini_batch_is_cut(
    advantage: float, split: list[list[int]]
) -> None:
    config, batch = actor(KL_COV), make_train_batch(LENGTHS, REJECTED)
    batch.advantages = torch.full_like(batch.advantages, advantage)
    whole, cut = statistics_of(config, batch, SPLITS[0]), statistics_of(config, batch, split)
    assert cut.advantage_mean == torch.tensor(advantage)
    assert (cut.score_threshold, cut.share_at_threshold) == (whole.score_threshold, whole.share_at_threshold)
    scores = selection_scores(
        "kl_cov",
        statistics_inputs(batch, current(batch), config, correction()),
        cut.advantage_mean,
        cut.log_prob_mean,
    )
    assert (scores >= cut.score_threshold).sum() == 3


@pytest.mark.parametrize("fields", [KL_COV, CLIP_COV, M2PO, BAPO], ids=["kl_cov", "clip_cov", "m2po", "bapo"])
@pytest.mark.parametrize("split", SPLITS[1:], ids=len)
def test_micro_batches_change_neither_loss_nor_gradient(
    fields: Mapping[str, object], split: list[list[int]]
) -> None:
    config, batch = actor(fields), make_train_batch(LENGTHS, REJECTED)
    totals = Aggregation("token-mean", num_tokens=21, num_sequences=5)

    def loss_and_gradient(parts: list[list[int]], statistics: MiniBatchStatistics) -> tuple[float, Tensor]:
        leaf, loss = current(batch).requires_grad_(), torch.zeros(())
        for rows in parts:
            scores = TokenScores(leaf[rows], None)
            loss = (
                loss
                + policy_objective(
                    scores, batch[rows], config, RolloutCorrectionConfig(), totals, statistics
                ).loss
            )
        return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]

    whole, whole_gradient = loss_and_gradient(SPLITS[0], statistics_of(config, batch, SPLITS[0]))
    cut, cut_gradient = loss_and_gradient(split, statistics_of(config, batch, split))
    assert cut == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=1e-5, atol=1e-8)
    vanilla = policy_objective(
        TokenScores(current(batch), None), batch, actor({}), RolloutCorrectionConfig(), totals
    ).loss
    assert abs(whole - float(vanilla)) > 1e-4


def over_two_ranks(
    name: str, shares: list[list[PolicyLossInputs]]
) -> tuple[MiniBatchStatistics, MiniBatchStatistics]:
    """Two ranks in two threads, which wait for each other where ranks would."""
    barrier = Barrier(2, timeout=60)
    sent: dict[int, Tensor] = {}

    def exchange(rank: int, join: Callable[[list[Tensor]], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(tensor: Tensor) -> Tensor:
            sent[rank] = tensor
            barrier.wait()
            joined = join([sent[0], sent[1]])
            barrier.wait()
            return joined

        return call

    def run(rank: int) -> MiniBatchStatistics:
        over = exchange(rank, lambda parts: parts[0] + parts[1])
        return mini_batch_statistics(name, shares[rank], over, exchange(rank, torch.cat))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, (0, 1))
    return first, second


@pytest.mark.parametrize("fields", [KL_COV, CLIP_COV, M2PO, BAPO], ids=["kl_cov", "clip_cov", "m2po", "bapo"])
@pytest.mark.parametrize("advantage", [None, 0.0], ids=["as they are", "all equal"])
def test_two_ranks_know_what_one_does(fields: Mapping[str, object], advantage: float | None) -> None:
    config, batch = actor(fields), make_train_batch(LENGTHS, REJECTED)
    if advantage is not None:
        batch.advantages = torch.full_like(batch.advantages, advantage)
    log_probs = current(batch)
    shares = [
        [statistics_inputs(batch[rows], log_probs[rows], config, correction()) for rows in of_rank]
        for of_rank in ([[0], [3, 1]], [[2, 4, 5]])
    ]
    name = mini_batch_loss_name(config, RolloutCorrectionConfig())
    assert name is not None
    whole = mini_batch_statistics(
        name, [statistics_inputs(batch, log_probs, config, correction())], alone, alone
    )
    for found in over_two_ranks(name, shares):
        for one, other in zip(vars(found).values(), vars(whole).values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_golden_loss_gradient_and_keep_mask(case: dict[str, Any]) -> None:
    batch, config = case_batch(case), case_config(case)
    log_probs = torch.tensor(case["log_probs"]).requires_grad_()
    corrected, _ = corrected_current(batch, log_probs.detach(), config, policy_version=0)
    num_tokens, num_sequences = loss_counts(corrected).tolist()
    totals = Aggregation(case["loss_agg_mode"], num_tokens=num_tokens, num_sequences=num_sequences)
    actor = small_run_config(Path("unused")).actor_rollout_ref.actor
    scores = TokenScores(log_probs, torch.zeros_like(log_probs))
    objective = policy_objective(scores, corrected, actor, config, totals)
    objective.loss.backward()
    expected = case["expected"]
    assert float(objective.loss) == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected["grad"]), rtol=1e-5, atol=1e-7)
    keep = torch.tensor(expected["keep_mask"]).bool()
    assert torch.equal(corrected.loss_mask, keep & batch.response_mask)


@pytest.mark.parametrize(
    "fields",
    [{"bypass_mode": True}, {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}],
    ids=["clip", "weights"],
)
def test_what_the_driver_left_out_of_the_loss_stays_out(fields: dict[str, object]) -> None:
    """Tokens that are too old, say: the actor rejects further ones, and takes none back."""
    config, batch = RolloutCorrectionConfig.model_validate(fields), make_train_batch(LENGTHS, REJECTED)
    batch.loss_mask[0, 3] = False
    rejecting = config.model_copy(update={"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"})
    for rule, further in (
        (config, []),
        (RolloutCorrectionConfig.model_validate(rejecting.model_dump()), [(0, 1)]),
    ):
        log_probs = batch.rollout_log_probs.clone()
        log_probs[0, 1] += 3.0
        corrected, _ = corrected_current(batch, log_probs, rule, 0)
        expected = batch.loss_mask.clone()
        for place in further:
            expected[place] = False
        assert torch.equal(corrected.loss_mask, expected)
        assert loss_counts(corrected).tolist() == [int(expected.sum()), int(expected.any(dim=1).sum())]


def test_a_token_from_a_set_that_is_not_recorded_is_compared_with_nothing() -> None:
    """Whatever the engine reported of it: statistics and weights of its row are the same."""
    config = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="sequence")
    batch, results = make_train_batch([7, 2, 5]), []
    batch.tokens.support_counts = torch.where(batch.response_mask, 2, 0)
    batch.tokens.support_counts[0, 1] = 0
    log_probs = batch.rollout_log_probs + 0.1
    for reported in (-1.0, -9.0):
        batch.rollout_log_probs[0, 1] = reported
        corrected, statistics = corrected_current(batch, log_probs, config, 0)
        results.append((corrected, statistics.metrics(config)))
    (one, metrics), (other, same) = results
    assert metrics == same
    assert metrics["rollout_corr/rollout_is_mean"] > 1
    assert torch.equal(one.rollout_is_weights, other.rollout_is_weights)
    assert float(one.rollout_is_weights[0, 0]) == pytest.approx(
        math.exp(0.6), rel=1e-5
    )  # six tokens of seven


def test_parts_of_a_mini_batch_are_normalised_by_all_of_it() -> None:
    config = RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True
    )
    assert needs_statistics_first(config)
    batch = make_train_batch([7, 2, 5, 1])
    log_probs = batch.rollout_log_probs + 0.5 * torch.randn(4, 7, generator=torch.Generator().manual_seed(2))
    _, whole = corrected_current(batch, log_probs, config, 0)
    halves = (slice(0, 1), slice(1, 4))
    one, other = (corrected_current(batch[rows], log_probs[rows], config, 0)[1] for rows in halves)
    mean = (
        torch.minimum((log_probs - batch.rollout_log_probs).exp(), torch.tensor(2.0))[batch.response_mask]
        .double()
        .mean()
    )
    for statistics in (whole, one.merge(other)):
        weights = corrected_current(batch[1:], log_probs[1:], config, 0, statistics)[0].rollout_is_weights
        ratio = (log_probs - batch.rollout_log_probs)[1:].exp().clamp(max=2.0)
        torch.testing.assert_close(
            weights[batch.response_mask[1:]], (ratio / mean).float()[batch.response_mask[1:]]
        )


def test_ppo_clip_takes_no_weights() -> None:
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
    batch = make_train_batch([3, 2])
    assert corrected_current(batch, batch.rollout_log_probs, config, 0)[0].rollout_is_weights is None
    assert not needs_statistics_first(config)


def versions_from(batch: TrainBatch, oldest: int) -> Tensor:
    """Of each token, ``oldest`` and the three after it in turn."""
    return torch.where(batch.response_mask, oldest + torch.arange(batch.response_mask.shape[1]) % 4, -1)


def test_versions_of_interpolation_count_updates() -> None:
    """Three of five updates after version 6: a token of version v is 5 (6 - v) updates older than the
    proximal policy."""
    batch = make_train_batch(LENGTHS)
    batch.policy_versions = versions_from(batch, oldest=3)
    log_probs = batch.rollout_log_probs + torch.randn(6, 7, generator=torch.Generator().manual_seed(3))
    batch.rollout_log_probs[2, 1] = -torch.inf
    found = with_interpolated_proximal(batch, log_probs, policy_version=6, updates=3, updates_per_step=5)
    for row, column in batch.response_mask.nonzero().tolist():
        version, rollout = (
            int(batch.policy_versions[row, column]),
            float(batch.rollout_log_probs[row, column]),
        )
        share = (30 - 5 * version) / (33 - 5 * version)
        expected = rollout + share * (float(log_probs[row, column]) - rollout)
        expected = expected if math.isfinite(rollout) else float(log_probs[row, column])
        assert float(found.old_log_probs[row, column]) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_before_the_first_update_the_interpolated_policy_is_the_current_one() -> None:
    batch = make_train_batch(LENGTHS)
    batch.policy_versions = versions_from(batch, oldest=3)
    log_probs = batch.rollout_log_probs - 0.1
    assert torch.equal(with_interpolated_proximal(batch, log_probs, 6, 0, 5).old_log_probs, log_probs)


def test_an_interpolated_policy_is_weighted_against_the_rollout_policy() -> None:
    config = RolloutCorrectionConfig(proximal="interpolate", rollout_is="token", rollout_is_threshold=9.0)
    batch = make_train_batch([3, 2])
    proximal = batch.rollout_log_probs + 0.5
    corrected, _ = corrected_current(batch, proximal, config, 0)
    assert corrected.rollout_is_weights is not None
    torch.testing.assert_close(
        corrected.rollout_is_weights[batch.response_mask], torch.full((5,), math.exp(0.5))
    )


def test_token_ages_count_from_the_version_given() -> None:
    config = RolloutCorrectionConfig(bypass_mode=True, diagnostics="full")
    batch = make_train_batch([3, 2])
    batch.policy_versions = torch.where(batch.response_mask, 4, -1)
    _, statistics = corrected_current(batch, batch.rollout_log_probs, config, policy_version=6)
    assert statistics.metrics(config)["rollout_corr/token_age_mean"] == 2.0


def loss_of_token(config: RolloutCorrectionConfig, advantage: float, log_prob: float, old: float) -> float:
    """PPO's clip (0.2, dual clip 3), or in bypass mode without it the policy gradient."""
    if config.named_loss == "reinforce":
        return -advantage * log_prob
    ratio = math.exp(log_prob - old)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
    return min(loss, -3.0 * advantage) if advantage < 0 else loss


def weight_of_other(
    config: RolloutCorrectionConfig, gaps: list[float], place: int, log_ratio: float
) -> float:
    """The weight of a token in a row of these log-ratios, with another token of this one in its place."""
    terms = [*gaps[:place], log_ratio, *gaps[place + 1 :]]
    weight = {
        None: lambda: 1.0,
        "token": lambda: math.exp(log_ratio),
        "prefix": lambda: math.exp(math.fsum(terms[: place + 1])),
        "turn": lambda: math.exp(math.fsum(terms)),
        "sequence": lambda: math.exp(math.fsum(terms)),
        "geometric": lambda: math.exp(math.fsum(terms) / len(terms)),
    }[config.rollout_is]()
    if config.rollout_is_threshold == "0.5_5.0":
        return weight if 0.5 <= weight <= 5 else 0.0
    return min(weight, 2.0)


@pytest.mark.parametrize("tail", ["proportional", "none"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rollout_is": "token"},
        *({"rollout_is": level} for level in ("prefix", "turn", "sequence", "geometric")),
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
        {"bypass_mode": True},
        {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"},
        {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"},
    ],
    ids=str,
)
def test_a_centered_loss_is_that_of_the_token_less_those_of_the_head(
    fields: dict[str, object], tail: str
) -> None:
    """By the definition, token by token and candidate by candidate; its gradient by finite differences."""
    config = RolloutCorrectionConfig.model_validate(
        {**fields, "score_centering": {"enabled": True, "top_k": 3, "tail": tail}}
    )
    batch = make_train_batch(LENGTHS, REJECTED)
    add_heads(batch, 29, size=3)
    assert batch.tokens.head_counts is not None
    assert batch.tokens.head_ids is not None
    q_logs = heads(batch.tokens.head_counts, batch.tokens.head_ids)[1].double()
    generator = torch.Generator().manual_seed(3)
    log_probs = (batch.old_log_probs + 0.3 * torch.randn(6, 7, generator=generator)).requires_grad_()
    shares = torch.rand(6, 7, 3, generator=generator)
    candidates = (0.9 * shares / shares.sum(-1, keepdim=True)).log().requires_grad_()
    weights = batch.rollout_is_weights
    assert weights is not None
    if config.rollout_is is None:
        batch.rollout_is_weights = None
    batch.rollout_log_probs = batch.old_log_probs - 0.2 * torch.randn(6, 7, generator=generator)
    train = log_probs.detach() if config.mode == "bypass" else batch.old_log_probs
    gaps = (train - batch.rollout_log_probs).double()

    def expected(candidates: Tensor, at: Tensor) -> float:
        """Ratios and weights of candidates are constants ``at`` the policy before a change of it."""
        total = 0.0
        for row, column in batch.loss_mask.nonzero().tolist():
            advantage = float(batch.advantages[row, column])
            own = 1.0 if config.rollout_is is None else float(weights[row, column])
            old = float(batch.old_log_probs[row, column])
            total += own * loss_of_token(config, advantage, float(log_probs[row, column]), old)
            head = [
                (float(q), float(p), float(p0))
                for q, p, p0 in zip(
                    q_logs[row, column], candidates[row, column], at[row, column], strict=True
                )
                if q > -math.inf
            ]
            if head and tail == "proportional":
                masses = [1 - math.fsum(math.exp(one[i]) for one in head) for i in range(3)]
                if min(masses) > 1e-6:
                    head.append((math.log(masses[0]), math.log(masses[1]), math.log(masses[2])))
            for q, p, p0 in head:
                weight = weight_of_other(config, gaps[row, : LENGTHS[row]].tolist(), column, p0 - q)
                old = q if config.mode == "bypass" else p0
                total -= math.exp(q) * weight * loss_of_token(config, advantage, p, old)
        return total / int(batch.response_mask.sum())

    actor = small_run_config(Path("unused")).actor_rollout_ref.actor
    totals = Aggregation("token-mean", num_tokens=int(batch.response_mask.sum()), num_sequences=5)
    scores = TokenScores(log_probs, None, candidate_log_probs=candidates)
    loss = policy_objective(scores, batch, actor, config, totals).loss
    now = candidates.detach().double()
    assert float(loss.detach()) == pytest.approx(expected(now, now), rel=1e-5, abs=1e-6)
    loss.backward()
    for place in batch.loss_mask.nonzero()[::4].tolist():
        for candidate in range(3):
            step = torch.zeros_like(now)
            step[(*place, candidate)] = 1e-5
            slope = (expected(now + step, now) - expected(now - step, now)) / 2e-5
            assert candidates.grad is not None
            assert float(candidates.grad[(*place, candidate)]) == pytest.approx(slope, rel=1e-4, abs=1e-6)
