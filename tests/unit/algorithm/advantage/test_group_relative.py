"""Baselines of groups of answers to one prompt."""

import math
import statistics
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_rc.algorithm.advantage import compute_advantages
from verl_rc.algorithm.advantage.group_relative import informative_groups
from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS


def one_token_rows(scores: list[float]) -> tuple[Tensor, Tensor]:
    return torch.tensor(scores, dtype=torch.float64).unsqueeze(1), torch.ones(len(scores), 1)


def row_advantages(name: str, scores: list[float], groups: list[int], **options: bool) -> list[float]:
    return compute_advantages(name, *one_token_rows(scores), group_ids=groups, **options)[0][:, 0].tolist()


def members(groups: list[int]) -> dict[int, list[int]]:
    rows = defaultdict(list)
    for row, group in enumerate(groups):
        rows[group].append(row)
    return rows


score_lists = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.0, -3.25, 7.0]), st.integers(0, 3)), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=50)
@given(score_lists)
def test_group_sums_are_zero_and_rloo_is_grpo_times_n_over_n_minus_one(rows: list[tuple[float, int]]) -> None:
    scores, groups = [score for score, _ in rows], [group for _, group in rows]
    centred = row_advantages("grpo", scores, groups, norm_adv_by_std_in_grpo=False)
    normalised = row_advantages("grpo", scores, groups)
    left_out = row_advantages("rloo", scores, groups)
    for group in members(groups).values():
        n = len(group)
        if n == 1:
            assert [centred[group[0]], left_out[group[0]]] == [scores[group[0]]] * 2
            assert normalised[group[0]] == pytest.approx(scores[group[0]], rel=1e-5)
            continue
        assert sum(centred[row] for row in group) == pytest.approx(0, abs=1e-9)
        deviation = statistics.stdev(scores[row] for row in group)
        for row in group:
            others = [scores[other] for other in group if other != row]
            assert left_out[row] == pytest.approx(scores[row] - statistics.mean(others))
            assert left_out[row] == pytest.approx(n / (n - 1) * centred[row])
            assert normalised[row] == pytest.approx(centred[row] / (deviation + 1e-6), abs=1e-8)


@settings(deadline=None, max_examples=50)
@given(score_lists, st.booleans())
def test_passk_pays_the_best_rows_lead_only(rows: list[tuple[float, int]], normalise: bool) -> None:
    scores, groups = [score for score, _ in rows], [group for _, group in rows]
    advantages = row_advantages("grpo_passk", scores, groups, norm_adv_by_std_in_grpo=normalise)
    for group in members(groups).values():
        expected = dict.fromkeys(group, 0.0)
        if len(group) > 1:
            best, second = sorted(group, key=lambda row: -scores[row])[:2]
            scale = statistics.stdev(scores[row] for row in group) + 1e-6 if normalise else 1.0
            expected[best] = (scores[best] - scores[second]) / scale
        for row in group:
            assert advantages[row] == pytest.approx(expected[row])


GROUP_ESTIMATORS = [
    "grpo",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("scale", [0.1, 100.3, 12345.6])
def test_scores_a_float32_step_apart_are_equal_scores(name: str, scale: float) -> None:
    """What is left of 12345.6 is 1e-12 of it: the mean of equal numbers, in float64."""
    low = torch.tensor(scale)
    rewards = torch.stack([low, low.nextafter(torch.tensor(math.inf)), low, low]).unsqueeze(1)
    for credit in ("episode", "turn"):  # the same for estimators without credit by turn
        advantages, _ = compute_advantages(
            name, rewards, torch.ones(4, 1), group_ids=[0] * 4, turn_credit=credit
        )
        assert advantages.abs().max() <= scale * 1e-12
    assert informative_groups(rewards[:, 0].tolist(), [0] * 4) == []


def test_parts_of_a_reward_a_float32_step_apart_are_equal_parts() -> None:
    part = torch.tensor([100.3, 100.3, 100.3])
    part[1] = part[1].nextafter(torch.tensor(math.inf))
    advantages, _ = compute_advantages(
        "gdpo", torch.zeros(3, 1), torch.ones(3, 1), group_ids=[0] * 3, component_scores=part.unsqueeze(1)
    )
    assert advantages.eq(0).all()


def test_what_large_rewards_leave_when_they_cancel_is_no_score() -> None:
    """100.1 + 200.2 − 300.3 is 7.6e-6 in float32 numbers, added up exactly."""
    rewards = torch.tensor([[100.1, 200.2, -300.3], [0.0, 0.0, 0.0], [100.1, 200.2, -300.3]])
    assert rewards[0].double().sum().item() == pytest.approx(7.6e-6, rel=0.1)
    advantages, _ = compute_advantages("grpo", rewards, torch.ones(3, 3), group_ids=[0] * 3)
    assert advantages.eq(0).all()


def test_scores_far_enough_apart_keep_their_advantages() -> None:
    advantages = row_advantages("grpo", [100.0, 100.001], [0, 0])
    assert advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=2e-3)
    assert informative_groups([100.0, 100.001], [0, 0]) == [0]


