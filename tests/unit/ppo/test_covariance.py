"""Statistics of clip_cov and kl_cov: against loops in float64, and the same however a mini-batch is cut."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from small_models import make_train_batch
from torch import Tensor

from verl_rc.config.actor import ActorConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.data.batches import TokenScores, TrainBatch
from verl_rc.losses import Aggregation, CovarianceStatistics, PolicyLossInputs, selection_scores
from verl_rc.ppo.choices import covariance_loss_name
from verl_rc.ppo.covariance import covariance_inputs, covariance_statistics
from verl_rc.ppo.objective import policy_objective

LENGTHS = [7, 2, 5, 0, 1, 6]
REJECTED = (2,)
KL_COV: Mapping[str, object] = {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2}
CLIP_COV: Mapping[str, object] = {"loss_mode": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 4, 2, 3]]]


def actor(fields: Mapping[str, object]) -> ActorConfig:
    return ActorConfig.model_validate({"use_dynamic_bsz": True, "policy_loss": fields})


def current(batch: TrainBatch) -> Tensor:
    noise = 0.05 * torch.randn(batch.old_log_probs.shape, generator=torch.Generator().manual_seed(5))
    return torch.where(batch.response_mask, batch.old_log_probs + noise, 0.0)


def alone(tensor: Tensor) -> Tensor:
    return tensor


def statistics_of(config: ActorConfig, batch: TrainBatch, split: list[list[int]]) -> CovarianceStatistics:
    log_probs = current(batch)
    seen = [covariance_inputs(batch[rows], log_probs[rows], config) for rows in split]
    name = covariance_loss_name(config, RolloutCorrectionConfig())
    assert name is not None
    return covariance_statistics(name, seen, alone, alone)


def expected_kl_cov(batch: TrainBatch) -> tuple[float, float, set[tuple[int, int]]]:
    """Means, and the three tokens with the largest covariances."""
    log_probs = current(batch).double()
    tokens = [(row, t) for row in range(6) for t in range(7) if batch.loss_mask[row, t]]
    assert len(tokens) == 16
    advantage = sum(float(batch.advantages[at]) for at in tokens) / 16
    log_prob = sum(float(log_probs[at]) for at in tokens) / 16
    by_covariance = sorted(tokens, key=lambda at: (float(batch.advantages[at]) - advantage) * (float(log_probs[at]) - log_prob))
    return advantage, log_prob, set(by_covariance[-3:])


@pytest.mark.parametrize("split", SPLITS, ids=len)
def test_kl_cov_selects_the_largest_covariances_of_the_mini_batch(split: list[list[int]]) -> None:
    """16 tokens are in the loss; a share of 0.2 of them is 3."""
    config, batch = actor(KL_COV), make_train_batch(LENGTHS, REJECTED)
    found = statistics_of(config, batch, split)
    advantage, log_prob, expected = expected_kl_cov(batch)
    assert [float(found.advantage_mean), float(found.log_prob_mean)] == pytest.approx([advantage, log_prob], rel=1e-5)
    inputs = covariance_inputs(batch, current(batch), config)
    scores = selection_scores("kl_cov", inputs, found.advantage_mean, found.log_prob_mean)
    assert {(row, t) for row, t in (scores >= found.score_threshold).nonzero().tolist()} == expected
    assert found.share_at_threshold == 1


@pytest.mark.parametrize("split", SPLITS, ids=len)
@pytest.mark.parametrize("advantage", [0.0, 0.1])
def test_equal_covariances_are_selected_the_same_however_the_mini_batch_is_cut(advantage: float, split: list[list[int]]) -> None:
    config, batch = actor(KL_COV), make_train_batch(LENGTHS, REJECTED)
    batch.advantages = torch.full_like(batch.advantages, advantage)
    whole, cut = statistics_of(config, batch, SPLITS[0]), statistics_of(config, batch, split)
    assert cut.advantage_mean == torch.tensor(advantage)
    assert (cut.score_threshold, cut.share_at_threshold) == (whole.score_threshold, whole.share_at_threshold)
    scores = selection_scores("kl_cov", covariance_inputs(batch, current(batch), config), cut.advantage_mean, cut.log_prob_mean)
    assert (scores >= cut.score_threshold).sum() == 3


@pytest.mark.parametrize("fields", [KL_COV, CLIP_COV], ids=["kl_cov", "clip_cov"])
@pytest.mark.parametrize("split", SPLITS[1:], ids=len)
def test_micro_batches_change_neither_loss_nor_gradient(fields: Mapping[str, object], split: list[list[int]]) -> None:
    config, batch = actor(fields), make_train_batch(LENGTHS, REJECTED)
    totals = Aggregation("token-mean", num_tokens=21, num_sequences=5)

    def loss_and_gradient(parts: list[list[int]], statistics: CovarianceStatistics) -> tuple[float, Tensor]:
        leaf, loss = current(batch).requires_grad_(), torch.zeros(())
        for rows in parts:
            scores = TokenScores(leaf[rows], None)
            loss = loss + policy_objective(scores, batch[rows], config, RolloutCorrectionConfig(), totals, statistics).loss
        return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]

    whole, whole_gradient = loss_and_gradient(SPLITS[0], statistics_of(config, batch, SPLITS[0]))
    cut, cut_gradient = loss_and_gradient(split, statistics_of(config, batch, split))
    assert cut == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=1e-5, atol=1e-8)
    vanilla = policy_objective(TokenScores(current(batch), None), batch, actor({}), RolloutCorrectionConfig(), totals).loss
    assert abs(whole - float(vanilla)) > 1e-3


def over_two_ranks(
    name: str, shares: list[list[PolicyLossInputs]]
) -> tuple[CovarianceStatistics, CovarianceStatistics]:
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

    def run(rank: int) -> CovarianceStatistics:
        over = exchange(rank, lambda parts: parts[0] + parts[1])
        return covariance_statistics(name, shares[rank], over, exchange(rank, torch.cat))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, (0, 1))
    return first, second


@pytest.mark.parametrize("fields", [KL_COV, CLIP_COV], ids=["kl_cov", "clip_cov"])
@pytest.mark.parametrize("advantage", [None, 0.0], ids=["as they are", "all equal"])
def test_two_ranks_know_what_one_does(fields: Mapping[str, object], advantage: float | None) -> None:
    config, batch = actor(fields), make_train_batch(LENGTHS, REJECTED)
    if advantage is not None:
        batch.advantages = torch.full_like(batch.advantages, advantage)
    log_probs = current(batch)
    shares = [
        [covariance_inputs(batch[rows], log_probs[rows], config) for rows in of_rank] for of_rank in ([[0], [3, 1]], [[2, 4, 5]])
    ]
    name = covariance_loss_name(config, RolloutCorrectionConfig())
    assert name is not None
    whole = covariance_statistics(name, [covariance_inputs(batch, log_probs, config)], alone, alone)
    for found in over_two_ranks(name, shares):
        for one, other in zip(vars(found).values(), vars(whole).values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
