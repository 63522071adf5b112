"""The exact track: what must hold mathematically, against plain loops and the functions of the actor."""

import itertools
import math
import statistics

import pytest
import torch

from verl_rc.bench import exact
from verl_rc.bench.exact import CONDITIONS, Rows, coefficients, examine, run_exact, update
from verl_rc.bench.method import Method, correction_method, find_method
from verl_rc.bench.policies import Problem, Responses, make_problem
from verl_rc.config.algorithms import LOSS_MODES
from verl_rc.config.models import ActorConfig
from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig
from verl_rc.data.batches import TokenBatch, TokenScores, TrainBatch
from verl_rc.losses import Aggregation
from verl_rc.ppo.objective import corrected_current, policy_objective

PROBLEM = make_problem(0)
UNCAPPED = 4.9e8
ENGINES_WITH_ALL_TOKENS = [name for name in CONDITIONS if name != "top-p .9"]
OPTIONS = {"dro": ",dro_beta=0.1"}
"""What losses need that have no default."""
LOSSES = [f"loss_mode={name}{OPTIONS.get(name, '')}" for name in LOSS_MODES]


def weights(level: str, **fields: object) -> Method:
    config = {"rollout_is": level, "rollout_is_threshold": UNCAPPED, **fields}
    return correction_method(level, RolloutCorrectionConfig.model_validate(config))


def rollout_of(problem: Problem, name: str) -> torch.Tensor:
    condition = CONDITIONS[name]
    return condition.engine(problem.policies[-1 - condition.age])


# ---- What must hold.


@pytest.mark.parametrize("condition", ENGINES_WITH_ALL_TOKENS)
@pytest.mark.parametrize("fields", [{}, {"bypass_mode": True, "loss_type": "reinforce"}])
def test_sequence_weights_without_truncation_are_unbiased(condition, fields):
    assert examine(weights("sequence", **fields), CONDITIONS[condition], [PROBLEM]).bias < 1e-10


@pytest.mark.parametrize("name", [*PRESETS, *LOSSES])
def test_fresh_responses_need_no_correction_and_stale_ones_are_the_same_on_any_number_of_ranks(name):
    examine(find_method(name), CONDITIONS["4 steps"], [PROBLEM])  # raises, where they are not
    found = examine(find_method(name), CONDITIONS["fresh"], [PROBLEM])
    if name in ("loss_mode=geo_mean", "loss_mode=sapo"):  # they divide by the length of a response
        assert 0.5 < found.bias < 0.95
    elif name == "loss_mode=clip_cov":  # it drops a share of tokens, fresh or not
        assert 0 < found.bias < 0.02
    else:
        assert found.bias < 1e-10


def test_staleness_biases_no_correction_and_token_weights_less_and_truncation_a_little():
    found = {
        "none": examine(find_method("disabled"), CONDITIONS["4 steps"], [PROBLEM]),
        "token": examine(weights("token"), CONDITIONS["4 steps"], [PROBLEM]),
        "sequence": examine(find_method("decoupled_seq_is"), CONDITIONS["4 steps"], [PROBLEM]),
        "free": examine(weights("sequence"), CONDITIONS["4 steps"], [PROBLEM]),
    }
    assert found["none"].bias > found["token"].bias > found["sequence"].bias > 0.01 > found["free"].bias
    assert found["free"].variance > 2 * found["sequence"].variance


def test_no_weight_brings_back_what_an_engine_never_samples():
    assert examine(weights("sequence"), CONDITIONS["top-p .9"], [PROBLEM]).bias > 0.05


def loop_bias(problem: Problem, rollout: torch.Tensor, weigh) -> float:
    """Of an update that weighs tokens by ``weigh`` of a response's ratios, by plain loops: over groups a
    leave-one-out baseline is the mean score of the engine."""

    def softmax(logits):
        total = math.fsum(map(math.exp, logits))
        return [math.exp(logit) / total for logit in logits]

    current, engine = ([softmax(row) for row in logits.tolist()] for logits in (problem.logits, rollout))
    rows = [
        (list(zip(states[: sum(mask)], tokens[: sum(mask)], strict=True)), score)
        for states, tokens, mask, score in zip(
            problem.responses.states.tolist(),
            problem.responses.tokens.tolist(),
            problem.responses.mask.tolist(),
            problem.scores.tolist(),
            strict=True,
        )
    ]

    def chance(policy, places):
        return math.prod(policy[state][token] for state, token in places)

    mean = math.fsum(chance(engine, places) * score for places, score in rows)
    difference, true = ([[0.0] * 3 for _ in current] for _ in range(2))
    for places, score in rows:
        ratios = [current[state][token] / engine[state][token] for state, token in places]
        for (state, token), weight in zip(places, weigh(ratios), strict=True):
            for other in range(3):
                slope = (other == token) - current[state][other]
                exactly = chance(current, places) * score * slope
                true[state][other] += exactly
                difference[state][other] += chance(engine, places) * weight * (score - mean) * slope - exactly
    return math.hypot(*itertools.chain(*difference)) / math.hypot(*itertools.chain(*true))


