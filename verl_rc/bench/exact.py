"""The exact track: bias, variance and error of a method's update against the true policy gradient, summed
over every response.

A batch holds prompts with ``GROUP`` responses each, whose advantages leave-one-out baselines decide. What a
method knows of the whole mini-batch (a mean weight, kept tokens, tokens that it selects) it knows of a large
one; then every response is put through the functions that train, with every number of right responses beside
it. The rows are also divided over two ranks, which must change nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from verl_rc.advantage import compute_advantages
from verl_rc.bench.method import Method
from verl_rc.bench.policies import Problem, Responses, make_problem
from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.correction import CorrectionStatistics, SequenceContext, correct_sequences, measure
from verl_rc.losses import (
    Aggregation,
    MiniBatchStatistics,
    PolicyLossInputs,
    clean_policy_loss_inputs,
    compute_policy_loss,
    mini_batch_statistics,
    read_loss_options,
)
from verl_rc.ppo.choices import needs_statistics_first

SEEDS = (0, 1, 2)
"""Of the problems; results are means over them."""
GROUP = 8
"""Responses to a prompt."""
PROMPTS = 32
"""Prompts of the batch whose error is told."""
MINI_BATCH_ROWS = 4096
"""Rows of the large mini-batch that statistics are taken of."""
TOLERANCE = 1e-9
"""Largest difference that the number of ranks may make, relative to the length of an update."""
SMALLEST_CHANCE = 1e-300
NOISE = 0.12
"""Standard deviation of an engine's noise in logits, nats: its gap (k3) is that of fp8 weights and cache."""

Engine = Callable[[Tensor], Tensor]
"""Logits of the trainer to the logits that an engine samples with."""


def _top_p(logits: Tensor, share: float = 0.9) -> Tensor:
    """Only the most likely tokens that have this share together."""
    ordered, places = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    dropped = ordered.cumsum(dim=-1) - ordered >= share
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, places, dropped), -math.inf)


def _noisy(logits: Tensor) -> Tensor:
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    return logits + NOISE * noise


@dataclass(frozen=True)
class Condition:
    """How rollouts come about; the trainer's policy is the same in all conditions."""

    words: str
    age: int = 0
    """Steps between the version that samples and the one that is updated."""
    engine: Engine = torch.clone


CONDITIONS: Mapping[str, Condition] = {
    "fresh": Condition("the policy that is updated samples"),
    "1 step": Condition("responses are one step old", 1),
    "4 steps": Condition("four steps old", 4),
    "8 steps": Condition("eight steps old", 8),
    "T .9": Condition(
        "the engine samples at temperature 0.9, the trainer computes at 1", engine=lambda x: x / 0.9
    ),
    "top-p .9": Condition(
        "the engine samples from the most likely tokens that have 0.9 together", engine=_top_p
    ),
    "noise": Condition("the engine's logits have noise as large as that of fp8", engine=_noisy),
}
"""By name; an engine reports the log-probs that it sampled with."""


