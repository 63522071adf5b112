"""Two real gloo ranks give the update of one, with uneven token counts and a rank of which everything is
rejected."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import (
    add_heads,
    add_supports,
    make_train_batch,
    ragged,
    scored,
    small_run_config,
    write_small_model,
)
from two_processes import SERVER, free_port

LENGTHS = [7, 2, 5, 0, 1, 6, 7, 3]
REJECTED = (4, 5, 6, 7)
"""All rows of the second rank."""
SPLITS: dict[int, list[list[list[int]]]] = {
    1: [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    2: [[[0, 1], [2, 3]], [[4, 5, 6, 7], []]],
}
BYPASS: Mapping[str, object] = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}
RULE = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.1_10"}
CENTERED = {"enabled": True, "top_k": 4}
CORRECTIONS: dict[str, Mapping[str, object]] = {
    "decoupled": {},
    "bypass_reinforce": {**BYPASS, **RULE},
    "bypass_ppo_clip": {"bypass_mode": True, **RULE},
    "bypass_normalised": {**BYPASS, **RULE, "rollout_is_batch_normalize": True},
    "bypass_kept": {**BYPASS, **RULE, "rejection_denominator": "kept"},
    "bypass_other_rule": {**BYPASS, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_1.2"},
    "bypass_other_threshold": {**BYPASS, **RULE, "rollout_rs_threshold": "0.97_1.03"},
    "bypass_no_rule": {**BYPASS},
    "centered": {"score_centering": CENTERED, "rollout_is": "token"},
    "bypass_centered": {**BYPASS, "score_centering": CENTERED},
    "bypass_centered_token_weights": {**BYPASS, "rollout_is": "token", "score_centering": CENTERED},
    "bypass_ppo_clip_centered": {"bypass_mode": True, **RULE, "score_centering": CENTERED},
    "supports": {},
    "supports_in_bypass_mode": {**BYPASS, **RULE, "rejection_denominator": "kept"},
    "kl_cov": {},
    "clip_cov": {},
    "m2po": {},
    "bapo": {},
    "kl_cov_in_bypass_mode": {
        "bypass_mode": True,
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": "0.8_1.2",
    },
}
COVARIANCE: Mapping[str, object] = {
    "kl_cov_ratio": 0.2,
    "ppo_kl_coef": 1.0,
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": 0.0,
}
LOSSES: dict[str, Mapping[str, object]] = {
    "kl_cov": {**COVARIANCE, "loss_mode": "kl_cov"},
    "clip_cov": {**COVARIANCE, "loss_mode": "clip_cov"},
    "m2po": {"loss_mode": "m2po", "m2_threshold": 0.5},
    "bapo": {"loss_mode": "bapo", "adv_ratio_target": 2.0},
    "kl_cov_in_bypass_mode": {**COVARIANCE, "loss_mode": "kl_cov"},
}
"""Losses that look at the whole mini-batch; elsewhere it is PPO's."""
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
Gradients = dict[tuple[str, str], torch.Tensor]