def test_a_row_that_exclusion_leaves_alone_gets_zero_and_an_only_row_keeps_its_score() -> None:
    rewards = torch.tensor([[1.0], [0.5], [2.0], [3.0], [0.25]])
    included = torch.tensor([True, False, True, True, True])
    for name in ("grpo", "rloo", "gpg", "reinforce_plus_plus_baseline"):
        advantages, _ = compute_advantages(
            name, rewards, torch.ones(5, 1), group_ids=[0, 0, 1, 1, 2], included_rows=included
        )
        assert advantages[:2].eq(0).all()
        assert advantages[2:].ne(0).all()


def test_equal_scores_give_zero_even_when_they_are_no_round_numbers() -> None:
    rewards, mask = one_token_rows([0.1] * 7)
    advantages, _ = compute_advantages("grpo", rewards.float(), mask, group_ids=[0] * 7)
    assert advantages.abs().max().item() < 1e-8


def test_scores_are_sums_over_the_row_and_spread_over_its_tokens() -> None:
    rewards = torch.tensor([[1.0, 2.0, torch.nan], [0.0, 0.0, 5.0], [0.5, 0.5, 0.5]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]])
    advantages, returns = compute_advantages(
        "grpo", rewards, mask, group_ids=["a", "a", "b"], norm_adv_by_std_in_grpo=False
    )
    assert advantages.tolist() == [[-1.0, -1.0, 0.0], [1.0, 1.0, 0.0], [1.5, 1.5, 1.5]]
    assert torch.equal(advantages, returns)


