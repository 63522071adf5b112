"""The optimal token baselines against loops in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_rc.advantage import compute_advantages

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
    """Token by token; a token's place is its position, or with `packed` its number among the row's response tokens."""
    mask = arguments["response_mask"]
    advantages = torch.zeros_like(arguments["token_level_rewards"])
    places: dict[tuple[int, int], list[tuple[int, int, float, float]]] = {}
    for row in range(6):
        tokens = mask[row].nonzero().flatten().tolist()
        path_weight = 0.0
        for number, t in enumerate(tokens):
            weight = 1 - 2 * math.exp(arguments["old_log_probs"][row, t]) + arguments["sum_pi_squared"][row, t].item()
            if arguments["rollout_is_weights"] is not None:
                weight *= arguments["rollout_is_weights"][row, t].item() ** 2
            path_weight += weight
            to_go = sum(arguments["token_level_rewards"][row, later].item() for later in tokens[number:])
            place = (GROUPS[row], number if packed else t)
            places.setdefault(place, []).append((row, t, to_go, path_weight))
    for entries in places.values():
        total = sum(weight for *_, weight in entries)
        baseline = sum(to_go * weight for *_, to_go, weight in entries) / (total + 1e-8) if len(entries) > 1 else 0.0
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
