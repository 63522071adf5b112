"""The exact track: what must hold mathematically, against plain loops."""

import itertools
import json
import math
import re

import pytest
import torch
from recipe_arguments import ROOT
from research import exact_track
from research.exact_track import (
    CONDITIONS,
    Problem,
    Responses,
    all_methods,
    examine,
    find_method,
    frozen_score,
    make_problem,
    result_of,
    update,
)

PROBLEM = make_problem(0)
KEPT = json.loads((ROOT / "scripts" / "research" / "results" / "exact_track.json").read_text())
METHODS = {method.name: method for method in all_methods()}


@pytest.mark.parametrize("name", METHODS)
def test_fresh_responses_need_no_correction(name: str) -> None:
    bias = examine(METHODS[name], "fresh", [PROBLEM])["bias"]
    if name in ("loss_mode=geo_mean", "loss_mode=sapo"):  # they divide by the length of a response
        assert 0.5 < bias < 0.95
    elif name == "loss_mode=clip_cov":  # it drops a share of tokens, fresh or not
        assert 0 < bias < 0.02
    else:
        assert bias < 1e-10


def loop_bias(condition: str, weigh, centered: bool = False) -> float:
    """The bias of an update that weighs tokens by ``weigh`` of a response's ratios, by plain loops;
    ``centered``: less the sampler's expectation of the weighted score, each token weighed by itself."""
    age, engine = CONDITIONS[condition]

    def softmax(logits):
        total = math.fsum(map(math.exp, logits))
        return [math.exp(logit) / total for logit in logits]

    logits = PROBLEM.policies[-1], engine(PROBLEM.policies[-1 - age])
    current, rollout = ([softmax(row) for row in table.tolist()] for table in logits)
    responses = PROBLEM.responses
    tables = responses.states, responses.tokens, responses.mask, PROBLEM.scores
    rows = [
        (list(zip(states[: sum(mask)], tokens[: sum(mask)], strict=True)), score)
        for states, tokens, mask, score in zip(*(table.tolist() for table in tables), strict=True)
    ]

    def chance(policy, places):
        return math.prod(policy[state][token] for state, token in places)

    mean = math.fsum(chance(rollout, places) * score for places, score in rows)
    difference, true = ([[0.0] * 3 for _ in current] for _ in range(2))
    for places, score in rows:
        ratios = [current[state][token] / rollout[state][token] for state, token in places]
        for (state, token), weight in zip(places, weigh(ratios), strict=True):
            for other in range(3):
                slope = (other == token) - current[state][other]
                exactly = chance(current, places) * score * slope
                true[state][other] += exactly
                pushed = weight * slope
                if centered:
                    pushed -= math.fsum(
                        rollout[state][one]
                        * weigh([current[state][one] / rollout[state][one]])[0]
                        * ((other == one) - current[state][other])
                        for one in range(3)
                    )
                difference[state][other] += chance(rollout, places) * (score - mean) * pushed - exactly
    return math.hypot(*itertools.chain(*difference)) / math.hypot(*itertools.chain(*true))


@pytest.mark.parametrize("condition", ["1 step", "8 steps", "T .9", "noise"])
@pytest.mark.parametrize(
    ("name", "weigh"),
    [
        ("disabled", lambda ratios: [1.0] * len(ratios)),
        ("decoupled_token_is", lambda ratios: [min(ratio, 2.0) for ratio in ratios]),
        ("decoupled_seq_is", lambda ratios: [min(math.prod(ratios), 2.0)] * len(ratios)),
        ("loss_mode=cispo", lambda ratios: [min(max(ratio, 0.8), 1.2) for ratio in ratios]),
    ],
)
def test_biases_are_those_of_a_plain_loop(condition, name, weigh) -> None:
    found = examine(find_method(name), condition, [PROBLEM])["bias"]
    assert found == pytest.approx(loop_bias(condition, weigh), abs=1e-10)


@pytest.mark.parametrize("condition", ["1 step", "8 steps", "T .9", "noise"])
@pytest.mark.parametrize(
    ("name", "weigh"),
    [
        ("score_centering", lambda ratios: [1.0] * len(ratios)),
        ("score_centering_token_is", lambda ratios: [min(ratio, 2.0) for ratio in ratios]),
    ],
)
def test_the_bias_of_a_centered_update_is_that_of_a_plain_loop(condition, name, weigh) -> None:
    found = examine(find_method(name), condition, [PROBLEM])["bias"]
    assert found == pytest.approx(loop_bias(condition, weigh, centered=True), abs=1e-10)


