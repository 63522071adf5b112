"""Tabular policies whose every response is listed, so that what a batch does on average is a sum."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

END = 0
"""The token that ends a response."""


@dataclass(frozen=True)
class Responses:
    """Every response of a vocabulary: up to ``T`` tokens, none after ``END``; ``B`` rows."""

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

    @property
    def num_states(self) -> int:
        """Prefixes that a token can follow."""
        return int(self.states.max()) + 1

    def take(self, rows: Tensor) -> "Responses":
        """These rows."""
        return Responses(self.states[rows], self.tokens[rows], self.mask[rows])

    def log_probs(self, logits: Tensor) -> Tensor:
        """``[B, T]``, nats, under the policy with these ``logits`` ``[states, tokens]``; 0 on padding."""
        return logits.log_softmax(dim=-1)[self.states, self.tokens].where(self.mask, 0.0)

    def probabilities(self, logits: Tensor) -> Tensor:
        """``[B]``: of whole responses."""
        return self.log_probs(logits).sum(dim=-1).exp()

    def add_up(self, coefficients: Tensor, logits: Tensor) -> Tensor:
        """``[states, tokens]``: the sum of ``coefficients`` ``[B, T]`` times the log-probs' gradients."""
        places = self.states * logits.shape[1] + self.tokens
        sums = torch.zeros(logits.numel(), dtype=coefficients.dtype)
        sums = sums.index_add_(0, places.flatten(), coefficients.where(self.mask, 0.0).flatten())
        sums = sums.view(logits.shape)
        # The gradient of log p(y) for the logits of its state is onehot(y) - p.
        return sums - sums.sum(dim=-1, keepdim=True) * logits.softmax(dim=-1)

    def gradient_squares(self, logits: Tensor) -> Tensor:
        """``[B, T]``: squared norms of the gradients of the log-probs; those of one row are orthogonal."""
        probabilities = logits.softmax(dim=-1)
        sampled, squares = probabilities[self.states, self.tokens], probabilities.square().sum(dim=-1)
        return (1 - 2 * sampled + squares[self.states]).where(self.mask, 0.0)


@dataclass(frozen=True)
class Problem:
    """A prompt with its responses, which of them are right, and a policy that learns to say those."""

    responses: Responses
    scores: Tensor
    """float64 ``[B]``: 1 for right responses, 0 for others."""
    policies: tuple[Tensor, ...]
    """Logits ``[states, tokens]`` of successive versions; the last one is the policy that is updated."""

    @property
    def logits(self) -> Tensor:
        """Of the policy that is updated."""
        return self.policies[-1]

    def expected_score(self, logits: Tensor) -> float:
        """The policy's mean score."""
        return float(self.responses.probabilities(logits) @ self.scores)

    def true_gradient(self, logits: Tensor) -> Tensor:
        """``[states, tokens]``: of the policy's mean score."""
        weighted = self.responses.probabilities(logits) * self.scores
        return self.responses.add_up(weighted[:, None].expand(self.responses.mask.shape), logits)


VOCABULARY, MOST_TOKENS = 3, 6
VERSIONS = 9
"""Of the policy in a problem: the one that is updated, and those up to eight steps before."""
STEP, DRIFT = 0.1, 0.14
"""What a step adds to the logits: a part of this length along the true gradient, and, as other prompts teach,
one of this standard deviation that is the same in all steps. Gaps are then as in docs/evidence.md, k1 to k8.
"""
_RIGHT, _SHORTEST_RIGHT, _END_LOGIT = 0.4, 4, -1.0


def make_problem(seed: int) -> Problem:
    """A random policy over responses of up to ``MOST_TOKENS`` tokens, and the versions before it."""
    responses = Responses.list_all(VOCABULARY, MOST_TOKENS)
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(responses.num_states, VOCABULARY, generator=generator, dtype=torch.float64)

    logits, drift = normal(), DRIFT * normal()
    logits[:, END] += _END_LOGIT
    drawn = torch.rand(len(responses.mask), generator=generator, dtype=torch.float64) < _RIGHT
    # Short responses are wrong: otherwise a policy soon says nothing but one token.
    scores = (drawn & (responses.mask.sum(dim=-1) >= _SHORTEST_RIGHT)).double()
    problem = Problem(responses, scores, (logits,))
    for _ in range(VERSIONS - 1):
        gradient = problem.true_gradient(problem.policies[0])
        older = problem.policies[0] - STEP * gradient / gradient.norm() - drift
        problem = Problem(responses, scores, (older, *problem.policies))
    return problem
