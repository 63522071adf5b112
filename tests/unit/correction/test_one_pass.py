"""Compiled loops find what tensor code finds, with any number of threads, to the last bits."""

import pytest
import torch

from verl_rc.correction import CorrectionResult, apply, compute_rollout_correction

RULES = {"rollout_rs": "token_k1,token_k2,token_k3,seq_mean_k3,seq_max_k2,seq_sum_k1"}
BOUNDS = {"rollout_rs_threshold": "0.8_1.3,0.05,0.06,0.06,0.6,0.01_100"}
CONFIGS = [
    {},
    {"rollout_is": "token", "rollout_is_threshold": 1.1, **RULES, **BOUNDS},
    {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1", "rollout_is_batch_normalize": True},
    {"rollout_is": "token", "rollout_is_threshold": "1.1_1.2", "rollout_token_veto_threshold": 0.6},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.3_3.0", "rollout_rs": "token_k3", "rollout_rs_threshold": 0.03},
    {"rollout_rs": "token_k1", "rollout_rs_threshold": "1.1_1.5"},
    {"rollout_is": "geometric", "rollout_is_threshold": 1.01, "bypass_mode": True},
]


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Rows of all lengths with holes, strange numbers outside the mask and within, versions of all ages, advantages, groups."""
    generator = torch.Generator().manual_seed(5)
    rows, width = 60, 90
    rollout = -3 * torch.rand(rows, width, generator=generator)
    train = rollout + 0.3 * torch.randn(rows, width, generator=generator)
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=generator)
    mask &= torch.rand(rows, width, generator=generator) < torch.where(torch.arange(rows) % 3 == 0, 0.7, 1.0)[:, None]
    mask[7] = False
    train[4, :3], rollout[8, 2], train[9, 5], rollout[10, 1] = -torch.inf, torch.nan, 60.0, -80.0
    train[~mask], rollout[~mask] = torch.nan, -torch.inf
    return {
        "train_log_probs": train,
        "rollout_log_probs": rollout,
        "response_mask": mask,
        "advantages": torch.randn(rows, width, generator=generator),
        "policy_versions": torch.randint(0, 9, (rows, width), generator=generator),
        "group_ids": torch.arange(rows) // 4,
        "scores": torch.randn(rows, generator=generator),
    }


def correct(batch: dict[str, torch.Tensor], config: dict[str, object], positions: int) -> CorrectionResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_rc.correction.sweep.SMALLEST_PASS", positions)
        return compute_rollout_correction(**batch, config=config)


def assert_same(found: CorrectionResult, expected: CorrectionResult) -> None:
    """Tensor code keeps some statistics of float32 log-probs in float32."""
    assert torch.equal(found.keep_mask, expected.keep_mask)
    assert torch.equal(found.rejected_rows, expected.rejected_rows)
    torch.testing.assert_close(found.weights, expected.weights, rtol=2e-7, atol=0.0)
    numbers, wanted = found.metrics(), expected.metrics()
    assert numbers.keys() == wanted.keys()
    wrong = {k: (numbers[k], v) for k, v in wanted.items() if numbers[k] != pytest.approx(v, rel=1e-6, abs=1e-9, nan_ok=True)}
    assert not wrong
    assert torch.equal(found.statistics.histogram, expected.statistics.histogram)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("diagnostics", ["core", "full"])
@pytest.mark.parametrize("config", CONFIGS)
def test_the_same_as_tensor_by_tensor(
    batch: dict[str, torch.Tensor], config: dict[str, object], diagnostics: str, dtype: torch.dtype
) -> None:
    config = {**config, "diagnostics": diagnostics}
    batch = {**batch, **{name: batch[name].to(dtype) for name in ("train_log_probs", "rollout_log_probs")}}
    assert_same(correct(batch, config, 0), correct(batch, config, 1 << 60))


def test_versions_of_whole_rows_and_no_facts_at_all(batch: dict[str, torch.Tensor]) -> None:
    config = {"rollout_is": "token", "diagnostics": "full"}
    by_row = {**batch, "policy_versions": batch["policy_versions"][:, 0]}
    assert_same(correct(by_row, config, 0), correct(by_row, config, 1 << 60))
    bare = {name: batch[name] for name in ("train_log_probs", "rollout_log_probs", "response_mask")}
    assert_same(correct(bare, config, 0), correct(bare, config, 1 << 60))


def test_memory_in_another_order_and_a_mask_of_numbers(batch: dict[str, torch.Tensor]) -> None:
    config = {**CONFIGS[1], "diagnostics": "full"}
    turned = {name: value.T.contiguous().T if value.ndim == 2 else value for name, value in batch.items()}
    turned["response_mask"] = turned["response_mask"].float() * 3
    assert not turned["train_log_probs"].is_contiguous()
    assert_same(correct(turned, config, 0), correct(batch, config, 1 << 60))


def test_threads_share_the_rows(batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIGS[1], "diagnostics": "full"}
    one = correct(batch, config, 0)
    monkeypatch.setattr("verl_rc.correction.one_pass._POSITIONS_PER_THREAD", 1000)
    monkeypatch.setattr("verl_rc.correction.one_pass._POSITIONS_PER_SPAN", 300)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    four = correct(batch, config, 0)
    assert torch.equal(four.weights, one.weights)
    assert torch.equal(four.statistics.sums, one.statistics.sums)
    assert torch.equal(four.statistics.maxima, one.statistics.maxima)
    assert torch.equal(four.statistics.histogram, one.statistics.histogram)


def test_inputs_are_left_as_they_are_and_carry_no_gradient(batch: dict[str, torch.Tensor]) -> None:
    train = batch["train_log_probs"].clone().requires_grad_()
    result = correct({**batch, "train_log_probs": train}, CONFIGS[1], 0)
    assert not result.weights.requires_grad
    assert torch.equal(train.nan_to_num(), batch["train_log_probs"].nan_to_num())


def test_apply_finds_the_same_and_looks_at_nothing_else(batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIGS[1], "diagnostics": "full"}
    whole = correct(batch, config, 0)
    monkeypatch.setattr("verl_rc.correction.sweep.SMALLEST_PASS", 0)
    names = ("train_log_probs", "rollout_log_probs", "response_mask")
    weights, keep = apply(*(batch[name] for name in names), config, whole.statistics, batch["advantages"])
    assert torch.equal(weights, whole.weights)
    assert torch.equal(keep, whole.keep_mask)
    with pytest.raises(ValueError, match="advantages must have shape"):
        apply(*(batch[name] for name in names), config, whole.statistics, batch["advantages"][:2])