@pytest.mark.parametrize(
    "name", ["disabled", "decoupled_seq_is", "bypass_ppo_clip", "decoupled_seq_is,top_k=1"]
)
def test_mean_and_variance_are_those_of_all_groups(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Every group of three responses, one by one, with advantages by hand."""
    monkeypatch.setattr(exact_track, "GROUP", 3)
    responses = Responses.list_all(2, 2)
    logits = torch.tensor([[0.2, -0.4], [0.7, 0.1]], dtype=torch.float64)
    rollout = torch.tensor([[-0.3, 0.1], [0.1, 0.6]], dtype=torch.float64)
    problem = Problem(responses, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), (logits,))
    found = update(find_method(name), problem, rollout, logits)
    numbers = torch.arange(3).repeat_interleave(3).tolist()
    by_row = dict(
        zip(zip(numbers, found.rows.right_others.tolist(), strict=True), found.coefficients, strict=True)
    )
    chances, updates = [], []
    for group in itertools.product(range(3), repeat=3):
        chances.append(math.prod(float(responses.probabilities(rollout)[row]) for row in group))
        total = torch.zeros_like(logits)
        for place, row in enumerate(group):
            others = [float(problem.scores[other]) for index, other in enumerate(group) if index != place]
            one = found.rows.advantages[row * 3 + int(sum(others))]
            assert float(one[0]) == pytest.approx(float(problem.scores[row]) - sum(others) / 2)
            padded = torch.zeros(3, 2, 2, dtype=torch.float64)
            padded[row] = by_row[row, int(sum(others))]
            total += responses.add_up(padded, logits) / 3
        updates.append(total.flatten())
    stacked, chance = torch.stack(updates), torch.tensor(chances, dtype=torch.float64)
    mean = chance @ stacked
    torch.testing.assert_close(found.mean.flatten(), mean)
    assert found.variance == pytest.approx(float(chance @ (stacked - mean).square().sum(dim=-1)), rel=1e-9)


def test_a_gradient_is_a_slope() -> None:
    logits = PROBLEM.policies[-1].clone()
    gradient, at = PROBLEM.true_gradient(logits), (3, 1)
    step = torch.zeros_like(logits)
    step[at] = 1e-5
    slope = (PROBLEM.expected_score(logits + step) - PROBLEM.expected_score(logits - step)) / 2e-5
    assert float(gradient[at]) == pytest.approx(slope, rel=1e-6)


def test_responses_of_the_first_policy_suffice_with_weights_and_not_with_a_clip() -> None:
    weighed, clipped = (
        frozen_score(find_method(name), [make_problem(2)]) for name in ("decoupled_seq_is", "bypass_ppo_clip")
    )
    assert weighed > 0.95 > 0.6 > clipped


@pytest.mark.parametrize("name", ["decoupled_token_is", "loss_mode=m2po"])
def test_numbers_that_are_kept_are_those_of_today(name: str) -> None:
    found = result_of(METHODS[name], [make_problem(seed) for seed in exact_track.SEEDS])
    assert found.pop("frozen") == pytest.approx(KEPT[name]["frozen"], rel=1e-5)
    for condition, numbers in found["conditions"].items():
        assert numbers == pytest.approx(KEPT[name]["conditions"][condition], rel=1e-6, abs=1e-9)


def test_every_method_stands_in_the_page() -> None:
    lines = (ROOT / "docs" / "evidence.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    numbers = {name: cells for names, *cells in rows for name in re.findall(r"`([^`]+)`", names)}
    assert METHODS.keys() == KEPT.keys() == numbers.keys()
    for name, result in KEPT.items():
        _, error, *_, frozen, _ = exact_track.line_of(name, result).strip("| ").split(" | ")
        assert numbers[name] == [error, frozen], name


@pytest.mark.parametrize("text", ["decoupled_sec_is", "gspo", "loss_mode=gpso"])
def test_a_method_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"a method must be a preset or loss_mode=NAME; got '{text}'"):
        find_method(text)
