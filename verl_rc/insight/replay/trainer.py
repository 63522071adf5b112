"""The trainer's side of a replay: recorded rows scored by clean code with the weights of a version."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.config.run import RunConfig
from verl_rc.data.batches import TokenBatch
from verl_rc.workers.forward import ForwardOptions, score_tokens
from verl_rc.workers.language_model import load_causal_lm, torch_dtype
from verl_rc.workers.operations import operations

_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Scoring:
    """How a run's trainer scores, and in what its engine computes."""

    dtype: str
    """Of the trainer."""
    engine_dtype: str
    temperature: float = 1.0
    packs: bool = False
    """Rows are scored side by side in one sequence, without padding."""
    trust_remote_code: bool = False
    head_dtype: str | None = None
    exact: bool = False
    """Both compute with the operations of exact mode."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "Scoring":
        """That of a run of verl_rc."""
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        return cls(
            config.actor_rollout_ref.actor.fsdp_config.dtype,
            rollout.dtype,
            rollout.temperature,
            model.use_remove_padding,
            model.trust_remote_code,
            model.head_dtype,
            config.actor_rollout_ref.exact,
        )


class TrainerReplay:
    """A model of one version of the weights, without shards and processes."""

    def __init__(self, scoring: Scoring, model_folder: str, dtype: torch.dtype | None = None) -> None:
        """Load the model in the trainer's precision of computing, or in ``dtype``."""
        dtype = dtype or torch_dtype(scoring.dtype)
        self._model: nn.Module = load_causal_lm(
            model_folder,
            dtype,
            trust_remote_code=scoring.trust_remote_code,
            head_dtype=scoring.head_dtype,
            operations=operations(scoring.exact, dtype),
        )
        self._model.eval()
        self._temperature, self._packs = scoring.temperature, scoring.packs

    def score(self, tokens: TokenBatch, alone: bool = False) -> Tensor:
        """Log-probs float32 ``[B, R]``, nats; ``alone``: each row by itself, neither packed nor padded."""
        parts = []
        with torch.no_grad():
            for part in tokens.split(1 if alone else _ROWS_AT_ONCE):
                scored = torch.zeros(part.responses.shape)
                log_probs = self._log_probs(part, self._packs and not alone)
                scored[:, : log_probs.shape[1]] = log_probs
                parts.append(scored)
        return torch.cat(parts)

    def gradient(self, tokens: TokenBatch, pulls: Tensor) -> dict[str, Tensor]:
        """By name of the parameter, the gradient of the sum of ``pulls`` ``[B, T]`` times the tokens'
        log-probs."""
        self._model.zero_grad()
        for part, part_pulls in zip(tokens.split(_ROWS_AT_ONCE), pulls.split(_ROWS_AT_ONCE), strict=True):
            log_probs = self._log_probs(part, self._packs)
            (log_probs * part_pulls[:, : log_probs.shape[1]]).sum().backward()
        return {
            name: parameter.grad
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }

    def _log_probs(self, tokens: TokenBatch, packs: bool) -> Tensor:
        """float32 ``[B, longest]``, nats."""
        cut: Any = tokens.clone()
        cut.responses = tokens.responses[:, : max(1, int(tokens.response_lengths.max()))]
        options = ForwardOptions(self._temperature, packs)
        return score_tokens(self._model, cut, options, with_entropy=False).log_probs.float()

    def score_as_trained(self, tokens: TokenBatch) -> Tensor:
        """As ``score``, with dropout as the model's configuration has it."""
        self._model.train()
        try:
            return self.score(tokens)
        finally:
            self._model.eval()
