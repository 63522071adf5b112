"""What every token weighs, and what is rejected: from log-probs to decisions, chunk by chunk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import CorrectionSettings
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.rejection import Rejection, SequenceEvidence, reject_sequences, reject_tokens
from verl_rc.correction.sequences import LogProbs, SequenceChunk, SequenceContext, sequence_chunks
from verl_rc.correction.totals import join_sequences
from verl_rc.correction.weights import Weights, importance_weights

Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class TokenDecisions:
    """What is decided of the tokens of a chunk."""

    chunk: SequenceChunk
    ratio: LogRatio
    facts: SequenceContext
    weights: Weights | None
    rejection: Rejection
    """Of tokens by themselves. Independent of the weights: what is rejected keeps its own."""


@dataclass(frozen=True)
class SequenceDecisions:
    """What is decided of whole sequences ``[B]``."""

    evidence: SequenceEvidence
    rejection: Rejection
    rows: Tensor
    """int64 ``[B]``: their order in the chunks, one after the other."""

    @property
    def rejected_rows(self) -> Tensor:
        """bool ``[B]``: sequences with response tokens, all of them rejected."""
        kept = self.rejection.kept * self.evidence.kept_tokens
        return (self.evidence.sums.response_tokens > 0) & (kept == 0)


def decide(
    log_probs: LogProbs,
    settings: CorrectionSettings,
    context: SequenceContext,
    use: Callable[[TokenDecisions], Outcome],
) -> tuple[SequenceDecisions, list[Outcome]]:
    """Decide on all tokens, then on the sequences; ``use`` gets every chunk before the next one is taken, and
    what it returns comes back.

    ``ValueError`` when shapes differ or advantages are missing that a rule needs.
    """
    context.check(log_probs.train.shape)

    # A call for each chunk: its temporaries are gone before those of the next one come.
    def decide_chunk(chunk: SequenceChunk) -> tuple[SequenceEvidence, Outcome]:
        ratio, facts = LogRatio.from_log_probs(log_probs.take(chunk)), context.take(chunk)
        weights = importance_weights(ratio, settings)
        rejection = reject_tokens(ratio, settings, facts.advantages)
        outcome = use(TokenDecisions(chunk, ratio, facts, weights, rejection))
        return SequenceEvidence.from_tokens(ratio, rejection, settings), outcome

    chunks = sequence_chunks(log_probs.response_mask)
    evidence, outcomes = zip(*map(decide_chunk, chunks), strict=True)
    # At once: operations on the few sequences of a chunk would take as long as those on its tokens.
    rows = torch.cat([chunk.rows for chunk in chunks])
    whole = join_sequences(evidence, rows)
    return SequenceDecisions(whole, reject_sequences(whole, settings), rows), list(outcomes)
