"""Tabular policies: every response once, and gradients that are slopes."""

import math

import pytest
import torch

from verl_rc.bench.policies import VERSIONS, Problem, Responses, make_problem


def test_every_response_is_listed_once_and_its_states_are_its_prefixes():
    responses = Responses.list_all(3, 2)
    said = [tuple(row[mask].tolist()) for row, mask in zip(responses.tokens, responses.mask, strict=True)]
    assert sorted(said) == [(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert responses.num_states == 3  # nothing said, 1 and 2
    states = dict(zip(said, responses.states.tolist(), strict=True))
    assert states[(1, 0)] == states[(1, 2)] == [0, 1]
    assert states[(2, 1)] == [0, 2]
    assert states[(0,)] == [0, 0]


def test_probabilities_are_products_and_add_up_to_one():
    responses = Responses.list_all(2, 2)  # END; 1 END; 1 1
    logits = torch.tensor([[math.log(0.25), math.log(0.75)], [math.log(0.4), math.log(0.6)]])
    said = responses.tokens.tolist()
    found = {tuple(row): float(p) for row, p in zip(said, responses.probabilities(logits), strict=True)}
    assert found == {(0, 0): pytest.approx(0.25), (1, 0): pytest.approx(0.3), (1, 1): pytest.approx(0.45)}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(5)


def test_the_true_gradient_is_the_slope_of_the_expected_score(problem):
    gradient, step = problem.true_gradient(problem.logits), 1e-5
    for place in ((0, 0), (0, 2), (1, 1), (17, 2)):
        above, below = problem.logits.clone(), problem.logits.clone()
        above[place] += step
        below[place] -= step
        slope = (problem.expected_score(above) - problem.expected_score(below)) / (2 * step)
        assert float(gradient[place]) == pytest.approx(slope, abs=1e-9)


def test_sums_and_squares_of_gradients_are_those_of_autograd(problem):
    generator = torch.Generator().manual_seed(0)
    coefficients = torch.randn(problem.responses.mask.shape, generator=generator, dtype=torch.float64)
    logits = problem.logits.clone().requires_grad_()
    log_probs = problem.responses.log_probs(logits)
    (wanted,) = torch.autograd.grad((coefficients * log_probs).sum(), logits, retain_graph=True)
    torch.testing.assert_close(problem.responses.add_up(coefficients, problem.logits), wanted)
    row = 60
    (of_row,) = torch.autograd.grad((coefficients * log_probs)[row].sum(), logits)
    squares = problem.responses.gradient_squares(problem.logits)[row]
    assert float((coefficients[row].square() * squares).sum()) == pytest.approx(float(of_row.square().sum()))


def test_versions_of_a_policy_are_a_seed_and_short_responses_are_wrong(problem):
    again = make_problem(5)
    assert len(problem.policies) == VERSIONS
    assert all(torch.equal(*pair) for pair in zip(problem.policies, again.policies, strict=True))
    assert not torch.equal(problem.logits, make_problem(6).logits)
    lengths = problem.responses.mask.sum(dim=-1)
    assert int(lengths[problem.scores == 1].min()) == 4
    assert 0.05 < problem.expected_score(problem.logits) < 0.6