@pytest.mark.parametrize("condition", ["1 step", "8 steps", "T .9", "noise"])
@pytest.mark.parametrize(
    ("name", "weigh"),
    [
        ("disabled", lambda ratios: [1.0] * len(ratios)),
        ("decoupled_token_is", lambda ratios: [min(ratio, 2.0) for ratio in ratios]),
        ("decoupled_seq_is", lambda ratios: [min(math.prod(ratios), 2.0)] * len(ratios)),
        ("icepop", lambda ratios: [ratio * (0.5 <= ratio <= 5) for ratio in ratios]),
        ("loss_mode=cispo", lambda ratios: [min(max(ratio, 0.8), 1.2) for ratio in ratios]),
    ],
)
def test_biases_are_those_of_a_plain_loop(condition, name, weigh):
    found = examine(find_method(name), CONDITIONS[condition], [PROBLEM])
    assert found.bias == pytest.approx(loop_bias(PROBLEM, rollout_of(PROBLEM, condition), weigh), abs=1e-10)


@pytest.mark.parametrize("name", ["disabled", "decoupled_seq_is", "bypass_ppo_clip"])
def test_mean_and_variance_are_those_of_all_groups(monkeypatch, name):
    """Every group of three responses, one by one, with advantages by hand."""
    monkeypatch.setattr(exact, "GROUP", 3)
    responses = Responses.list_all(2, 2)
    logits = torch.tensor([[0.2, -0.4], [0.7, 0.1]], dtype=torch.float64)
    rollout = torch.tensor([[-0.3, 0.1], [0.1, 0.6]], dtype=torch.float64)
    problem = Problem(responses, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), (logits,))
    method = find_method(name)
    found = update(method, problem, rollout, logits)
    by_row = {
        (int(state), int(right)): pulls
        for state, right, pulls in zip(
            torch.arange(3).repeat_interleave(3), found.rows.right_others, found.coefficients, strict=True
        )
    }
    chances, updates = [], []
    for group in itertools.product(range(3), repeat=3):
        chances.append(math.prod(float(responses.probabilities(rollout)[row]) for row in group))
        total = torch.zeros_like(logits)
        for place, row in enumerate(group):
            others = [float(problem.scores[other]) for index, other in enumerate(group) if index != place]
            expected = float(problem.scores[row]) - sum(others) / 2
            one = found.rows.advantages[row * 3 + int(sum(others))]
            assert float(one[0]) == pytest.approx(expected)
            padded = torch.zeros(3, 2, dtype=torch.float64)
            padded[row] = by_row[row, int(sum(others))]
            total += responses.add_up(padded, logits) / 3
        updates.append(total.flatten())
    stacked, chance = torch.stack(updates), torch.tensor(chances, dtype=torch.float64)
    mean = chance @ stacked
    torch.testing.assert_close(found.mean.flatten(), mean)
    variance = float(chance @ (stacked - mean).square().sum(dim=-1))
    assert variance > 0
    assert found.variance == pytest.approx(variance, rel=1e-9)


# ---- The track runs what trains.


def actor_coefficients(method: Method, rows: Rows, logits: torch.Tensor) -> torch.Tensor:
    """The gradient of the actor's objective for one mini-batch of all rows, by the functions of ``ppo``."""
    mask, train = rows.responses.mask, rows.responses.log_probs(logits).float()
    count, width = mask.shape
    one = torch.ones(count, dtype=torch.int64)
    batch = TrainBatch(
        tokens=TokenBatch(one[:, None], one, rows.responses.tokens, mask.sum(dim=-1), batch_size=[count]),
        response_mask=mask,
        loss_mask=mask,
        proximal_log_probs=train,
        rollout_log_probs=rows.rollout_log_probs.float(),
        advantages=rows.advantages.float(),
        rollout_is_weights=None,
        batch_size=[count],
    )
    corrected, _ = corrected_current(batch, train, method.correction, 0)
    actor = ActorConfig(ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.2, clip_ratio_high=0.2)
    totals = Aggregation("seq-mean-token-sum", float(mask.sum()) / count, 1.0, float(width))
    current = TokenScores(train.clone().requires_grad_(), torch.zeros_like(train))
    objective = policy_objective(current, corrected, actor, method.correction, totals)
    return -torch.autograd.grad(objective.loss, current.log_probs)[0].double()


