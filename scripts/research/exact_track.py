"""The exact track: bias and error of a method's update against the true policy gradient, summed over every
response of small policies: python -m scripts.research.exact_track [METHOD …] [--output FILE]

A method is a preset of rollout correction, with options of ``score_centering`` behind commas
(``decoupled_seq_is,top_k=1,tail=none``), or ``loss_mode=NAME`` with options of the loss; without any all are
computed, in minutes. Methods run through the functions that train. Responses come in groups of eight with
leave-one-out baselines. What a method knows of the whole mini-batch (a mean weight, kept tokens, tokens that
it selects) it knows of a large one.

bias: distance of the expected update from the true gradient, relative to that gradient. error: mean squared
error of the update of 32 prompts at the best step size; 0 is the true gradient, 1 an update without
information. frozen: the expected score, at most 1, after 100 steps along the expected update when all
responses come from the first policy.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from verl_rc.algorithm.advantage import compute_advantages
from verl_rc.algorithm.losses import (
    Aggregation,
    PolicyLossInputs,
    clean_policy_loss_inputs,
    mini_batch_statistics,
    read_loss_options,
)
from verl_rc.algorithm.losses.centering import SamplerHead, centering_term
from verl_rc.algorithm.losses.inputs import resolve_policy_loss
from verl_rc.algorithm.ppo.choices import needs_statistics_first
from verl_rc.config.algorithms import LOSS_MODES, POLICY_LOSSES
from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig
from verl_rc.correction import (
    CorrectionStatistics,
    LogRatio,
    SequenceContext,
    candidate_weights,
    correct_sequences,
    measure,
)

SEEDS = (0, 1, 2)
"""Seeds of the problems; results are means over them."""
GROUP, PROMPTS, MINI_BATCH_ROWS = 8, 32, 4096
"""Responses to a prompt, prompts of a batch, rows of the large mini-batch."""
VOCABULARY, MOST_TOKENS, END = 3, 6, 0
"""Tokens of a policy, tokens of a response, and the token that ends one."""
VERSIONS, STEP, DRIFT = 9, 0.1, 0.14
"""Versions of a policy, and what a step adds to its logits: a part of length STEP along the true gradient,
and, as other prompts teach, one of standard deviation DRIFT that is the same in all steps."""
NOISE = 0.12
"""Standard deviation of an engine's noise in logits: its gap (k3) is that of fp8 weights and cache."""
FLOW_STEPS, FLOW_RATE, LONGEST = 100, 20.0, 0.5
"""Steps of the flow, step size, and the length at which a step is clipped."""
REQUIRED_OPTIONS = {"dro_beta": 0.1}
"""Options of losses that have no default."""
SMALLEST_CHANCE = 1e-300
_RIGHT, _SHORTEST_RIGHT, _END_LOGIT = 0.4, 4, -1.0


# ---- policies whose responses are all listed


