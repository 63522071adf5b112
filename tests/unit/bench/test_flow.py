"""Where methods lead a tabular policy."""

import itertools

import pytest

from verl_rc.bench import flow
from verl_rc.bench.flow import FLOW_CONDITIONS, follow, run_flow
from verl_rc.bench.method import find_method
from verl_rc.bench.policies import make_problem

PROBLEM = make_problem(2)


def climb(inputs):
    return inputs.reduce(-inputs.advantages * inputs.log_probs), {}


def turn_back(inputs):
    """The opposite of a policy gradient."""
    return inputs.reduce(inputs.advantages * inputs.log_probs), {}


def test_fresh_responses_lead_to_the_optimum_and_each_step_is_at_most_so_long():
    path = follow(find_method("disabled"), FLOW_CONDITIONS["fresh"], PROBLEM)
    assert path[0] == pytest.approx(PROBLEM.expected_score(PROBLEM.logits))
    assert path[-1] > flow.OPTIMUM
    assert all(later > earlier for earlier, later in itertools.pairwise(path))


def test_responses_of_the_first_policy_suffice_with_weights_and_not_with_a_clip():
    frozen = FLOW_CONDITIONS["frozen"]
    with_weights, with_clip = (
        follow(find_method(name), frozen, PROBLEM)[-1] for name in ("decoupled_seq_is", "bypass_ppo_clip")
    )
    assert with_weights > flow.OPTIMUM > 0.6 > with_clip


def test_a_method_that_unlearns_has_collapsed(monkeypatch):
    monkeypatch.setattr(flow, "FLOW_CONDITIONS", {"fresh": FLOW_CONDITIONS["fresh"]})
    good, bad = (
        run_flow(find_method(f"{__name__}:{name}"), [PROBLEM], steps=30)["fresh"]
        for name in ("climb", "turn_back")
    )
    assert (good.collapsed, bad.collapsed) == (0, 1)
    assert (good.optimal, bad.optimal) == (1, 0)
    start = PROBLEM.expected_score(PROBLEM.logits)
    assert bad.best == pytest.approx(start)
    assert bad.score < start - flow.FALL < start < good.score == good.best
