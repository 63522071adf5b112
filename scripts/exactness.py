"""Expected gradients of rollout correction against the true one, by enumeration: python scripts/exactness.py
[--gap 0.5]"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl_rc.correction import CorrectionResult, compute_rollout_correction
from verl_rc.losses import Aggregation, compute_policy_loss
from verl_rc.tensor_ops import kl_penalty

VOCABULARY = 4
END = 0
MAX_TOKENS = 3
STATES = [prefix for n in range(MAX_TOKENS) for prefix in itertools.product(range(1, VOCABULARY), repeat=n)]
UNCAPPED = 4.9e8
"""A bound above every weight, because log-weights are clamped to 20."""

EXACT = 1e-12
"""Relative biases up to this are rounding errors."""
TOLERANCE = 1e-9

Gradient = list[float]
Correct = Callable[..., CorrectionResult]


@dataclass(frozen=True)
class Response:
    """One possible response, with its probabilities under both policies."""

    tokens: tuple[int, ...]
    p: list[float]
    """Probability of each token under the current policy."""
    q: list[float]
    """The same under the rollout policy."""
    score: float

    @property
    def ratios(self) -> list[float]:
        """Current over rollout, for each token."""
        return [p / q for p, q in zip(self.p, self.q, strict=True)]

    @property
    def ratio(self) -> float:
        """Current over rollout, for the whole sequence."""
        return math.prod(self.p) / math.prod(self.q)

    @property
    def mean_ratio(self) -> float:
        """Geometric mean of the tokens' ratios."""
        return self.ratio ** (1 / len(self.tokens))

    def all(self, coefficient: float) -> list[float]:
        """The same coefficient for each token."""
        return [coefficient] * len(self.tokens)


@dataclass(frozen=True)
class Problem:
    """A tabular policy with free logits for every prefix, and a rollout policy that differs from it."""

    logits: list[list[float]]
    """Of the current policy, by state and token."""
    rollout_logits: list[list[float]]
    responses: list[Response] = field(default_factory=list)


def make_problem(seed: int, gap: float) -> Problem:
    """Random logits and scores; ``gap`` is the standard deviation of the difference of the two policies'
    logits, nats."""
    source = random.Random(seed)
    logits = [[source.gauss(0, 1) for _ in range(VOCABULARY)] for _ in STATES]
    rollout_logits = [[logit + source.gauss(0, gap) for logit in row] for row in logits]
    problem = Problem(logits, rollout_logits)
    for tokens in all_responses():
        places = list(zip(states_of(tokens), tokens, strict=True))
        p = [softmax(logits[state])[token] for state, token in places]
        q = [softmax(rollout_logits[state])[token] for state, token in places]
        problem.responses.append(Response(tokens, p, q, source.gauss(0, 1)))
    return problem


def all_responses() -> Iterator[tuple[int, ...]]:
    """All possible responses: up to ``MAX_TOKENS`` tokens, none after ``END``."""
    for prefix in STATES:
        last = len(prefix) == MAX_TOKENS - 1
        yield from ((*prefix, token) for token in range(VOCABULARY) if last or token == END)


def states_of(tokens: Sequence[int]) -> list[int]:
    """Index of the state in which each token was sampled."""
    return [STATES.index(tuple(tokens[:t])) for t in range(len(tokens))]


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities."""
    total = math.fsum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


def outcome_advantages(problem: Problem) -> list[list[float]]:
    """Each token's advantage is the score of its sequence: REINFORCE without a baseline."""
    return [response.all(response.score) for response in problem.responses]


def critic_advantages(problem: Problem) -> list[list[float]]:
    """What a perfect critic of the current policy gives a token: expected score after it less expected score
    before it."""

    @functools.cache
    def value(prefix: tuple[int, ...]) -> float:
        below = [s for s in problem.responses if s.tokens[: len(prefix)] == prefix]
        weights = [math.prod(s.p[len(prefix) :]) for s in below]
        return math.fsum(w * s.score for w, s in zip(weights, below, strict=True))

    return [
        [value(s.tokens[: t + 1]) - value(s.tokens[:t]) for t in range(len(s.tokens))]
        for s in problem.responses
    ]


# ---- what should come out: plain loops, no code of the project
# ---------------------------------------------------------------