@dataclass(frozen=True)
class Rows:
    """Responses beside their groups: every response that can be sampled, with every number of right ones
    among the ``GROUP - 1`` others; ``N`` rows."""

    responses: Responses
    scores: Tensor
    """float64 ``[N]``."""
    right_others: Tensor
    """int64 ``[N]``."""
    weights: Tensor
    """float64 ``[N]``: probabilities; they add up to 1."""
    rollout_log_probs: Tensor
    """``[N, T]``."""
    advantages: Tensor
    """``[N, T]``."""

    @classmethod
    def sample_all(cls, problem: Problem, rollout: Tensor) -> "Rows":
        """The rows that a policy with logits ``rollout`` samples, with their probabilities."""
        probabilities = problem.responses.probabilities(rollout)
        sampled = probabilities.nonzero().flatten()
        numbers = sampled.repeat_interleave(GROUP)
        right_others = torch.arange(GROUP).repeat(len(sampled))
        responses, scores = problem.responses.take(numbers), problem.scores[numbers]
        right = float(probabilities @ problem.scores)
        advantages = _advantages()[scores.long(), right_others]
        return cls(
            responses,
            scores,
            right_others,
            probabilities[numbers] * _binomial(GROUP - 1, right)[right_others],
            responses.log_probs(rollout),
            advantages[:, None].expand(responses.mask.shape).where(responses.mask, 0.0),
        )

    def take(self, rows: Tensor) -> "Rows":
        """These rows, of which some may come several times."""
        tensors = {name: getattr(self, name)[rows] for name in vars(self) if name != "responses"}
        return Rows(self.responses.take(rows), **tensors)

    def mini_batch(self) -> "Rows":
        """``MINI_BATCH_ROWS`` rows, each as often as its probability says."""
        places = (torch.arange(MINI_BATCH_ROWS, dtype=torch.float64) + 0.5) / MINI_BATCH_ROWS
        rows = torch.searchsorted(self.weights.cumsum(dim=0), places)
        return self.take(rows.clamp_max(len(self.weights) - 1))

    def split_over_ranks(self, ranks: int) -> list[Tensor]:
        """Numbers of the rows of each rank: other responses on each, so that their means differ, too."""
        return [*torch.arange(len(self.weights)).chunk(ranks)]


def _binomial(count: int, share: float) -> Tensor:
    """Probabilities of 0 to ``count`` right ones."""
    return torch.tensor(
        [math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)],
        dtype=torch.float64,
    )


def _advantages() -> Tensor:
    """``[2, GROUP]``: by the score of a response and the number of right ones among the others."""
    groups = [
        [score, *([1.0] * right), *([0.0] * (GROUP - 1 - right))]
        for score in (0.0, 1.0)
        for right in range(GROUP)
    ]
    scores = torch.tensor(groups, dtype=torch.float64).view(-1, 1)
    group_ids = torch.arange(len(groups)).repeat_interleave(GROUP)
    advantages, _ = compute_advantages("rloo", scores, torch.ones_like(scores), group_ids=group_ids)
    return advantages.view(2, GROUP, GROUP)[:, :, 0]


@dataclass(frozen=True)
class MiniBatchContext:
    """What a method knows of the whole mini-batch before its first micro-batch."""

    aggregation: Aggregation
    """With denominators of a row: losses of rows are averaged."""
    correction: CorrectionStatistics | None
    mini_batch: MiniBatchStatistics | None


def coefficients(method: Method, rows: Rows, logits: Tensor, ranks: int) -> Tensor:
    """float64 ``[N, T]``: these times the gradients of its log-probs are what a row adds to the ascent
    direction of a batch.

    Raises ``ValueError`` where one is not finite.
    """
    context = _mini_batch_context(method, rows, logits, ranks)
    ascent = torch.empty(rows.advantages.shape, dtype=torch.float64)
    for numbers in rows.split_over_ranks(ranks):
        part = rows.take(numbers)
        ascent[numbers] = _part_coefficients(method, part, part.responses.log_probs(logits), context)
    if not bool(ascent.isfinite().all()):
        tokens = rows.responses.tokens[~ascent.isfinite().all(dim=-1)][0]
        raise ValueError(
            f"{method.name} must weigh every response by finite numbers; it does not for the tokens "
            f"{tokens.tolist()}"
        )
    return ascent