@dataclass(frozen=True)
class Responses:
    """Responses of up to ``T`` tokens, none after ``END``; ``B`` rows."""

    states: Tensor
    """int64 ``[B, T]``: number of the prefix that each token follows; 0 on padding."""
    tokens: Tensor
    """int64 ``[B, T]``; 0 on padding."""
    mask: Tensor
    """bool ``[B, T]``."""

    @classmethod
    def list_all(cls, vocabulary: int, most_tokens: int) -> "Responses":
        """All responses over ``vocabulary`` tokens, ``END`` among them."""
        prefixes = [
            prefix
            for length in range(most_tokens)
            for prefix in itertools.product(range(1, vocabulary), repeat=length)
        ]
        numbers = {prefix: number for number, prefix in enumerate(prefixes)}
        rows = [
            (*prefix, token)
            for prefix in prefixes
            for token in range(vocabulary)
            if token == END or len(prefix) == most_tokens - 1
        ]

        def padded(values: list[list[int]]) -> Tensor:
            return torch.tensor([[*row, *[0] * (most_tokens - len(row))] for row in values])

        return cls(
            padded([[numbers[row[:place]] for place in range(len(row))] for row in rows]),
            padded([list(row) for row in rows]),
            torch.tensor([[place < len(row) for place in range(most_tokens)] for row in rows]),
        )

    def take(self, rows: Tensor) -> "Responses":
        """These rows."""
        return Responses(self.states[rows], self.tokens[rows], self.mask[rows])

    def log_probs(self, logits: Tensor) -> Tensor:
        """``[B, T]`` under the policy with these ``logits`` ``[states, tokens]``; 0 on padding."""
        return logits.log_softmax(dim=-1)[self.states, self.tokens].where(self.mask, 0.0)

    def probabilities(self, logits: Tensor) -> Tensor:
        """``[B]`` of whole responses."""
        return self.log_probs(logits).sum(dim=-1).exp()

    def of_sampled(self, coefficients: Tensor, vocabulary: int) -> Tensor:
        """``[B, T, V]``: ``coefficients`` ``[B, T]`` at the sampled tokens, 0 elsewhere."""
        empty = torch.zeros(*coefficients.shape, vocabulary, dtype=coefficients.dtype)
        return empty.scatter(-1, self.tokens[..., None], coefficients[..., None])

    def add_up(self, coefficients: Tensor, logits: Tensor) -> Tensor:
        """``[states, tokens]``: the sum of ``coefficients`` ``[B, T, V]`` times the gradients of the
        log-probs of all tokens in each token's place."""
        at = coefficients.where(self.mask[..., None], 0.0)
        sums = torch.zeros_like(logits).index_add_(0, self.states.flatten(), at.flatten(0, 1))
        # The gradient of log p(y) for the logits of its state is onehot(y) - p.
        return sums - sums.sum(dim=-1, keepdim=True) * logits.softmax(dim=-1)

    def gradient_squares(self, coefficients: Tensor, logits: Tensor) -> Tensor:
        """``[B, T]``: squared norms of what each place adds to ``add_up``; in a row they are orthogonal."""
        probabilities = logits.softmax(dim=-1)[self.states]
        gradients = coefficients - coefficients.sum(dim=-1, keepdim=True) * probabilities
        return gradients.square().sum(dim=-1).where(self.mask, 0.0)


@dataclass(frozen=True)
class Problem:
    """A prompt with its responses, which of them are right, and a policy that learns to say those."""

    responses: Responses
    scores: Tensor
    """float64 ``[B]``: 1 for right responses, 0 for others."""
    policies: tuple[Tensor, ...]
    """Logits ``[states, tokens]`` of successive versions; the last one is the policy that is updated."""

    def expected_score(self, logits: Tensor) -> float:
        """The mean score of a policy."""
        return float(self.responses.probabilities(logits) @ self.scores)

    def true_gradient(self, logits: Tensor) -> Tensor:
        """``[states, tokens]``: the gradient of the mean score."""
        weighted = self.responses.probabilities(logits) * self.scores
        coefficients = weighted[:, None].expand(self.responses.mask.shape)
        return self.responses.add_up(self.responses.of_sampled(coefficients, logits.shape[1]), logits)


def make_problem(seed: int) -> Problem:
    """A random policy over responses of up to ``MOST_TOKENS`` tokens, and the versions before it."""
    responses = Responses.list_all(VOCABULARY, MOST_TOKENS)
    generator = torch.Generator().manual_seed(seed)
    shape = (int(responses.states.max()) + 1, VOCABULARY)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    drift = DRIFT * torch.randn(shape, generator=generator, dtype=torch.float64)
    logits[:, END] += _END_LOGIT
    drawn = torch.rand(len(responses.mask), generator=generator, dtype=torch.float64) < _RIGHT
    # Short responses are wrong: otherwise a policy soon says nothing but one token.
    scores = (drawn & (responses.mask.sum(dim=-1) >= _SHORTEST_RIGHT)).double()
    problem = Problem(responses, scores, (logits,))
    for _ in range(VERSIONS - 1):
        gradient = problem.true_gradient(problem.policies[0])
        older = problem.policies[0] - STEP * gradient / gradient.norm() - drift
        problem = replace(problem, policies=(older, *problem.policies))
    return problem


# ---- how rollouts come about


def _top_p(logits: Tensor, share: float = 0.9) -> Tensor:
    ordered, places = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    dropped = ordered.cumsum(dim=-1) - ordered >= share
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, places, dropped), -math.inf)


def _noisy(logits: Tensor) -> Tensor:
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0), dtype=logits.dtype)
    return logits + NOISE * noise