def gradients_of_rank(folder: Path, rank: int, world_size: int, port: int) -> Gradients:
    """Whole gradients under every correction and aggregation mode, and what an update changes, as one of the
    ranks knows them."""
    from verl_rc.algorithm.ppo.corrector import corrector_of
    from verl_rc.algorithm.ppo.mini_batches import MiniBatch
    from verl_rc.config.models import PolicyLossConfig
    from verl_rc.config.rollout_correction import RolloutCorrectionConfig
    from verl_rc.runtime.distributed.process_group import RankAddress
    from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
    from verl_rc.runtime.workers.policy_worker import PolicyWorker
    from verl_rc.runtime.workers.updates import UpdateRequest

    torch.set_num_threads(1)
    config = small_run_config(
        folder, "actor_rollout_ref.actor.entropy_coeff=0.05", "actor_rollout_ref.actor.optim.lr=0.01"
    )
    worker = PolicyWorker(config, RankAddress(rank, world_size, "127.0.0.1", port), total_steps=10)
    found: Gradients = {}
    for name, fields in CORRECTIONS.items():
        worker._correction = RolloutCorrectionConfig.model_validate(fields)
        bypass = worker._correction.bypass_mode
        batch = make_train_batch(LENGTHS, () if bypass or name in LOSSES else REJECTED)
        # all rows of the second rank are beyond every threshold, save for losses that look at both ranks'
        # tokens
        if "supports" in name:
            add_supports(batch, worker.model.module.config.vocab_size)
        if "centered" in name:
            add_heads(batch, worker.model.module.config.vocab_size)
        if bypass:
            current = scored(worker.compute_log_probs, batch.tokens, [[0, 1, 2, 3, 4, 5, 6, 7]])[0]
            near = current + 0.2 * torch.randn(8, 7, generator=torch.Generator().manual_seed(7))
            near[list(REJECTED)] += 5.0 if "rollout_rs" in fields and name not in LOSSES else 0.0
            batch.old_log_probs = batch.rollout_log_probs = torch.where(batch.response_mask, near, 0.0)
        counted = batch.response_mask.sum(-1)
        share = MiniBatch(
            SPLITS[world_size][rank], int(counted.sum()), int((counted > 0).sum()), int(batch.loss_mask.sum())
        )
        for mode in MODES:
            policy_loss = PolicyLossConfig.model_validate(LOSSES.get(name, {}))
            worker._actor = worker._actor.model_copy(
                update={"loss_agg_mode": mode, "policy_loss": policy_loss}
            )
            correction = corrector_of(worker._correction).during_update(0, 1, worker._ranks)
            worker.accumulate(ragged(batch), share, ObjectiveTotals("actor"), correction)
            found[name, mode] = flat(p.grad.full_tensor() for p in worker.model.module.parameters())  # type: ignore[union-attr]
            worker.model.optimizer.zero_grad()
    worker._actor = worker._actor.model_copy(update={"policy_loss": PolicyLossConfig()})
    # A key bias shifts all scores of a query alike, so its gradient is 0 but for rounding, which Adam's first
    # step blows up.
    moved = [p for name, p in worker.model.module.named_parameters() if not name.endswith("k_proj.bias")]
    before = flat(p.full_tensor() for p in moved)  # type: ignore[attr-defined]
    worker.update(ragged(batch), [share], UpdateRequest(corrector_of(worker._correction), 0))
    found["adamw", "step"] = flat(p.full_tensor() for p in moved) - before  # type: ignore[attr-defined]
    worker.close()
    return found


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double()


def gradients(folder: Path, world_size: int) -> Gradients:
    port = free_port()
    others = [
        SERVER.Process(target=gradients_of_rank, args=(folder, rank, world_size, port))
        for rank in range(1, world_size)
    ]
    for process in others:
        process.start()
    found = gradients_of_rank(folder, 0, world_size, port)  # here, where torch is loaded already
    for process in others:
        process.join(timeout=120)
        assert process.exitcode == 0
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gradients, Gradients]:
    folder = write_small_model(tmp_path_factory.mktemp("model"))
    return gradients(folder, 1), gradients(folder, 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_two_ranks_equal_one(both: tuple[Gradients, Gradients], correction: str, mode: str) -> None:
    one, two = both[0][correction, mode], both[1][correction, mode]
    assert one.norm() > 0
    assert float((two - one).norm() / one.norm()) <= 1e-5


def test_a_step_of_adamw_is_the_same(both: tuple[Gradients, Gradients]) -> None:
    """Its first step divides each element by its own size, which magnifies the rounding of the smallest:
    hence 1e-4."""
    one, two = (found["adamw", "step"] for found in both)
    assert float((two - one).norm() / one.norm()) <= 1e-4


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov", "m2po", "bapo", "supports", "centered"])
def test_losses_that_look_at_the_mini_batch_or_at_supports_are_no_other_loss(
    both: tuple[Gradients, Gradients], loss: str
) -> None:
    one, other = both[1][loss, "token-mean"], both[1]["decoupled", "token-mean"]
    assert float((one - other).norm() / other.norm()) > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_in_bypass_mode_every_setting_changes_the_gradient(
    both: tuple[Gradients, Gradients], mode: str
) -> None:
    """Rule, threshold, loss type, normalisation and denominator all reach the loss in real worker processes.

    Under ``token-sum`` and the row means a denominator of kept tokens is refused or equal only where nothing
    is rejected.
    """
    names = [
        name
        for name in CORRECTIONS
        if name.startswith("bypass") and (name, mode) != ("bypass_kept", "token-sum")
    ]
    found = [both[1][name, mode] for name in names]
    for first in range(len(names)):
        for second in range(first):
            difference = float((found[first] - found[second]).norm() / found[first].norm())
            assert difference > 1e-3, (names[first], names[second])