def weighted_scores(problem: Problem, coefficients: Sequence[Sequence[float]]) -> Gradient:
    """``sum_y sum_t c_t(y) d log p(y_t | y_<t) / d logits``, flat."""
    gradient = [0.0] * (len(STATES) * VOCABULARY)
    for response, row in zip(problem.responses, coefficients, strict=True):
        for state, token, coefficient in zip(states_of(response.tokens), response.tokens, row, strict=True):
            for other, probability in enumerate(softmax(problem.logits[state])):
                gradient[state * VOCABULARY + other] += coefficient * ((other == token) - probability)
    return gradient


def true_gradient(problem: Problem, advantages: Sequence[Sequence[float]]) -> Gradient:
    """The policy gradient under the current policy."""
    rows = zip(problem.responses, advantages, strict=True)
    return weighted_scores(problem, [[math.prod(s.p) * a for a in row] for s, row in rows])


def enumerated_bias(problem: Problem, method: Method, advantages: Sequence[Sequence[float]]) -> Gradient:
    """``sum_y sum_t (q(y) c_t(y) - p(y)) A_t d log p_t``, c being the method's coefficients by definition."""
    differences = []
    for s, row in zip(problem.responses, advantages, strict=True):
        weights = method.coefficients(s, row)
        differences.append(
            [(math.prod(s.q) * c - math.prod(s.p)) * a for c, a in zip(weights, row, strict=True)]
        )
    return weighted_scores(problem, differences)


# ---- what comes out: correction and losses of the project
# --------------------------------------------------------------------


