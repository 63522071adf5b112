"""A response while it grows, the proof of which weights sampled each of its tokens, and batches of
responses."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from verl_rc.data.batches import (
    Completions,
    RolloutBatch,
    TokenBatch,
    fingerprints,
    left_padded,
    positions_mask,
)
from verl_rc.data.parts import Part
from verl_rc.rollout.sampling import GenerationRequest, part_seed, turn_seed

UNKNOWN = -1
"""The version of weights that no update brought. vLLM calls it "default"."""


class Output(Protocol):
    """What vLLM says of a request that has ended or was cut (``CompletionOutput``)."""

    token_ids: Sequence[int]
    logprobs: Any
    """``FlatLogprobs``, or None."""
    weight_versions: Any
    """Spans of tokens, each with the label of the weights that sampled it; or None."""
    finish_reason: str | None


@dataclass
class Response:
    """A response while it grows; a new vLLM request continues it after every cut."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-prob of each token under the distribution it was sampled from, nats."""
    versions: list[int] = field(default_factory=list)
    """Version of the weights that sampled each token; ``UNKNOWN`` for tokens of tool answers."""
    sampled: list[bool] = field(default_factory=list)
    """Whether the policy sampled the token; False: a tool answered it."""
    stopped: bool = False
    """A stop token ended it."""
    tool_turns: int = 0
    """Answers of tools: one for all calls of a turn."""
    tool_calls: int = 0
    """Calls that tools answered."""

    @classmethod
    def from_parts(cls, request: GenerationRequest) -> "Response":
        """What there is of the response when it is requested."""
        response = cls(tool_calls=request.tool_calls)
        for part in request.parts:
            token_ids = part.token_ids.tolist()
            if isinstance(part, Part):
                response = response._followed_by(
                    token_ids, part.log_probs.tolist(), [part.version] * len(token_ids)
                )
            else:
                response = response.with_answer(token_ids)
        return response

    @property
    def turn_start(self) -> int:
        """Index of the first token behind the last answer of a tool."""
        return len(self.sampled) - self.sampled[::-1].index(False) if self.tool_turns else 0

    def ends_with(self, stop_token_ids: Sequence[int]) -> bool:
        """Whether the policy's last token is one of these."""
        return bool(self.sampled and self.sampled[-1] and self.token_ids[-1] in stop_token_ids)

    def seed(self, first: int) -> int:
        """The seed of the next token's request; ``first`` is that of the response's first one.

        So a part is the same on every engine, and two parts of a response share no random numbers.
        """
        return part_seed(turn_seed(first, self.tool_turns), len(self.token_ids) - self.turn_start)

    def with_answer(self, token_ids: Sequence[int]) -> "Response":
        """Followed by what tools answered. The policy did not sample it, so it has neither log-prob nor
        version."""
        count = len(token_ids)
        return replace(
            self,
            token_ids=[*self.token_ids, *token_ids],
            # Any finite number would do: response_mask leaves these positions out of every sum.
            log_probs=[*self.log_probs, *[0.0] * count],
            versions=[*self.versions, *[UNKNOWN] * count],
            sampled=[*self.sampled, *[False] * count],
            stopped=False,
            tool_turns=self.tool_turns + 1,
        )

    def _followed_by(
        self, token_ids: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]
    ) -> "Response":
        return replace(
            self,
            token_ids=[*self.token_ids, *token_ids],
            log_probs=[*self.log_probs, *log_probs],
            versions=[*self.versions, *versions],
            sampled=[*self.sampled, *[True] * len(token_ids)],
        )

    def with_output(self, output: Output, held: tuple[int, int], row: int) -> "Response":
        """Followed by what one vLLM request sampled.

        ``held``: versions of the weights that the engine held when the request began and at its end. Raises
        ``ValueError`` naming ``row`` when a token has no log-prob, and ``RuntimeError`` when vLLM says that
        other weights sampled it.
        """
        spans = output.weight_versions or ()
        # Before the first update vLLM's version is the word "default".
        versions = [int(span.version) if span.version.isdigit() else UNKNOWN for span in spans]
        first, last = held
        known = versions == sorted(set(versions)) and versions[:1] >= [first] and versions[-1:] == [last]
        if output.token_ids and not known:
            raise RuntimeError(
                f"the tokens of request {row} must come from versions {first} to {last} of the weights, "
                f"which the engine held, the last from {last}, but vLLM says that they come from {versions}: "
                "an update or its version went astray."
            )
        labels = [
            label for label, span in zip(versions, spans, strict=True) for _ in range(span.start, span.end)
        ]
        response = self._followed_by(output.token_ids, sampled_log_probs(output, row), labels)
        return replace(
            response, stopped=output.finish_reason == "stop"
        )  # "length" is the other reason: it is cut off

    def whole(self, row: int) -> "Response":
        """Itself: nothing is left to be added, as is to an ``Ended`` one."""
        return self