@pytest.mark.parametrize(
    "name",
    [
        "decoupled_token_icepop",
        "decoupled_seq_is_rs",
        "bypass_ppo_clip_k3_rs",
        "ppo_is_bypass",
        "bypass_pg_is",
        "opsm",
        "geo_mis",
    ],
)
def test_the_track_computes_what_the_actor_computes(name):
    method, rollout = find_method(name), rollout_of(PROBLEM, "4 steps")
    rows = Rows.sample_all(PROBLEM, rollout)
    found = coefficients(method, rows, PROBLEM.logits, 1)
    wanted = actor_coefficients(method, rows, PROBLEM.logits)
    assert bool((wanted != 0).any())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_mean_weight_and_kept_tokens_are_those_of_a_large_mini_batch():
    rollout = rollout_of(PROBLEM, "8 steps")
    rows = Rows.sample_all(PROBLEM, rollout)
    plain, normalised = (
        coefficients(weights("sequence", **fields), rows, PROBLEM.logits, 1)
        for fields in ({}, {"rollout_is_batch_normalize": True})
    )
    ratio = plain[plain != 0] / normalised[plain != 0]
    sampled = rows.mini_batch()
    mean = (sampled.responses.log_probs(PROBLEM.logits) - sampled.rollout_log_probs).sum(dim=-1).exp().mean()
    torch.testing.assert_close(ratio, torch.full_like(ratio, float(mean)))
    rule = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
    original, kept = (
        coefficients(weights("token", **rule, rejection_denominator=kind), rows, PROBLEM.logits, 1)
        for kind in ("original", "kept")
    )
    ratios = (rows.responses.log_probs(PROBLEM.logits) - rows.rollout_log_probs).sum(dim=-1).exp()
    share = float(rows.weights @ ((ratios >= 0.5) & (ratios <= 2)).double())
    chosen = original != 0
    assert 0.1 < share < 0.9
    torch.testing.assert_close(
        original[chosen] / kept[chosen], torch.full_like(original[chosen], share), atol=2e-3, rtol=0
    )


def test_the_gap_of_the_conditions_is_that_of_recorded_runs():
    """Mean k3 of the runs in docs/evidence.md: four corrections at the usual rate, by age; fp8 weights and
    cache."""
    recorded = {
        "1 step": (0.00789, 0.00509, 0.00511, 0.0042),
        "4 steps": (0.13, 0.0632, 0.0508, 0.0293),
        "8 steps": (0.316, 0.148, 0.0759, 0.0594),
        "noise": (0.00317, 0.00322, 0.00309, 0.00461),
    }
    gaps = {}
    for name in recorded:
        rows = Rows.sample_all(PROBLEM, rollout_of(PROBLEM, name))
        ratio = rows.responses.log_probs(PROBLEM.logits) - rows.rollout_log_probs
        k3 = ((ratio.exp() - 1 - ratio) * rows.responses.mask).sum(dim=-1)
        gaps[name] = float(rows.weights @ k3) / float(rows.weights @ rows.responses.mask.sum(dim=-1).double())
    for name, runs in recorded.items():
        assert 0.5 < gaps[name] / statistics.geometric_mean(runs) < 2, gaps


# ---- What is refused.


def mean_over_rank(inputs):
    """Divides by what this rank holds."""
    return -(inputs.advantages * inputs.log_probs * inputs.loss_mask).sum() / inputs.loss_mask.sum(), {}


def weight_over_mean(train_log_probs, rollout_log_probs):
    """Divides by the mean weight of what this rank holds."""
    weights = (train_log_probs - rollout_log_probs).exp()
    return weights / weights.mean()


def weight_over_largest(train_log_probs, rollout_log_probs):
    weights = (train_log_probs - rollout_log_probs).exp()
    return weights / weights.max()


def less_the_mean_advantage(inputs):
    return inputs.reduce(-(inputs.advantages - inputs.advantages.mean()) * inputs.log_probs), {}


def reciprocal(train_log_probs, rollout_log_probs):
    return 1 / (train_log_probs - rollout_log_probs)


def reduced(inputs):
    return inputs.reduce(-inputs.advantages * inputs.log_probs), {}


def ratio_of_tokens(train_log_probs, rollout_log_probs):
    return (train_log_probs - rollout_log_probs).exp()


def scalar(advantages):
    return advantages.sum()


@pytest.mark.parametrize(
    ("function", "share"),
    [
        ("mean_over_rank", r"10\d\.\d"),  # a rank has some half of the tokens
        ("weight_over_mean", r"0\.[1-9]"),
        ("weight_over_largest", r"[1-9]\.\d"),
        ("less_the_mean_advantage", r"[1-9]\.\d"),
    ],
)
def test_a_method_that_depends_on_the_number_of_ranks_is_named(function, share):
    message = rf"{function} must not depend on the number of ranks; on two ranks it differs by {share}% of"
    with pytest.raises(ValueError, match=message):
        run_exact(find_method(f"{__name__}:{function}"), [PROBLEM])


def test_a_weight_that_is_not_finite_is_named_with_the_tokens():
    method = find_method(f"{__name__}:reciprocal")
    with pytest.raises(
        ValueError, match=r"reciprocal must weigh every response by finite numbers; .* tokens \[0,"
    ):
        examine(method, CONDITIONS["fresh"], [PROBLEM])


def test_a_weight_of_another_shape_is_named():
    with pytest.raises(ValueError, match=r"scalar must return \[1016, 6\], got \[\]"):
        examine(find_method(f"{__name__}:scalar"), CONDITIONS["fresh"], [PROBLEM])


@pytest.mark.parametrize(
    ("function", "same"), [("reduced", "disabled"), ("ratio_of_tokens", "decoupled_token_is")]
)
def test_functions_of_the_user_do_what_they_say(function, same):
    condition = CONDITIONS["1 step"]
    found = examine(find_method(f"{__name__}:{function}"), condition, [PROBLEM])
    assert found == examine(find_method(same), condition, [PROBLEM])
