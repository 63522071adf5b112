"""The batch records that stages pass to each other, with shape and unit of every field.

Symbols: ``B`` sequences (prompts x samples per prompt), ``P`` padded prompt width (padding left), ``R``
padded response width (padding right), ``W`` numbers and ``C`` candidates beside each token; of the lists
beside a row's tokens, padded on the right, ``K`` token ids that a filter left, ``E`` experts and ``H``
numbers of heads. Log-probs are in nats; the log-prob at response position t is that *of* response token t.

The configuration decides whether an optional field is there, and the docstring of the field says by which
options. Records are tensordict tensorclasses: they index by rows, concatenate, and
cross Ray as plain tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from tensordict import TensorClass
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

T = TypeVar("T")
S = TypeVar("S")


FIELDS: dict[str, tuple[torch.dtype, str]] = {
    "prompts": (torch.int64, "BP"),
    "prompt_lengths": (torch.int64, "B"),
    "responses": (torch.int64, "BR"),
    "response_lengths": (torch.int64, "B"),
    "restarts": (torch.bool, "BR"),
    "pictures": (torch.int64, "B"),
    "support_counts": (torch.int64, "BR"),
    "support_ids": (torch.int32, "BK"),
    "experts_counts": (torch.int64, "BR"),
    "experts_ids": (torch.uint8, "BE"),
    "head_counts": (torch.int64, "BR"),
    "head_ids": (torch.int32, "BH"),
    "response_mask": (torch.bool, "BR"),
    "loss_mask": (torch.bool, "BR"),
    "rollout_log_probs": (torch.float32, "BR"),
    "proximal_log_probs": (torch.float32, "BR"),
    "old_log_probs": (torch.float32, "BR"),
    "reference_log_probs": (torch.float32, "BR"),
    "teacher_log_probs": (torch.float32, "BR"),
    "teacher_top_ids": (torch.int32, "BRW"),
    "teacher_top_log_probs": (torch.float32, "BRW"),
    "log_probs": (torch.float32, "BR"),
    "entropies": (torch.float32, "BR"),
    "sum_pi_squared": (torch.float32, "BR"),
    "varentropies": (torch.float32, "BR"),
    "candidate_log_probs": (torch.float32, "BRC"),
    "top_ids": (torch.int64, "BRW"),
    "top_log_probs": (torch.float32, "BRW"),
    "flipped_experts": (torch.float32, "BR"),
    "critic_values": (torch.float32, "BR"),
    "advantages": (torch.float32, "BR"),
    "returns": (torch.float32, "BR"),
    "rollout_is_weights": (torch.float32, "BR"),
    "policy_versions": (torch.int64, "BR"),
    "group_ids": (torch.int64, "B"),
    "finished": (torch.bool, "B"),
    "fingerprints": (torch.int64, "B"),
    "num_turns": (torch.int64, "B"),
    "tool_calls": (torch.int64, "B"),
    "turn_rewards": (torch.float32, "BR"),
    "engines": (torch.int64, "B"),
    "scores": (torch.float32, "B"),
}
"""Dtype and shape of every field; a field has the same dtype and shape in all records."""
COLUMNS = {"support": "BK", "experts": "BE", "head": "BH"}
"""Lists beside the response tokens: the field ``<name>_counts`` holds their lengths; ``<name>_ids``, of the
shape given here, holds the integers of all lists of a row, concatenated."""


def _check(record: Any) -> None:
    """Raise ``ValueError`` naming the first field whose dtype or shape differs from ``FIELDS``; None is
    skipped.

    The sizes B and R are those of the record's ``tokens`` if it has any; all other sizes are those of the
    first field with that dimension.
    """
    tokens = getattr(record, "tokens", None)
    sizes = {} if tokens is None else dict(zip("BR", tokens.responses.shape, strict=True))
    for name in (field.name for field in fields(record) if field.name in FIELDS):
        value: Tensor | None = getattr(record, name)
        if value is None:
            continue
        dtype, symbols = FIELDS[name]
        if value.ndim == len(symbols):
            sizes = {**dict(zip(symbols, value.shape, strict=True)), **sizes}
        shape = [sizes.get(symbol, symbol) for symbol in symbols]
        if list(value.shape) != shape or value.dtype != dtype:
            raise ValueError(
                f"{type(record).__name__}.{name} must be {dtype} of shape {shape}, got {value.dtype} of "
                f"shape {list(value.shape)}."
            )


class TokenBatch(TensorClass):
    """Prompts and responses: the input for scoring responses with a model."""

    prompts: Tensor
    """int64 ``[B, P]``, padding on the left."""
    prompt_lengths: Tensor
    """int64 ``[B]``, real prompt tokens, at least 1."""
    responses: Tensor
    """int64 ``[B, R]``, padding on the right."""
    response_lengths: Tensor
    """int64 ``[B]``, real response tokens (policy and tool tokens), 0 to R."""
    restarts: Tensor | None = None
    """bool ``[B, R]``: response tokens that begin another conversation, whose tokens see none of those
    before. None: no row of the batch has one."""
    pictures: Tensor | None = None
    """int64 ``[B]``: numbers of the pictures of each prompt, see ``verl_rc.records.pictures``; 0 for none.
    None: no row of the batch has one."""
    support_counts: Tensor | None = None
    """int64 ``[B, R]``: size of the support, the tokens that the engine's filter left, at each token that
    the policy produced; 0 where it is not recorded, and for all other tokens. There with
    ``RolloutConfig.has_filter`` (top_p, top_k, min_p)."""
    support_ids: Tensor | None = None
    """int32 ``[B, K]``, padding on the right: token ids of the supports. There with ``support_counts``."""
    experts_counts: Tensor | None = None
    """int64 ``[B, R]``: number of ``experts_ids`` of each token that the policy produced; 0 where they are
    not recorded, and for all other tokens. There with ``rollout.enable_rollout_routing_replay``, for the
    actor alone: see ``Ragged.without``."""
    experts_ids: Tensor | None = None
    """uint8 ``[B, E]``, padding on the right: the experts of all layers at each position of the row that the
    engine computed. The first token has those of the prompt, each other one those of the tokens since the
    one sampled before it. There with ``experts_counts``."""
    head_counts: Tensor | None = None
    """int64 ``[B, R]``: how many of ``head_ids`` belong to each token that the policy produced, two for each
    token of its head; 0 where none is recorded, and for all other tokens. There with
    ``RolloutCorrectionConfig.score_centering``, for the actor's update alone: see ``Ragged.without``."""
    head_ids: Tensor | None = None
    """int32 ``[B, H]``, padding on the right: for each token the ids of the sampler's most likely tokens in
    its place, then the bits of their log-probs; read by ``verl_rc.records.heads``. There with
    ``head_counts``."""

    def __post_init__(self) -> None:
        """Check dtypes and shapes."""
        _check(self)

    @property
    def sequence_lengths(self) -> Tensor:
        """int64 ``[B]``: prompt plus response tokens."""
        return self.prompt_lengths + self.response_lengths


