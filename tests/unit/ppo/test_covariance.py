"""Statistics of clip_cov and kl_cov: against loops in float64, and the same however a mini-batch is cut."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from small_models import make_train_batch
from torch import Tensor

from verl_rc.config.actor import ActorConfig, CovarianceLoss
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.data.batches import TokenScores, TrainBatch
from verl_rc.losses import Aggregation, CovarianceStatistics, PolicyLossInputs
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


def expected_kl_cov(batch: TrainBatch) -> tuple[float, float, float]:
    """Means, and the covariance of the last token that is selected: the third largest."""
    log_probs = current(batch).double()
    tokens = [(row, t) for row in range(6) for t in range(7) if batch.loss_mask[row, t]]
    assert len(tokens) == 16
    advantage = sum(float(batch.advantages[at]) for at in tokens) / 16
    log_prob = sum(float(log_probs[at]) for at in tokens) / 16
    covariances = [(float(batch.advantages[at]) - advantage) * (float(log_probs[at]) - log_prob) for at in tokens]
    return advantage, log_prob, sorted(covariances)[-3]


@pytest.mark.parametrize("split", SPLITS, ids=len)
def test_kl_cov_selects_the_largest_covariances_of_the_mini_batch(split: list[list[int]]) -> None:
    """16 tokens are in the loss; a share of 0.2 of them is 3."""
    batch = make_train_batch(LENGTHS, REJECTED)
    found = statistics_of(actor(KL_COV), batch, split)
    values = (found.advantage_mean, found.log_prob_mean, found.score_threshold)
    assert [float(value) for value in values] == pytest.approx(expected_kl_cov(batch), rel=1e-5)


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
    name: CovarianceLoss, shares: list[list[PolicyLossInputs]]
) -> tuple[CovarianceStatistics, CovarianceStatistics]:
    """Two ranks in one process: a first run shows what each one contributes, a second one gets the other's part."""
    sent: dict[str, list[Tensor]] = {"totals": [], "best": []}

    def exchange(kind: str, rank: int, join: Callable[[list[Tensor]], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(tensor: Tensor) -> Tensor:
            if len(sent[kind]) == rank:
                sent[kind].append(tensor)
            return join(sent[kind]) if len(sent[kind]) == 2 else tensor

        return call

    def run(rank: int) -> Any:
        over = exchange("totals", rank, lambda parts: parts[0] + parts[1])
        return covariance_statistics(name, shares[rank], over, exchange("best", rank, torch.cat))

    for rank in (0, 1):
        run(rank)
    sent["best"].clear()
    for rank in (0, 1):  # now with the totals of both
        run(rank)
    return run(0), run(1)


@pytest.mark.parametrize("fields", [KL_COV, CLIP_COV], ids=["kl_cov", "clip_cov"])
def test_two_ranks_know_what_one_does(fields: Mapping[str, object]) -> None:
    config, batch = actor(fields), make_train_batch(LENGTHS, REJECTED)
    log_probs = current(batch)
    shares = [
        [covariance_inputs(batch[rows], log_probs[rows], config) for rows in of_rank] for of_rank in ([[0], [3, 1]], [[2, 4, 5]])
    ]
    name = covariance_loss_name(config, RolloutCorrectionConfig())
    assert name is not None
    whole = statistics_of(config, batch, SPLITS[0])
    for found in over_two_ranks(name, shares):
        for one, other in zip(vars(found).values(), vars(whole).values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
