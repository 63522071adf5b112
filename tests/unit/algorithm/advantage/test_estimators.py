"""All advantage estimators together: golden values, invariances, registration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.algorithm.advantage import (
    AdvantageInputs,
    compute_advantages,
    register_advantage_estimator,
    resolve_advantage_estimator,
)
from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "advantages.json").read_text())["cases"]
NAMES = [name for name, spec in ADVANTAGE_ESTIMATORS.items() if spec.same_as is None]
COMPARING_GROUPS = [name for name in NAMES if ADVANTAGE_ESTIMATORS[name].compares_groups]


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{i}-{case['name']}" for i, case in enumerate(GOLDEN)])
def test_advantages_and_returns_equal_golden_on_response_tokens(case: dict[str, Any]) -> None:
    options = {key: value for key, value in case["kwargs"].items() if key != "config"}
    advantages, returns = compute_advantages(
        case["name"],
        float64(case["token_level_rewards"]),
        float64(case["response_mask"]),
        group_ids=case["index"],
        values=float64(case["values"]) if "values" in case else None,
        reward_baselines=float64(case["reward_baselines"]) if "reward_baselines" in case else None,
        **options,
        **case["kwargs"].get("config", {}),
    )
    mask = float64(case["response_mask"])
    expected = case["expected"]
    torch.testing.assert_close(advantages, float64(expected["advantages"]) * mask, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns, float64(expected["returns"]) * mask, rtol=1e-5, atol=1e-6)


def make_arguments(seed: int, rows: int = 8, length: int = 6) -> dict[str, Any]:
    """A batch with gaps, a padding row, rewards on response tokens and groups of three sizes."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    mask = uniform(rows, length) < 0.7
    mask[:, 1] = True
    mask[2] = False
    return {
        "token_level_rewards": (uniform(rows, length) * 3 - 1) * mask,
        "response_mask": mask,
        "group_ids": torch.tensor([0, 1, 2, 1, 0, 0, 1, 0]),
        "values": uniform(rows, length),
        "reward_baselines": uniform(rows),
        "gamma": 0.9,
        "lam": 0.8,
        "component_scores": uniform(rows, 3),
        "component_weights": [1.0, 0.5, 2.0],
        "old_log_probs": -3 * uniform(rows, length),
        "sum_pi_squared": uniform(rows, length),
        "rollout_is_weights": 2 * uniform(rows, length),
    }


PER_TOKEN = (
    "token_level_rewards",
    "response_mask",
    "values",
    "old_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
)
PER_ROW = (*PER_TOKEN, "group_ids", "reward_baselines", "component_scores")


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), padding=st.integers(0, 3))
@pytest.mark.parametrize("name", NAMES)
def test_order_of_rows_padding_and_values_outside_the_response_do_not_matter(
    name: str, seed: int, padding: int
) -> None:
    arguments = make_arguments(seed)
    advantages, returns = compute_advantages(name, **arguments)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))
    mask = arguments["response_mask"]
    changed = {key: value[order] if key in PER_ROW else value for key, value in arguments.items()}
    for key in PER_TOKEN:
        changed[key] = torch.nn.functional.pad(changed[key], (0, padding))
        if key != "response_mask":
            changed[key] = changed[key].masked_fill(
                ~torch.nn.functional.pad(mask[order], (0, padding)), torch.nan
            )
    changed["group_ids"] = [f"prompt {number}" for number in changed["group_ids"].tolist()]
    for before, after in zip((advantages, returns), compute_advantages(name, **changed), strict=True):
        torch.testing.assert_close(
            after, torch.nn.functional.pad(before[order], (0, padding)), rtol=1e-9, atol=1e-9
        )
        assert not before[~mask].any()


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_a_response_count_nowhere(name: str) -> None:
    arguments = make_arguments(1)
    rest = torch.tensor([0, 1, 3, 4, 5, 6, 7])
    full = compute_advantages(name, **arguments)
    arguments |= {"group_ids": torch.tensor([0, 1, 0, 1, 0, 0, 1, 0])}
    with_row_2_in_a_group = compute_advantages(name, **arguments)
    without = compute_advantages(name, **{k: v[rest] if k in PER_ROW else v for k, v in arguments.items()})
    for kept, dropped, moved in zip(full, without, with_row_2_in_a_group, strict=True):
        torch.testing.assert_close(kept[rest], dropped)
        torch.testing.assert_close(kept, moved)