def _mini_batch_context(method: Method, rows: Rows, logits: Tensor, ranks: int) -> MiniBatchContext:
    tokens = float(rows.weights @ rows.responses.mask.sum(dim=-1).double())
    width = float(rows.responses.mask.shape[1])
    context = MiniBatchContext(Aggregation("seq-mean-token-sum", tokens, 1.0, width), None, None)
    reads_mini_batch = method.loss in POLICY_LOSSES and POLICY_LOSSES[method.loss].reads_mini_batch
    if not reads_mini_batch and not needs_statistics_first(method.correction):
        return context
    mini_batch = rows.mini_batch()
    parts = [mini_batch.take(numbers) for numbers in mini_batch.split_over_ranks(ranks)]
    if needs_statistics_first(method.correction):
        statistics = reduce(
            CorrectionStatistics.merge,
            [
                measure(
                    part.responses.log_probs(logits),
                    part.rollout_log_probs,
                    part.responses.mask,
                    method.correction,
                    SequenceContext(advantages=part.advantages),
                )
                for part in parts
            ],
        )
        context = replace(context, correction=statistics)
        if method.correction.rejection_denominator == "kept":
            kept = statistics.numbers().totals.unreported
            tokens, sequences = (
                float(kept[name].total) / MINI_BATCH_ROWS for name in ("kept_tokens", "kept_rows")
            )
            aggregation = replace(context.aggregation, num_tokens=tokens, num_sequences=sequences)
            context = replace(context, aggregation=aggregation)
    if reads_mini_batch:
        inputs = [_loss_inputs(method, part, part.responses.log_probs(logits), context) for part in parts]
        context = replace(context, mini_batch=mini_batch_statistics(method.loss, inputs))
    return context


def _loss_inputs(method: Method, rows: Rows, train: Tensor, context: MiniBatchContext) -> PolicyLossInputs:
    """The inputs of the loss, as the actor makes them."""
    config = method.correction.model_copy(update={"diagnostics": "core"})
    mask = rows.responses.mask
    result = correct_sequences(
        train,
        rows.rollout_log_probs,
        mask,
        config,
        SequenceContext(advantages=rows.advantages),
        context.correction,
    )
    weights, keep = result.weights if config.applies_weights else None, result.keep_mask
    if method.weight is not None:
        weights = method.weight(
            train_log_probs=train,
            rollout_log_probs=rows.rollout_log_probs,
            response_mask=mask,
            advantages=rows.advantages,
        )
        if weights.shape != mask.shape:
            raise ValueError(
                f"the weight {method.name} must return {list(mask.shape)}, got {list(weights.shape)}"
            )
    return clean_policy_loss_inputs(
        PolicyLossInputs(
            ratio_denominator=rows.rollout_log_probs if config.bypass_mode else train,
            log_probs=train,
            advantages=rows.advantages,
            loss_mask=mask & keep,
            response_mask=mask,
            denominator_mask=mask & keep if config.rejection_denominator == "kept" else mask,
            rollout_is_weights=weights,
            parameters=read_loss_options(method.options),
            aggregation=context.aggregation,
        )
    )


def _part_coefficients(method: Method, rows: Rows, train: Tensor, context: MiniBatchContext) -> Tensor:
    inputs = _loss_inputs(method, rows, train, context)
    log_probs = train.clone().requires_grad_()
    loss, _ = compute_policy_loss(
        method.loss,
        old_log_probs=inputs.ratio_denominator,
        log_probs=log_probs,
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        response_mask=inputs.response_mask,
        denominator_mask=inputs.denominator_mask,
        rollout_is_weights=inputs.rollout_is_weights,
        config=inputs.parameters,
        aggregation=context.aggregation,
        mini_batch_statistics=context.mini_batch,
    )
    if not loss.requires_grad:
        return torch.zeros_like(train)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return -gradient.double()