def test_opo_weights_the_baseline_by_length_by_hand() -> None:
    rewards = torch.tensor([[4.0, 0.0, 0.0], [1.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    advantages, _ = compute_advantages("opo", rewards, mask, group_ids=[7, 7, 9])
    baseline = (1 * 4 + 3 * 1) / 4
    assert advantages[:, 0].tolist() == [4 - baseline, 1 - baseline, 0]


def test_gpg_scales_by_rows_over_rows_with_a_score() -> None:
    assert row_advantages("gpg", [2.0, 0.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 1, 2]) == pytest.approx(
        [3.0, -3.0, -1.0, 2.0, -1.0, 0.0]
    )
    assert row_advantages("gpg", [0.0, 0.0], [0, 0]) == [0.0, 0.0]


def test_reinforce_plus_plus_baseline_whitens_centred_scores_over_tokens() -> None:
    rewards = torch.tensor([[3.0, 0.0], [1.0, 0.0], [5.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    advantages, _ = compute_advantages("reinforce_plus_plus_baseline", rewards, mask, group_ids=[0, 0, 1])
    per_token = [1.0, 1.0, -1.0, 5.0, 5.0]
    mean, deviation = statistics.mean(per_token), statistics.stdev(per_token)
    assert advantages[mask.bool()].tolist() == pytest.approx([(x - mean) / deviation for x in per_token])


def test_gdpo_normalises_parts_separately_then_whitens() -> None:
    parts = [[1.0, 10.0], [0.0, 30.0], [1.0, 20.0], [0.5, 0.0]]
    groups, weights = [0, 0, 0, 1], [1.0, 0.5]
    rewards, mask = one_token_rows([0.0] * 4)
    advantages, _ = compute_advantages(
        "gdpo", rewards, mask, groups, component_scores=torch.tensor(parts), component_weights=weights
    )
    totals = []
    for row in range(4):
        total = 0.0
        for k, weight in enumerate(weights):
            column = [parts[other][k] for other in range(4) if groups[other] == groups[row]]
            mean, deviation = (
                (statistics.mean(column), statistics.stdev(column)) if len(column) > 1 else (0.0, 1.0)
            )
            total += weight * (parts[row][k] - mean) / (deviation + 1e-6)
        totals.append(total)
    expected = [(total - statistics.mean(totals)) / statistics.stdev(totals) for total in totals]
    assert advantages[:, 0].tolist() == pytest.approx(expected)


ALONE = {
    "grpo": [1, 0, 2],
    "rloo": [1, 0, 2],
    "gpg": [1.5, 0, 3],  # one row of three has no score
    "reinforce_plus_plus_baseline": [0, -1, 1],  # whitened over the batch
    "rloo_vectorized": [0, 0, 0],
    "opo": [0, 0, 0],
    "grpo_passk": [0, 0, 0],
}


@pytest.mark.parametrize("name", ALONE)
def test_samples_alone_in_their_groups_count_by_their_scores_unless_the_configuration_refuses_that(
    name: str,
) -> None:
    assert row_advantages(name, [1.0, 0.0, 2.0], [0, 1, 2]) == pytest.approx(ALONE[name], abs=1e-5)
    assert (not any(ALONE[name])) == ADVANTAGE_ESTIMATORS[name].needs_several_samples


GROUPS = [0, 1, 0, 0, 1, 2]


def make_arguments(contiguous: bool, weighted: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def uniform() -> Tensor:
        return torch.rand(6, 7, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([7, 3, 4, 2, 3, 5])
    mask = torch.arange(7) < lengths[:, None]
    if not contiguous:
        mask = mask & (uniform() < 0.7)
    return {
        "token_level_rewards": (uniform() * 2 - 0.5) * mask,
        "response_mask": mask,
        "old_log_probs": -3 * uniform(),
        "sum_pi_squared": uniform(),
        "rollout_is_weights": 2 * uniform() if weighted else None,
    }


def loop_advantages(arguments: dict[str, Any], packed: bool) -> Tensor:
    """Token by token; a token's place is its position, or with `packed` its number among the row's response
    tokens."""
    mask = arguments["response_mask"]
    advantages = torch.zeros_like(arguments["token_level_rewards"])
    places: dict[tuple[int, int], list[tuple[int, int, float, float]]] = {}
    for row in range(6):
        tokens = mask[row].nonzero().flatten().tolist()
        path_weight = 0.0
        for number, t in enumerate(tokens):
            weight = (
                1
                - 2 * math.exp(arguments["old_log_probs"][row, t])
                + arguments["sum_pi_squared"][row, t].item()
            )
            if arguments["rollout_is_weights"] is not None:
                weight *= arguments["rollout_is_weights"][row, t].item() ** 2
            path_weight += weight
            to_go = sum(arguments["token_level_rewards"][row, later].item() for later in tokens[number:])
            place = (GROUPS[row], number if packed else t)
            places.setdefault(place, []).append((row, t, to_go, path_weight))
    for entries in places.values():
        total = sum(weight for *_, weight in entries)
        baseline = (
            sum(to_go * weight for *_, to_go, weight in entries) / (total + 1e-8) if len(entries) > 1 else 0.0
        )
        for row, t, to_go, _ in entries:
            advantages[row, t] = to_go - baseline
    return advantages


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_equals_a_loop(name: str, contiguous: bool, weighted: bool) -> None:
    arguments = make_arguments(contiguous, weighted)
    expected = loop_advantages(arguments, packed=name.startswith("tir"))
    torch.testing.assert_close(compute_advantages(name, group_ids=GROUPS, **arguments)[0], expected)


def test_beyond_the_second_longest_row_the_longest_keeps_its_return() -> None:
    arguments = make_arguments(contiguous=True, weighted=False)
    advantages, returns = compute_advantages("optimal_token_baseline", group_ids=GROUPS, **arguments)
    assert torch.equal(advantages[0, 4:], returns[0, 4:])
    assert torch.equal(advantages[5], returns[5])
    assert not torch.equal(advantages[0, :4], returns[0, :4])


def test_groups_of_one_value_are_left_out() -> None:
    assert informative_groups([1, 1, 0, 1, 0, 0, 0.5], [7, 7, 3, 3, 9, 9, 5]) == [3, 5]


def test_rows_of_a_group_need_not_be_adjacent() -> None:
    assert informative_groups([0, 1, 1, 1], [2, 4, 2, 4]) == [2]


def test_nothing_in_nothing_out() -> None:
    assert informative_groups([], []) == []


def test_one_value_per_sample() -> None:
    with pytest.raises(ValueError, match="argument"):
        informative_groups([1.0], [0, 0])