class RolloutBatch(TensorClass):
    """All samples of one step. Rows of one prompt are adjacent."""

    tokens: TokenBatch
    """Prompts and responses."""
    response_mask: Tensor
    """bool ``[B, R]``: tokens the policy produced. Never overwritten."""
    rollout_log_probs: Tensor
    """float32 ``[B, R]``: log-prob under the rollout policy, 0 where ``response_mask`` is False."""
    policy_versions: Tensor
    """int64 ``[B, R]``: version of the weights that sampled each token, -1 where ``response_mask`` is False.
    """
    group_ids: Tensor
    """int64 ``[B]``: index of the row's prompt in the step."""
    finished: Tensor
    """bool ``[B]``: ended by a stop token."""
    fingerprints: Tensor | None = None
    """int64 ``[B]``: fingerprint of each row's tokens as returned by the engine, in every sampled batch; see
    ``verl_rc.records.fingerprints``."""
    num_turns: Tensor | None = None
    """int64 ``[B]``: messages of the conversation: the prompt, the policy's turns, the tools' answers. There
    with ``RolloutConfig.converses``."""
    tool_calls: Tensor | None = None
    """int64 ``[B]``: calls that tools answered. There with ``num_turns``."""
    turn_rewards: Tensor | None = None
    """float32 ``[B, R]``: reward of each of the policy's turns at its last token, 0 elsewhere. There where
    rewards of turns are trained on."""
    engines: Tensor | None = None
    """int64 ``[B]``: number of the engine that sampled a row. There in synchronous runs with several
    engines."""

    def __post_init__(self) -> None:
        """Check dtypes and shapes."""
        _check(self)