@dataclass
class Ended:
    """A response and the last vLLM request that continued it."""

    response: Response
    """All but the tokens of ``output``."""
    output: Output
    held: tuple[int, int]
    """Versions of the weights when that request began and at its end."""

    def whole(self, row: int) -> Response:
        """The response with the tokens of its last request. Raises like ``Response.with_output``."""
        return self.response.with_output(self.output, self.held, row)


def sampled_log_probs(output: Output, row: int) -> list[float]:
    """The log-prob of every sampled token, in nats; ``ValueError`` when one is missing or belongs to another
    token."""
    flat = output.logprobs
    count = len(output.token_ids)
    if flat is None or len(flat) != count:
        found = "none" if flat is None else str(len(flat))
        raise ValueError(
            f"every one of the {count} tokens of request {row} needs a log-prob, the engine returned {found}."
        )
    first = flat.start_indices
    if [flat.token_ids[start] for start in first] != list(output.token_ids):
        raise ValueError(
            f"the log-probs of request {row} must belong to its sampled tokens, the engine returned others."
        )
    return [flat.logprobs[start] for start in first]


class Collected(NamedTuple):
    """Samples of one engine that have ended; every one is collected once."""

    numbers: list[int]
    """Numbers of the samples that have a response, ascending."""
    completions: Completions
    """A row for each."""
    failures: dict[int, str]
    """Why the others have none, by number: a tool failed."""


@dataclass(frozen=True)
class Interrupted:
    """What a weight update interrupted, of one engine."""

    numbers: list[int]
    """Numbers of the samples that had begun and not ended, ascending."""
    completions: Completions
    """A row for each: its tokens before the update."""
    pause_seconds: float = 0.0
    """Seconds from the last step before the update until steps could be made again."""
    recomputed_tokens: int = 0
    """Tokens of prompts and responses that the engine has to compute again."""


def build_rollout_batch(
    prompts: Sequence[list[int]], group_ids: Sequence[int], completions: Completions, pad_token_id: int
) -> RolloutBatch:
    """Join ``B`` prompts (token ids) with their completions, in the same order.

    ``response_mask`` leaves out the tokens of tool answers. Raises ``ValueError`` when counts differ, a
    response is empty, or a log-prob of a sampled token is positive or NaN.
    """
    rows, width = completions.responses.shape
    if len(prompts) != rows or len(group_ids) != rows:
        raise ValueError(
            f"every request needs exactly one completion: {len(prompts)} requests, {rows} completions."
        )
    written, response_mask = positions_mask(completions.response_lengths, width), sampled_mask(completions)
    _refuse_bad_rows("a response needs at least one token", completions.response_lengths < 1)
    # A log-softmax in float32 can end slightly above 0. Negated, so that NaN, which compares False, is bad.
    bad = response_mask & ~(completions.rollout_log_probs <= 1e-5)
    _refuse_bad_rows("the log-prob of a sampled token must be a number <= 0", bad.any(dim=-1))
    prompt_ids, prompt_lengths = left_padded(list(prompts), pad_token_id)
    # Engines pad with 0, which may be a real token of the vocabulary.
    responses = torch.where(written, completions.responses, pad_token_id)
    tokens = TokenBatch(
        prompts=prompt_ids,
        prompt_lengths=prompt_lengths,
        responses=responses,
        response_lengths=completions.response_lengths,
        batch_size=[rows],
    )
    return RolloutBatch(
        tokens=tokens,
        response_mask=response_mask,
        rollout_log_probs=completions.rollout_log_probs,
        policy_versions=completions.policy_versions,
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        finished=completions.finished,
        fingerprints=fingerprints(tokens, response_mask),
        num_turns=completions.num_turns,
        tool_calls=completions.tool_calls,
        engines=completions.engines,
        batch_size=[rows],
    )


def sampled_mask(completions: Completions) -> torch.Tensor:
    """bool ``[B, R]``: tokens that the policy sampled."""
    if completions.response_mask is not None:
        return completions.response_mask
    return positions_mask(completions.response_lengths, completions.responses.shape[1])


def check_versions(rollouts: RolloutBatch, expected_version: int) -> None:
    """Raise ``RuntimeError`` when a token was sampled with weights of another version than
    ``expected_version``."""
    wrong = rollouts.response_mask & (rollouts.policy_versions != expected_version)
    if bool(wrong.any()):
        row = int(wrong.any(dim=-1).nonzero()[0])
        found = sorted(set(rollouts.policy_versions[wrong].tolist()))
        raise RuntimeError(
            f"every token of this step must come from weight version {expected_version}, but "
            f"{int(wrong.sum())} tokens come from version {found} (first in row {row}): an engine missed a "
            "weight update."
        )


def _refuse_bad_rows(requirement: str, bad: torch.Tensor) -> None:
    if bool(bad.any()):
        raise ValueError(
            f"{requirement}, which does not hold for rows {bad.nonzero()[:5, 0].tolist()} of the rollouts."
        )