@pytest.mark.parametrize("name", COMPARING_GROUPS)
def test_excluded_rows_get_nothing_and_change_nothing(name: str) -> None:
    arguments = make_arguments(2)
    included = torch.tensor([True, True, True, False, True, False, True, True])
    advantages, returns = compute_advantages(name, **arguments, included_rows=included)
    rest = included.nonzero().flatten()
    alone = compute_advantages(name, **{k: v[rest] if k in PER_ROW else v for k, v in arguments.items()})
    torch.testing.assert_close(advantages[rest], alone[0])
    torch.testing.assert_close(returns[rest], alone[1])
    assert not advantages[~included].any()


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "grpo"])
def test_excluding_rows_is_refused_where_no_groups_are_compared(name: str) -> None:
    arguments = make_arguments(2)
    if name == "grpo":
        arguments["group_ids"] = None
    with pytest.raises(
        ValueError, match=r"an estimator that compares groups; got .*rejected_in_group_baseline=include"
    ):
        compute_advantages(name, **arguments, included_rows=torch.ones(8))


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_after_the_last_response_token_is_credited_to_it(name: str) -> None:
    arguments = make_arguments(3)
    mask = arguments["response_mask"].clone()
    mask[:, -1] = False
    mask[4, 3:] = False
    on_last = torch.zeros(8, 6, dtype=torch.float64)
    elsewhere = on_last.clone()
    for row in range(8):
        if mask[row].any():
            on_last[row, mask[row].nonzero().max()] = row + 1.0
            elsewhere[row, -1] = row + 1.0
    arguments["response_mask"] = mask
    expected = compute_advantages(name, **{**arguments, "token_level_rewards": on_last})
    actual = compute_advantages(name, **{**arguments, "token_level_rewards": elsewhere})
    for before, after in zip(expected, actual, strict=True):
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", NAMES)
def test_runs_without_reading_tensors_on_the_host(name: str) -> None:
    with FakeTensorMode():
        arguments: dict[str, Any] = {key: torch.ones(4, 70) for key in PER_TOKEN}
        arguments |= {"group_ids": torch.zeros(4, dtype=torch.int64), "reward_baselines": torch.ones(4)}
        advantages, returns = compute_advantages(name, **arguments, component_scores=torch.ones(4, 2))
    assert advantages.shape == returns.shape == (4, 70)


def test_vectorized_names_are_the_same_estimators_but_for_the_only_row_of_a_group() -> None:
    assert resolve_advantage_estimator("grpo_vectorized") is resolve_advantage_estimator("grpo")
    rewards, groups = torch.tensor([[3.0], [5.0], [1.0]]), ["a", "b", "b"]
    for name, alone in (("rloo", 3.0), ("rloo_vectorized", 0.0), ("grpo", 3.0 / (1 + 1e-6))):
        advantages, _ = compute_advantages(
            name, rewards, torch.ones(3, 1), groups, norm_adv_by_std_in_grpo=True
        )
        expected = [2**0.5 / 2, -(2**0.5) / 2] if name == "grpo" else [4.0, -4.0]
        assert advantages.flatten().tolist() == pytest.approx([alone, *expected], rel=1e-5)


def raw_rewards(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    return inputs.token_level_rewards, inputs.token_level_rewards


def test_user_estimators_are_found_by_registered_name_and_by_module_and_function() -> None:
    register_advantage_estimator("raw_for_test")(raw_rewards)
    rewards = torch.tensor([[1.0, 2.0]])
    assert torch.equal(compute_advantages("raw_for_test", rewards, torch.ones(1, 2))[0], rewards)
    given = resolve_advantage_estimator("verl_rc.algorithm.advantage.returns:gae")
    assert given.__wrapped__ is resolve_advantage_estimator("gae")
    for taken in ("grpo", "grpo_vectorized"):
        with pytest.raises(ValueError, match="is registered already"):
            register_advantage_estimator(taken)(raw_rewards)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "ppo"}, r"algorithm\.adv_estimator must be one of gae, .*; got 'ppo'"),
        ({"name": "no_such_module:f"}, "must name a function in an importable module"),
        ({"gamma": 1.1}, r"algorithm\.gamma must be in \[0, 1\], got 1\.1"),
        ({"lam": -0.1}, r"algorithm\.lam must be in"),
        ({"values": torch.ones(8, 5)}, r"must be \[B, T\] like token_level_rewards, .*\(8, 5\)"),
        ({"group_ids": ["a"] * 7}, "must name the prompt of each of the 8 rows; got 7"),
        ({"group_ids": None}, "pass group_ids="),
        ({"name": "gae", "values": None}, "'gae' needs values"),
        ({"name": "remax", "reward_baselines": None}, "'remax' needs reward_baselines"),
        ({"name": "remax", "reward_baselines": torch.ones(8, 1)}, r"one score per row, \[8\]; got \(8, 1\)"),
        ({"name": "gdpo", "component_scores": None}, "'gdpo' needs component_scores"),
        ({"name": "gdpo", "component_weights": [1.0]}, r"one weight .* got \(8, 3\) and 1 weights"),
        ({"name": "optimal_token_baseline", "old_log_probs": None}, "needs old_log_probs"),
        ({"name": "tir_optimal_token_baseline", "sum_pi_squared": None}, "needs sum_pi_squared"),
    ],
)
def test_refuses_what_it_cannot_compute(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_advantages(**{"name": "grpo", **make_arguments(4), **changes})


def test_no_gradient_flows_and_low_precision_is_computed_in_float32() -> None:
    arguments = make_arguments(5)
    arguments["values"].requires_grad_()
    arguments["old_log_probs"].requires_grad_()
    assert not compute_advantages("gae", **arguments)[0].requires_grad
    assert not compute_advantages("optimal_token_baseline", **arguments)[0].requires_grad
    rewards = arguments["token_level_rewards"].to(torch.bfloat16)
    assert (
        compute_advantages("gae", **{**arguments, "token_level_rewards": rewards})[0].dtype == torch.float32
    )