def gradients_of_responses(
    problem: Problem,
    method: Method,
    advantages: Sequence[Sequence[float]],
    correct: Correct = compute_rollout_correction,
) -> Tensor:
    """What each response alone adds to an ascent direction, float64 ``[responses, logits]``; losses are
    divided by 1.

    Losses are sums over responses, so one backward pass to the log-probs gives every response's share; the
    Jacobian of the log-probs carries it on to the logits.
    """
    logits = torch.tensor(problem.logits, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: log_probs_of(problem, x), logits, vectorize=True)
    log_probs = log_probs_of(problem, logits).requires_grad_()
    rollout = log_probs_of(problem, torch.tensor(problem.rollout_logits, dtype=torch.float64))
    mask, padded_advantages = response_mask(problem), padded_rows(advantages)
    result = correct(log_probs.detach(), rollout, mask, method.config, advantages=padded_advantages)
    loss, _ = compute_policy_loss(
        result.config.named_loss or "vanilla",
        old_log_probs=rollout if result.config.bypass_mode else log_probs.detach(),
        log_probs=log_probs,
        advantages=padded_advantages,
        loss_mask=mask & result.keep_mask,
        response_mask=mask,
        rollout_is_weights=result.weights,
        aggregation=Aggregation("token-sum"),
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return -torch.einsum("bt,btsv->bsv", gradient, jacobian).flatten(start_dim=1)


def response_mask(problem: Problem) -> Tensor:
    """bool ``[responses, MAX_TOKENS]``."""
    return torch.tensor(
        [[t < len(response.tokens) for t in range(MAX_TOKENS)] for response in problem.responses]
    )


def log_probs_of(problem: Problem, logits: Tensor) -> Tensor:
    """``[responses, MAX_TOKENS]``, nats, under the policy of these ``logits`` ``[states, tokens]``; 0 on
    padding."""
    padding = [[0] * (MAX_TOKENS - len(response.tokens)) for response in problem.responses]
    rows = zip(problem.responses, padding, strict=True)
    states, tokens = zip(*(([*states_of(r.tokens), *pad], [*r.tokens, *pad]) for r, pad in rows), strict=True)
    return logits.log_softmax(dim=-1)[torch.tensor(states), torch.tensor(tokens)].where(
        response_mask(problem), 0.0
    )


def padded_rows(rows: Sequence[Sequence[float]]) -> Tensor:
    """float64 ``[responses, MAX_TOKENS]``, 0 on padding."""
    return torch.tensor([[*row, *[0.0] * (MAX_TOKENS - len(row))] for row in rows], dtype=torch.float64)


def rollout_probabilities(problem: Problem) -> Tensor:
    """Probability of each response under the rollout policy."""
    return torch.tensor([math.prod(response.q) for response in problem.responses], dtype=torch.float64)


# ---- methods: the configuration, and by hand what it means
# -------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A rollout correction with the coefficients of ``A_t d log p_t`` that follow from its definition."""

    name: str
    config: Mapping[str, object]
    by_definition: Callable[[Response], list[float]]
    clip: bool = False
    """PPO clip of current over rollout: whether a token counts depends on the advantage's sign."""
    needs_negative: bool = False
    """Tokens with a positive advantage count in any case."""

    def coefficients(self, response: Response, advantages: Sequence[float]) -> list[float]:
        """For each token."""
        coefficients = self.by_definition(response)
        if self.needs_negative:
            return [c if a < 0 else 1.0 for c, a in zip(coefficients, advantages, strict=True)]
        if self.clip:
            return [
                c * (c <= 1.2 if a > 0 else 0.8 <= c <= 3.0)
                for c, a in zip(coefficients, advantages, strict=True)
            ]
        return coefficients


def band(value: float, lower: float, upper: float) -> float:
    """1 inside, 0 outside."""
    return float(lower <= value <= upper)


def k2(ratio: float) -> float:
    """Half the squared log-ratio."""
    return math.log(ratio) ** 2 / 2


def k3(ratio: float) -> float:
    """rho - 1 - log rho."""
    return ratio - 1 - math.log(ratio)


def binary_kl(first: float, second: float) -> float:
    """KL divergence of two Bernoulli distributions."""
    return first * math.log(first / second) + (1 - first) * math.log((1 - first) / (1 - second))


def prefixes(response: Response) -> list[float]:
    """Product of the ratios up to each token."""
    return [math.prod(response.ratios[: t + 1]) for t in range(len(response.tokens))]


def _weights(level: str, threshold: object = UNCAPPED) -> dict[str, object]:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def _rejects(rule: str, threshold: object) -> dict[str, object]:
    return {"rollout_rs": rule, "rollout_rs_threshold": threshold}


_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

METHODS = (
    Method("no correction", {}, lambda s: s.all(1.0)),
    Method("token weights", _weights("token"), lambda s: s.ratios),
    Method("token weights, at most 2", _weights("token", 2.0), lambda s: [min(r, 2.0) for r in s.ratios]),
    Method(
        "token weights, band 0.5 to 1.5",
        _weights("token", "0.5_1.5"),
        lambda s: [r * band(r, 0.5, 1.5) for r in s.ratios],
    ),
    Method("prefix weights", _weights("prefix"), prefixes),
    Method(
        "prefix weights, at most 2", _weights("prefix", 2.0), lambda s: [min(w, 2.0) for w in prefixes(s)]
    ),
    Method("sequence weights", _weights("sequence"), lambda s: s.all(s.ratio)),
    Method(
        "sequence weights, bypass reinforce", {**_weights("sequence"), **_REINFORCE}, lambda s: s.all(s.ratio)
    ),
    Method("sequence weights, at most 2", _weights("sequence", 2.0), lambda s: s.all(min(s.ratio, 2.0))),
    Method(
        "sequence weights, band 0.5 to 1.5",
        _weights("sequence", "0.5_1.5"),
        lambda s: s.all(s.ratio * band(s.ratio, 0.5, 1.5)),
    ),
    Method("geometric weights", _weights("geometric"), lambda s: s.all(s.mean_ratio)),
    Method(
        "geometric weights, at most 1.2", _weights("geometric", 1.2), lambda s: s.all(min(s.mean_ratio, 1.2))
    ),
    Method(
        "token_k1 0.5 to 1.5",
        _rejects("token_k1", "0.5_1.5"),
        lambda s: [band(r, 0.5, 1.5) for r in s.ratios],
    ),
    Method(
        "token_k2 up to 0.1", _rejects("token_k2", 0.1), lambda s: [float(k2(r) <= 0.1) for r in s.ratios]
    ),
    Method(
        "token_k3 up to 0.1", _rejects("token_k3", 0.1), lambda s: [float(k3(r) <= 0.1) for r in s.ratios]
    ),
    Method(
        "token_tv up to 0.1",
        _rejects("token_tv", 0.1),
        lambda s: [float(abs(p - q) <= 0.1) for p, q in zip(s.p, s.q, strict=True)],
    ),
    Method(
        "token_bkl up to 0.03",
        _rejects("token_bkl", 0.03),
        lambda s: [float(binary_kl(q, p) <= 0.03) for p, q in zip(s.p, s.q, strict=True)],
    ),
    Method(
        "seq_sum_k1 0.5 to 1.5", _rejects("seq_sum_k1", "0.5_1.5"), lambda s: s.all(band(s.ratio, 0.5, 1.5))
    ),
    Method(
        "seq_mean_k1 0.7 to 1.2",
        _rejects("seq_mean_k1", "0.7_1.2"),
        lambda s: s.all(band(s.mean_ratio, 0.7, 1.2)),
    ),
    Method(
        "seq_mean_k2 up to 0.1",
        _rejects("seq_mean_k2", 0.1),
        lambda s: s.all(float(sum(map(k2, s.ratios)) / len(s.tokens) <= 0.1)),
    ),
    Method(
        "seq_mean_k3 up to 0.1",
        _rejects("seq_mean_k3", 0.1),
        lambda s: s.all(float(sum(map(k3, s.ratios)) / len(s.tokens) <= 0.1)),
    ),
    Method(
        "seq_sum_k3 up to 0.2",
        _rejects("seq_sum_k3", 0.2),
        lambda s: s.all(float(sum(map(k3, s.ratios)) <= 0.2)),
    ),
    Method(
        "seq_max_k2 up to 0.2",
        _rejects("seq_max_k2", 0.2),
        lambda s: s.all(float(max(map(k2, s.ratios)) <= 0.2)),
    ),
    Method(
        "veto below 0.6", {"rollout_token_veto_threshold": 0.6}, lambda s: s.all(float(min(s.ratios) >= 0.6))
    ),
    Method(
        "off-policy sequence masking above 0.1",
        {"rollout_opsm_threshold": 0.1},
        lambda s: s.all(float(-math.log(s.mean_ratio) <= 0.1)),
        needs_negative=True,
    ),
    Method(
        "seq_mean_k1 0.7 to 1.2, token weights at most 2",
        {**_weights("token", 2.0), **_rejects("seq_mean_k1", "0.7_1.2")},
        lambda s: [min(r, 2.0) * band(s.mean_ratio, 0.7, 1.2) for r in s.ratios],
    ),
    Method(
        "token weights at most 2, bypass reinforce",
        {**_weights("token", 2.0), **_REINFORCE},
        lambda s: [min(r, 2.0) for r in s.ratios],
    ),
    Method("bypass ppo_clip", {"bypass_mode": True}, lambda s: s.ratios, clip=True),
)


# ---- the table
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One method's estimate of the gradient from a single response. Norms are Euclidean, relative to the true
    gradient's."""

    bias: float
    variance: float
    """Trace of the covariance, over the squared norm of the true gradient."""
    used: float
    """Share of the rollout's tokens with a coefficient other than 0."""
    disagreement: float
    """Largest component of (expected - true) - enumerated bias."""

    @property
    def balance(self) -> float:
        """Responses in a batch from which on the bias is the larger part of the squared error."""
        return self.variance / self.bias**2 if self.bias > EXACT else math.inf


def examine(
    problem: Problem,
    method: Method,
    advantages: Sequence[Sequence[float]],
    correct: Correct = compute_rollout_correction,
) -> Finding:
    """Compares the project's expected gradient with the true one, and the difference with the enumerated
    bias."""
    probabilities = rollout_probabilities(problem)
    gradients = gradients_of_responses(problem, method, advantages, correct)
    expected = probabilities @ gradients
    true = torch.tensor(true_gradient(problem, advantages), dtype=torch.float64)
    by_hand = torch.tensor(enumerated_bias(problem, method, advantages), dtype=torch.float64)
    variance = probabilities @ gradients.square().sum(dim=-1) - expected.square().sum()
    weights = probabilities.tolist()
    rows = zip(problem.responses, advantages, weights, strict=True)
    share = math.fsum(weight * sum(c != 0 for c in method.coefficients(r, row)) for r, row, weight in rows)
    tokens = math.fsum(weight * len(r.tokens) for r, weight in zip(problem.responses, weights, strict=True))
    return Finding(
        bias=float((expected - true).norm() / true.norm()),
        variance=float(variance / true.square().sum()),
        used=share / tokens,
        disagreement=float((expected - true - by_hand).abs().max()),
    )


def correction_table(problems: Sequence[Problem]) -> str:
    """All methods, as Markdown: medians over the problems. Raises ``ArithmeticError`` where a bias is not the
    enumerated one."""
    lines = [
        "| method | bias | variance | bias dominates from | tokens used | bias with a perfect critic |",
        "|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        outcome = [examine(problem, method, outcome_advantages(problem)) for problem in problems]
        critic = [examine(problem, method, critic_advantages(problem)) for problem in problems]
        worst = max(finding.disagreement for finding in (*outcome, *critic))
        if worst > TOLERANCE:
            raise ArithmeticError(f"{method.name}: bias differs from the enumerated one by {worst:.1e}")
        bias, bias_with_critic = (statistics.median(f.bias for f in results) for results in (outcome, critic))
        balance = statistics.median(f.balance for f in outcome)
        cells = [
            method.name,
            _rounded(bias),
            f"{statistics.median(f.variance for f in outcome):.1f}",
            "never" if math.isinf(balance) else f"{balance:.0f}",
            f"{statistics.median(f.used for f in outcome):.2f}",
            _rounded(bias_with_critic),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rounded(bias: float) -> str:
    return f"{bias:.3f}" if bias > EXACT else "0"


# ---- estimators of KL
# --------------------------------------------------------------------------------------------------------

KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+")
KL_LOGITS = [1.0, 0.5, 0.0, -0.5, -1.0]
KL_REFERENCE_LOGITS = [-0.6, 0.7, 0.4, 0.1, -0.2]


def kl_by_hand() -> tuple[float, Gradient, Gradient]:
    """KL(p || q) of the two softmaxes, its gradient in p's logits, and that of the opposite KL(q || p)."""
    p, q = softmax(KL_LOGITS), softmax(KL_REFERENCE_LOGITS)
    value = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    gradient = [a * (math.log(a / b) - value) for a, b in zip(p, q, strict=True)]
    return value, gradient, [a - b for a, b in zip(p, q, strict=True)]


def kl_by_estimator(kind: str) -> tuple[float, Tensor]:
    """Expected value of an estimator on tokens sampled from p, and the expected gradient when it is used as a
    loss."""
    logits = torch.tensor(KL_LOGITS, dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(dim=-1)
    log_q = torch.tensor(KL_REFERENCE_LOGITS, dtype=torch.float64).log_softmax(dim=-1)
    expected = (log_p.detach().exp() * kl_penalty(log_p, log_q, kind)).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    return float(expected.detach()), gradient


def kl_table() -> str:
    """All estimators, as Markdown."""
    value, *gradients = kl_by_hand()
    true, opposite = (torch.tensor(gradient, dtype=torch.float64) for gradient in gradients)
    lines = [
        f"KL(p \\|\\| q) = {value:.4f} nats, norm of its gradient {float(true.norm()):.4f}",
        "",
        "| estimator | expected value | relative error of its gradient | cosine | relative distance from the "
        "opposite's |",
        "|---|---|---|---|---|",
    ]
    for kind in KL_KINDS:
        estimate, gradient = kl_by_estimator(kind)
        norm = float(gradient.norm())
        cosine = f"{float(gradient @ true / true.norm()) / norm:.3f}" if norm > EXACT else ""
        errors = [_rounded(float((gradient - target).norm() / target.norm())) for target in (true, opposite)]
        lines.append(f"| `{kind}` | {estimate:.4f} | {errors[0]} | {cosine} | {errors[1]} |")
    return "\n".join(lines)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--gap", type=float, default=0.3, help="standard deviation of the logits' differences, nats"
    )
    parser.add_argument("--problems", type=int, default=21, help="random problems to take medians over")
    options = parser.parse_args()
    print(correction_table([make_problem(seed, options.gap) for seed in range(options.problems)]), end="\n\n")
    print(kl_table())


if __name__ == "__main__":
    main()