class PolicyEvaluations(TensorClass):
    """Outputs of the trainer's models on the sampled tokens before the update."""

    proximal_log_probs: Tensor | None = None
    """float32 ``[B, R]``: log-prob under the proximal policy (the trainer before its first update of the
    step). There where the corrector evaluates it: ``verl_rc.algorithm.ppo.corrector``."""
    entropies: Tensor | None = None
    """float32 ``[B, R]``: entropy of the proximal policy's distribution at each token, nats. There with
    ``proximal_log_probs``."""
    sum_pi_squared: Tensor | None = None
    """float32 ``[B, R]``: sum of the proximal policy's squared probabilities at each token. There with
    ``proximal_log_probs``, where the estimator reads it or ``diagnostics=full``."""
    varentropies: Tensor | None = None
    """float32 ``[B, R]``: variance of the log-prob of a token drawn from that distribution, nats^2. There
    with ``sum_pi_squared``."""
    reference_log_probs: Tensor | None = None
    """float32 ``[B, R]``: log-prob under the reference policy. There with ``RunConfig.needs_reference``."""
    teacher_log_probs: Tensor | None = None
    """float32 ``[B, R]``: log-prob under the teacher. There with ``distillation``."""
    teacher_top_ids: Tensor | None = None
    """int32 ``[B, R, W]``: the W most likely tokens under the teacher in each token's place. There where the
    loss reads them: ``distillation.top_tokens`` is W > 0."""
    teacher_top_log_probs: Tensor | None = None
    """float32 ``[B, R, W]``: log-probs of these tokens under the teacher. There with ``teacher_top_ids``."""
    critic_values: Tensor | None = None
    """float32 ``[B, R]``: the critic's value before each token. There where the run trains a critic."""

    def __post_init__(self) -> None:
        """Check dtypes and shapes."""
        _check(self)


class TrainBatch(TensorClass):
    """The training batch of the actor."""

    tokens: TokenBatch
    """Prompts and responses."""
    response_mask: Tensor
    """bool ``[B, R]``: tokens the policy produced."""
    loss_mask: Tensor
    """bool ``[B, R]``: tokens of ``response_mask`` that rollout correction keeps, that are not too old, whose
    support is recorded where the engine filters, and whose response may enter the loss."""
    advantages: Tensor
    """float32 ``[B, R]``, 0 where ``response_mask`` is False."""
    old_log_probs: Tensor
    """float32 ``[B, R]``: log-prob under the policy in the denominator of the loss's ratio: the proximal
    policy, in bypass mode the rollout policy. Where the proximal policy is interpolated, the actor puts the
    interpolated log-probs here."""
    rollout_log_probs: Tensor
    """See ``RolloutBatch``."""
    policy_versions: Tensor
    """See ``RolloutBatch``."""
    scores: Tensor
    """float32 ``[B]``: outcome scores."""
    rollout_is_weights: Tensor | None = None
    """float32 ``[B, R]``: importance weights of rollout correction, constants. There with ``rollout_is``, in
    the losses that weights apply to, once the correction is made."""
    reference_log_probs: Tensor | None = None
    """See ``PolicyEvaluations``."""
    teacher_log_probs: Tensor | None = None
    """See ``PolicyEvaluations``."""
    teacher_top_ids: Tensor | None = None
    """See ``PolicyEvaluations``."""
    teacher_top_log_probs: Tensor | None = None
    """See ``PolicyEvaluations``."""
    engines: Tensor | None = None
    """See ``RolloutBatch``."""
    finished: Tensor | None = None
    """See ``RolloutBatch``. There with ``algorithm.mask_truncated_responses``."""

    def __post_init__(self) -> None:
        """Check dtypes and shapes."""
        _check(self)

    @property
    def comparable_mask(self) -> Tensor:
        """bool ``[B, R]``: the tokens of ``response_mask`` whose log-probs of engine and trainer are of one
        distribution: not those that were drawn from a set that is not recorded."""
        counts = self.tokens.support_counts
        return self.response_mask if counts is None else self.response_mask & (counts > 0)

    @property
    def untruncated_mask(self) -> Tensor:
        """bool ``[B, R]``: tokens of ``response_mask`` whose response may enter the loss, rejected or not."""
        return self.response_mask if self.finished is None else self.response_mask & self.finished[:, None]


