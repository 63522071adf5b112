"""The trainer's side of a replay: recorded rows scored by clean code with the weights of a version."""

from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.config.run import RunConfig
from verl_rc.data.batches import TokenBatch
from verl_rc.workers.forward import ForwardOptions, score_tokens
from verl_rc.workers.language_model import load_causal_lm, torch_dtype
from verl_rc.workers.operations import operations

_ROWS_AT_ONCE = 16


class TrainerReplay:
    """A model of one version of the weights, without shards and processes."""

    def __init__(self, config: RunConfig, model_folder: str, dtype: torch.dtype | None = None) -> None:
        """Load the model of a run in the trainer's precision of computing, or in ``dtype``."""
        policy = config.actor_rollout_ref
        dtype = dtype or torch_dtype(policy.actor.fsdp_config.dtype)
        self._model: nn.Module = load_causal_lm(
            model_folder,
            dtype,
            trust_remote_code=policy.model.trust_remote_code,
            head_dtype=policy.model.head_dtype,
            operations=operations(policy.exact, dtype),
        )
        self._model.eval()
        self._temperature, self._packs = policy.rollout.temperature, policy.model.use_remove_padding

    def score(self, tokens: TokenBatch, alone: bool = False) -> Tensor:
        """Log-probs float32 ``[B, R]``, nats; ``alone``: each row by itself, neither packed nor padded."""
        scored = torch.zeros(tokens.responses.shape)
        rows_at_once = 1 if alone else _ROWS_AT_ONCE
        with torch.no_grad():
            for part, scores in zip(tokens.split(rows_at_once), scored.split(rows_at_once), strict=True):
                log_probs = self._log_probs(part, self._packs and not alone)
                scores[:, : log_probs.shape[1]] = log_probs
        return scored

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
        """``score`` with the dropout of the model's configuration."""
        self._model.train()
        try:
            return self.score(tokens)
        finally:
            self._model.eval()