@dataclass(frozen=True)
class Update:
    """The update of a method, over all batches of one prompt."""

    rows: Rows
    coefficients: Tensor
    """``[N, T]``: see ``coefficients``."""
    logits: Tensor
    """Of the policy that is updated."""
    right: float
    """Probability that a sampled response is right."""

    def add_up(self, chances: Tensor) -> Tensor:
        """``[states, tokens]``: the sum of the rows' updates, each times its chance ``[N]``."""
        return self.rows.responses.add_up(chances[:, None] * self.coefficients, self.logits)

    @cached_property
    def mean(self) -> Tensor:
        """``[states, tokens]``."""
        return self.add_up(self.rows.weights)

    @property
    def variance(self) -> float:
        """Trace of the covariance of one prompt's update, the mean over its ``GROUP`` responses."""
        # E|u_i|^2 and E u_i u_j of responses i and j. Given how many of the others are right, i and j are
        # independent but for each other's scores.
        rows, chances = self.rows, _binomial(GROUP - 1, self.right)
        by_group = [
            [
                self.add_up(rows.weights * (rows.scores == score) * (rows.right_others == count))
                / chances[count].clamp_min(SMALLEST_CHANCE)
                for count in range(GROUP)
            ]
            for score in (0.0, 1.0)
        ]
        product = sum(
            float(chance * (by_group[first][count + second] * by_group[second][count + first]).sum())
            for count, chance in enumerate(_binomial(GROUP - 2, self.right))
            for first in (0, 1)
            for second in (0, 1)
        )
        squares = (self.coefficients.square() * rows.responses.gradient_squares(self.logits)).sum(dim=-1)
        second = (float(rows.weights @ squares) + (GROUP - 1) * product) / GROUP
        return second - float(self.mean.square().sum())


def update(method: Method, problem: Problem, rollout: Tensor, logits: Tensor, ranks: int = 1) -> Update:
    """The update of the policy with these ``logits`` by responses of the policy with logits ``rollout``."""
    rows = Rows.sample_all(problem, rollout)
    return Update(rows, coefficients(method, rows, logits, ranks), logits, problem.expected_score(rollout))


@dataclass(frozen=True)
class Finding:
    """A method under one condition: means over the problems, relative to the true gradient's norm."""

    bias: float
    """Distance of the expected update from the true gradient."""
    variance: float
    """Trace of the covariance of one prompt's update."""
    cosine: float
    """Of expected update and true gradient."""
    error: float
    """Mean squared error of the update of ``PROMPTS`` prompts."""
    best_error: float
    """The same at the best step size, which a learning rate can make up for: in [0, 1], 1 for an update that
    says nothing."""


def examine(
    method: Method, condition: Condition, among: Sequence[Problem], with_ranks: bool = True
) -> Finding:
    """The update under one condition.

    Raises ``ValueError`` where it is not finite, or, ``with_ranks``, depends on the number of ranks.
    """
    findings = []
    for problem in among:
        logits = problem.logits
        rollout = condition.engine(problem.policies[-1 - condition.age])
        estimate = update(method, problem, rollout, logits)
        if with_ranks:
            divided = update(method, problem, rollout, logits, ranks=2).coefficients
            difference, length = (divided - estimate.coefficients).norm(), estimate.coefficients.norm()
            if float(difference) > TOLERANCE * float(length):
                raise ValueError(
                    f"the update of {method.name} must not depend on the number of ranks; on two ranks it "
                    f"differs by {float(difference / length):.1%} of its length. Divide sums by "
                    "inputs.aggregation (inputs.reduce does), not by what one micro-batch holds"
                )
        findings.append(_compare(estimate, problem.true_gradient(logits)))
    return Finding(*(sum(values) / len(findings) for values in zip(*findings, strict=True)))


def _compare(estimate: Update, true: Tensor) -> tuple[float, float, float, float, float]:
    square, length = float(true.square().sum()), float(estimate.mean.square().sum())
    bias, variance = float((estimate.mean - true).square().sum()) / square, estimate.variance / square
    product = float((estimate.mean * true).sum())
    size = length + estimate.variance / PROMPTS
    cosine = product / math.sqrt(length * square) if length else 0.0
    best = 1.0 - max(product, 0.0) ** 2 / (square * size) if size else 1.0
    return math.sqrt(bias), variance, cosine, bias + variance / PROMPTS, best


def problems() -> list[Problem]:
    """The problems of the track."""
    return [make_problem(seed) for seed in SEEDS]


def run_exact(method: Method, among: Sequence[Problem], with_ranks: bool = True) -> dict[str, Finding]:
    """A method under every condition; see ``examine``."""
    return {name: examine(method, condition, among, with_ranks) for name, condition in CONDITIONS.items()}