CONDITIONS: Mapping[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "fresh": (0, torch.clone),
    "1 step": (1, torch.clone),
    "4 steps": (4, torch.clone),
    "8 steps": (8, torch.clone),
    "T .9": (0, lambda logits: logits / 0.9),
    "top-p .9": (0, _top_p),
    "noise": (0, _noisy),
}
"""Steps between the version that samples and the one that is updated, and the logits that an engine samples
with; it reports the log-probs that it sampled with."""


@dataclass(frozen=True)
class Rows:
    """Every response that can be sampled, with every number of right ones among the ``GROUP - 1`` others of
    its group; ``N`` rows."""

    responses: Responses
    scores: Tensor
    """float64 ``[N]``."""
    right_others: Tensor
    """int64 ``[N]``."""
    weights: Tensor
    """float64 ``[N]``: probabilities; they add up to 1."""
    rollout_log_probs: Tensor
    """``[N, T]``."""
    rollout_tables: Tensor
    """``[N, T, V]``: log-probs of all tokens in each token's place."""
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
        advantages = _advantages()[scores.long(), right_others]
        return cls(
            responses,
            scores,
            right_others,
            probabilities[numbers]
            * _binomial(GROUP - 1, float(probabilities @ problem.scores))[right_others],
            responses.log_probs(rollout),
            rollout.log_softmax(dim=-1)[responses.states],
            advantages[:, None].expand(responses.mask.shape).where(responses.mask, 0.0),
        )

    def mini_batch(self) -> "Rows":
        """``MINI_BATCH_ROWS`` rows, each as often as its probability says."""
        places = (torch.arange(MINI_BATCH_ROWS, dtype=torch.float64) + 0.5) / MINI_BATCH_ROWS
        rows = torch.searchsorted(self.weights.cumsum(dim=0), places).clamp_max(len(self.weights) - 1)
        tensors = {name: getattr(self, name)[rows] for name in vars(self) if name != "responses"}
        return Rows(self.responses.take(rows), **tensors)


def _binomial(count: int, share: float) -> Tensor:
    """Probabilities of 0 to ``count`` right ones."""
    chances = [math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(count + 1)]
    return torch.tensor(chances, dtype=torch.float64)


def _advantages() -> Tensor:
    """``[2, GROUP]`` by the score of a response and the number of right ones among the others."""
    groups = [[score, *([1.0] * k), *([0.0] * (GROUP - 1 - k))] for score in (0.0, 1.0) for k in range(GROUP)]
    scores = torch.tensor(groups, dtype=torch.float64).view(-1, 1)
    group_ids = torch.arange(len(groups)).repeat_interleave(GROUP)
    advantages, _ = compute_advantages("rloo", scores, torch.ones_like(scores), group_ids=group_ids)
    return advantages.view(2, GROUP, GROUP)[:, :, 0]


# ---- methods


@dataclass(frozen=True)
class Method:
    """A correction and the loss that it is used with."""

    name: str
    correction: RolloutCorrectionConfig
    loss: str
    options: Mapping[str, object] = field(default_factory=dict)


def find_method(text: str) -> Method:
    """The method that ``text`` names. Raises ``ValueError`` where there is none."""
    name, *options = text.split(",")
    if name in PRESETS:
        correction = RolloutCorrectionConfig.from_preset(name)
        values = dict(option.split("=") for option in options)
        if values:
            fields = {**correction.model_dump(), "score_centering": {"enabled": True, **values}}
            correction = RolloutCorrectionConfig.model_validate(fields)
        return Method(text, correction, correction.named_loss or "vanilla")
    loss = name.removeprefix("loss_mode=")
    if loss not in LOSS_MODES or not text.startswith("loss_mode="):
        raise ValueError(
            f"a method must be a preset or loss_mode=NAME; got {text!r}. verl-rc presets lists them."
        )
    values = {key: yaml.safe_load(value) for key, _, value in (option.partition("=") for option in options)}
    # A loss divides by the policy that sampled; in decoupled mode its ratio is 1 at the first update.
    return Method(text, RolloutCorrectionConfig.bypass_ppo_clip(), loss, values)