class CriticBatch(TensorClass):
    """The training batch of the critic."""

    tokens: TokenBatch
    """Prompts and responses."""
    response_mask: Tensor
    """bool ``[B, R]``: tokens the policy produced."""
    critic_values: Tensor
    """float32 ``[B, R]``: the critic's value before each token, before the update; in units of reward."""
    returns: Tensor
    """float32 ``[B, R]``: regression targets of the values; in units of reward."""

    def __post_init__(self) -> None:
        """Check dtypes and shapes."""
        _check(self)


@dataclass(frozen=True)
class TokenScores:
    """Outputs of one model on response tokens, 0 on padding; optional ones are there where the forward pass
    was asked for them."""

    log_probs: Tensor
    """float32 ``[B, R]``, nats."""
    entropies: Tensor | None
    """float32 ``[B, R]``, nats; with the argument ``with_entropy`` of ``score_tokens``."""
    sum_pi_squared: Tensor | None = None
    """float32 ``[B, R]``: sum over the vocabulary of squared probabilities; with ``with_sum_pi_squared``."""
    varentropies: Tensor | None = None
    """float32 ``[B, R]``, nats^2: variance of the log-prob of a token drawn from the distribution; with both
    arguments."""
    candidate_log_probs: Tensor | None = None
    """float32 ``[B, R, C]``, nats: log-probs of ``candidate_ids`` in each token's place; -inf for ids that
    the vocabulary lacks."""
    top_ids: Tensor | None = None
    """int64 ``[B, R, W]``: the ``top_tokens`` most likely tokens in each token's place."""
    top_log_probs: Tensor | None = None
    """float32 ``[B, R, W]``, nats: log-probs of ``top_ids``."""
    flipped_experts: Tensor | None = None
    """float32 ``[B, R]``: 1 where the model would have chosen other experts, in some layer, at the position
    that predicts the token, than those replayed, else 0; with ``ForwardOptions.replay`` and
    ``TokenBatch.experts_counts``."""

    def __post_init__(self) -> None:
        """Check dtypes and shapes."""
        _check(self)


@dataclass(frozen=True)
class Timed(Generic[T]):
    """The result of a call to other processes, and the seconds they computed."""

    result: T
    busy_seconds: float
    """Seconds that the slowest process computed; the rest of the wait was transport."""

    def map(self, function: Callable[[T], S]) -> "Timed[S]":
        """The same seconds with ``function`` of the result."""
        return Timed(function(self.result), self.busy_seconds)


def positions_mask(lengths: Tensor, width: int) -> Tensor:
    """bool ``[B, width]``: True at the first ``lengths[i]`` positions of row i."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def real_rows(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """The first ``lengths[i]`` of row i of ``values`` (``[B, W]``), without copies."""
    return [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]


def left_padded(rows: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token id lists as int64 ``[B, P]`` padded on the left, and their lengths int64 ``[B]``."""
    lengths = torch.tensor([len(row) for row in rows])
    token_ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad_sequence(token_ids, True, pad_token_id, padding_side="left"), lengths
