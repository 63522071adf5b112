"""Expected gradients of every method against enumeration, and that the comparison can fail."""

import math

import exactness
import pytest
import torch

from verl_rc.correction import compute_rollout_correction

PROBLEM = exactness.make_problem(seed=2, gap=0.5)
OUTCOME = exactness.outcome_advantages(PROBLEM)
CRITIC = exactness.critic_advantages(PROBLEM)
METHODS = {method.name: method for method in exactness.METHODS}


def inverse_ratio(train, rollout, *arguments, **keywords):
    return compute_rollout_correction(rollout, train, *arguments, **keywords)


def expected_score(logits):
    total = 0.0
    for response in PROBLEM.responses:
        places = zip(exactness.states_of(response.tokens), response.tokens, strict=True)
        total += response.score * math.prod(
            exactness.softmax(logits[state])[token] for state, token in places
        )
    return total


def slopes(function, logits, step=1e-5):
    """Central differences of a function of a list of lists."""
    found = []
    for row in logits:
        for index in range(len(row)):
            before, row[index] = row[index], row[index] + step
            above = function(logits)
            row[index] = before - step
            below = function(logits)
            row[index] = before
            found.append((above - below) / (2 * step))
    return found


def test_everything_that_can_be_said_is_enumerated_once():
    said = [response.tokens for response in PROBLEM.responses]
    assert len(said) == len(set(said)) == 1 + 3 + 9 * 4
    assert math.fsum(math.prod(response.p) for response in PROBLEM.responses) == pytest.approx(1, abs=1e-12)
    assert math.fsum(math.prod(response.q) for response in PROBLEM.responses) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("advantages", [OUTCOME, CRITIC], ids=["outcome", "critic"])
def test_the_true_gradient_is_the_slope_of_the_expected_score(advantages):
    wanted = slopes(expected_score, [list(row) for row in PROBLEM.logits])
    assert exactness.true_gradient(PROBLEM, advantages) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["sequence weights", "sequence weights, bypass reinforce"])
def test_sequence_weights_without_a_cap_are_unbiased(name, seed):
    problem = exactness.make_problem(seed, gap=0.5)
    for advantages in (exactness.outcome_advantages(problem), exactness.critic_advantages(problem)):
        assert exactness.examine(problem, METHODS[name], advantages).bias < 1e-12


def test_prefix_weights_are_unbiased_for_advantages_of_prefixes_only():
    prefix = METHODS["prefix weights"]
    assert exactness.examine(PROBLEM, prefix, CRITIC).bias < 1e-12
    assert exactness.examine(PROBLEM, prefix, OUTCOME).bias > 0.01


@pytest.mark.parametrize("advantages", [OUTCOME, CRITIC], ids=["outcome", "critic"])
@pytest.mark.parametrize("name", METHODS)
def test_the_bias_of_every_method_is_the_enumerated_one(name, advantages):
    assert exactness.examine(PROBLEM, METHODS[name], advantages).disagreement < 1e-12


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if "rollout_rs" in m.config or "band" in n])
def test_every_band_and_rule_rejects_a_part(name):
    assert 0.05 < exactness.examine(PROBLEM, METHODS[name], OUTCOME).used < 0.98


@pytest.mark.parametrize("level", ["token", "prefix", "sequence"])
def test_every_cap_changes_the_gradient(level):
    free, capped = METHODS[f"{level} weights"], METHODS[f"{level} weights, at most 2"]
    gradients = [exactness.gradients_of_responses(PROBLEM, method, OUTCOME) for method in (free, capped)]
    assert not torch.allclose(*gradients, atol=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "token weights",
        "prefix weights",
        "sequence weights",
        "geometric weights",
        "token_k1 0.5 to 1.5",
        "token_k3 up to 0.1",
        "seq_sum_k1 0.5 to 1.5",
        "seq_mean_k1 0.7 to 1.2",
        "veto below 0.6",
        "off-policy sequence masking above 0.1",
    ],
)
def test_an_inverse_ratio_is_found(name):
    finding = exactness.examine(PROBLEM, METHODS[name], OUTCOME, correct=inverse_ratio)
    assert finding.disagreement > 1e5 * exactness.TOLERANCE
    assert finding.bias > 0.05


def test_a_wrong_bias_stops_the_table(monkeypatch):
    monkeypatch.setattr(
        exactness, "enumerated_bias", lambda *_: [0.0] * (len(exactness.STATES) * exactness.VOCABULARY)
    )
    with pytest.raises(ArithmeticError, match="no correction"):
        exactness.correction_table([PROBLEM])


def test_variance_and_bias_balance():
    finding = exactness.Finding(bias=0.1, variance=5.0, used=1.0, disagreement=0.0)
    assert finding.balance == pytest.approx(500)
    assert exactness.Finding(bias=0.0, variance=5.0, used=1.0, disagreement=0.0).balance == math.inf


def test_estimators_of_kl():
    value, gradient, opposite = exactness.kl_by_hand()

    def divergence(logits):
        p, q = exactness.softmax(logits[0]), exactness.softmax(exactness.KL_REFERENCE_LOGITS)
        return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    assert gradient == pytest.approx(slopes(divergence, [list(exactness.KL_LOGITS)]), abs=1e-9)
    found = {kind: exactness.kl_by_estimator(kind) for kind in exactness.KL_KINDS}
    for kind in ("k1", "k3", "k1+", "k3+"):
        assert found[kind][0] == pytest.approx(value, abs=1e-12)
    for kind in ("k2", "k1+", "k3+"):
        assert found[kind][1].tolist() == pytest.approx(gradient, abs=1e-12)
    assert found["k1"][1].tolist() == pytest.approx([0.0] * 5, abs=1e-12)
    assert found["k3"][1].tolist() == pytest.approx(opposite, abs=1e-12)


def test_both_tables_are_printed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["exactness.py", "--problems", "1"])
    exactness.main()
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in METHODS)
    assert "| `k3+` |" in printed