def all_methods() -> Iterator[Method]:
    """Every preset and every loss, without second names of the same."""
    names = list(PRESETS)
    for loss in LOSS_MODES:
        keys = [option.key.rpartition(".")[2] for option in POLICY_LOSSES[loss].options if option.is_required]
        names.append(",".join([f"loss_mode={loss}", *(f"{key}={REQUIRED_OPTIONS[key]}" for key in keys)]))
    pairs = list[tuple[RolloutCorrectionConfig, str]]()
    for method in map(find_method, names):
        pair = method.correction.model_copy(update={"loss_type": "ppo_clip"}), method.loss
        if pair not in pairs:  # a preset may name a loss that is a loss mode, too
            pairs.append(pair)
            yield method


# ---- the update of a method


def coefficients(method: Method, rows: Rows, logits: Tensor) -> Tensor:
    """float64 ``[N, T, V]``: these times the gradients of the log-probs of all tokens in each token's place
    are what a row adds to the ascent direction of a batch."""
    tokens, width = rows.weights @ rows.responses.mask.sum(dim=-1).double(), rows.responses.mask.shape[1]
    # Denominators of one row: losses of rows are averaged.
    aggregation = Aggregation("seq-mean-token-sum", float(tokens), 1.0, float(width))
    sampled, statistics, mini_batch = rows.mini_batch(), None, None
    if needs_statistics_first(method.correction):
        statistics = measure(
            sampled.responses.log_probs(logits),
            sampled.rollout_log_probs,
            sampled.responses.mask,
            method.correction,
            SequenceContext(advantages=sampled.advantages),
        )
        if method.correction.rejection_denominator == "kept":
            kept = statistics.numbers().totals.unreported
            counts = [float(kept[name].total) / MINI_BATCH_ROWS for name in ("kept_tokens", "kept_rows")]
            aggregation = replace(aggregation, num_tokens=counts[0], num_sequences=counts[1])
    if method.loss in POLICY_LOSSES and POLICY_LOSSES[method.loss].reads_mini_batch:
        inputs = _loss_inputs(method, sampled, sampled.responses.log_probs(logits), aggregation, statistics)
        mini_batch = mini_batch_statistics(method.loss, [inputs])
    log_probs = rows.responses.log_probs(logits).requires_grad_()
    inputs = _loss_inputs(method, rows, log_probs, aggregation, statistics)
    policy_loss = resolve_policy_loss(method.loss)
    loss, _ = policy_loss(replace(inputs, mini_batch_statistics=mini_batch))
    zeros = torch.zeros_like(log_probs)
    own = -torch.autograd.grad(loss, log_probs)[0] if loss.requires_grad else zeros
    found = rows.responses.of_sampled(own.double(), logits.shape[1])
    centering = method.correction.score_centering
    if not centering.enabled:
        return found
    ids = rows.rollout_tables.topk(min(centering.top_k, logits.shape[1])).indices
    candidates = logits.log_softmax(dim=-1)[rows.responses.states].gather(-1, ids).requires_grad_()
    head = SamplerHead(rows.rollout_tables.gather(-1, ids), candidates)
    head = head.with_tail() if centering.tail == "proportional" else head
    settings, weights = method.correction.settings().weights, None
    if settings is not None and method.correction.applies_weights:
        ratio = LogRatio.from_log_probs(log_probs.detach(), rows.rollout_log_probs, rows.responses.mask)
        weights = candidate_weights(ratio, settings, head.log_ratios)
    term, _ = centering_term(
        policy_loss,
        inputs,
        head,
        divides_by_rollout=method.correction.mode == "bypass",
        weights=weights,
    )
    return found.scatter_add(-1, ids, -torch.autograd.grad(term, candidates)[0].double())


def _loss_inputs(
    method: Method,
    rows: Rows,
    log_probs: Tensor,
    aggregation: Aggregation,
    statistics: CorrectionStatistics | None,
) -> PolicyLossInputs:
    """The inputs of the loss, as the actor makes them."""
    config, mask = method.correction.model_copy(update={"diagnostics": "core"}), rows.responses.mask
    train, sequences = log_probs.detach(), SequenceContext(advantages=rows.advantages)
    result = correct_sequences(train, rows.rollout_log_probs, mask, config, sequences, statistics)
    kept = mask & result.keep_mask
    return clean_policy_loss_inputs(
        PolicyLossInputs(
            ratio_denominator=rows.rollout_log_probs if config.bypass_mode else train,
            log_probs=log_probs,
            advantages=rows.advantages,
            loss_mask=kept,
            response_mask=mask,
            denominator_mask=kept if config.rejection_denominator == "kept" else mask,
            rollout_is_weights=result.weights if config.applies_weights else None,
            parameters=read_loss_options(method.options),
            aggregation=aggregation,
        )
    )


@dataclass(frozen=True)
class Update:
    """The update of a method, over all batches of one prompt."""

    rows: Rows
    coefficients: Tensor
    """``[N, T, V]``, see ``coefficients``."""
    logits: Tensor
    """The policy that is updated."""
    right: float
    """Probability that a sampled response is right."""

    def add_up(self, chances: Tensor) -> Tensor:
        """``[states, tokens]``: the sum of the rows' updates, each times its chance ``[N]``."""
        return self.rows.responses.add_up(chances[:, None, None] * self.coefficients, self.logits)

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
        squares = rows.responses.gradient_squares(self.coefficients, self.logits).sum(dim=-1)
        second = (float(rows.weights @ squares) + (GROUP - 1) * product) / GROUP
        return second - float(self.mean.square().sum())


def update(method: Method, problem: Problem, rollout: Tensor, logits: Tensor) -> Update:
    """The update of the policy with these ``logits`` by responses of the policy with logits ``rollout``."""
    rows = Rows.sample_all(problem, rollout)
    return Update(rows, coefficients(method, rows, logits), logits, problem.expected_score(rollout))


def examine(method: Method, condition: str, among: Sequence[Problem]) -> dict[str, float]:
    """Bias and error of a method under one condition, means over the problems."""
    age, engine = CONDITIONS[condition]
    biases, errors = [], []
    for problem in among:
        logits = problem.policies[-1]
        found = update(method, problem, engine(problem.policies[-1 - age]), logits)
        true = problem.true_gradient(logits)
        square, product = float(true.square().sum()), float((found.mean * true).sum())
        size = float(found.mean.square().sum()) + found.variance / PROMPTS
        biases.append(float((found.mean - true).norm()) / math.sqrt(square))
        errors.append(1.0 - max(product, 0.0) ** 2 / (square * size) if size else 1.0)
    return {"bias": sum(biases) / len(among), "error": sum(errors) / len(among)}


def frozen_score(method: Method, among: Sequence[Problem], steps: int = FLOW_STEPS) -> float:
    """The expected score behind ``steps`` expected updates by responses of the first policy."""
    ends = []
    for problem in among:
        logits = first = problem.policies[-1]
        for _ in range(steps):
            change = FLOW_RATE * update(method, problem, first, logits).mean
            logits = logits + change * min(1.0, LONGEST / max(float(change.norm()), SMALLEST_CHANCE))
        ends.append(problem.expected_score(logits))
    return sum(ends) / len(ends)


def result_of(method: Method, among: Sequence[Problem]) -> dict[str, Any]:
    """The stored numbers of a method: bias and error by condition, ``frozen``, and passes over the batch
    without gradient that it needs before an update."""
    conditions = {name: examine(method, name, among) for name in CONDITIONS}
    forwards = int(method.correction.mode == "decoupled")
    return {"forwards": forwards, "frozen": frozen_score(method, among), "conditions": conditions}


def line_of(name: str, result: Mapping[str, Any]) -> str:
    """The row of a method, whose error and frozen score are in docs/evidence.md."""
    found = result["conditions"]
    worst = max(found, key=lambda condition: found[condition]["error"])
    error = sum(numbers["error"] for numbers in found.values()) / len(found)
    biases = [f"{numbers['bias']:.3f}" for numbers in found.values()]
    cells = [f"`{name}`", f"{error:.3f}", f"{found[worst]['error']:.3f} ({worst})", *biases]
    cells += [f"{result['frozen']:.2f}", str(result["forwards"])]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print a row for each method, and put the results into a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help="presets, or loss_mode=NAME[,OPTION=VALUE]")
    parser.add_argument("--output", type=Path, help="put results into this JSON file, in place of older ones")
    options = parser.parse_args()
    try:
        methods = [find_method(text) for text in options.methods] or list(all_methods())
    except ValueError as error:
        parser.error(str(error))
    among = [make_problem(seed) for seed in SEEDS]
    head = ["method", "error", "worst", *(f"bias, {name}" for name in CONDITIONS), "frozen", "forwards"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for method in methods:
        result = result_of(method, among)
        print(line_of(method.name, result), flush=True)
        if options.output is not None:
            output = options.output
            stored = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
            stored[method.name] = result
            output.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
