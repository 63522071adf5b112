"""The trainer's side of a replay: recorded rows scored by clean code with the weights of a version."""

from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.config.run import RunConfig
from verl_rc.records.batches import TokenBatch
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import Products, load_causal_lm, torch_dtype

_ROWS_AT_ONCE = 16


class TrainerReplay:
    """A model of one version of the weights, without shards and processes."""

    def __init__(self, config: RunConfig, model_folder: str) -> None:
        """Load the model of a run in the trainer's precision of computing."""
        policy = config.actor_rollout_ref
        dtype = torch_dtype(policy.actor.fsdp_config.dtype)
        self._model: nn.Module = load_causal_lm(
            model_folder,
            dtype,
            trust_remote_code=policy.model.trust_remote_code,
            products=Products(policy.model.head_dtype, dtype if policy.exact else None),
        )
        self._model.eval()
        self._options = ForwardOptions(policy.rollout.temperature, policy.model.use_remove_padding)

    def score(self, tokens: TokenBatch) -> Tensor:
        """Log-probs float32 ``[B, R]``, nats."""
        scored = torch.zeros(tokens.responses.shape)
        with torch.no_grad():
            for part, scores in zip(tokens.split(_ROWS_AT_ONCE), scored.split(_ROWS_AT_ONCE), strict=True):
                cut: Any = part.clone()
                cut.responses = part.responses[:, : max(1, int(part.response_lengths.max()))]
                log_probs = score_tokens(self._model, cut, self._options, with_entropy=False).log_probs
                scores[:, : log_probs.shape[1]] = log_probs.float()
        return scored

    def score_as_trained(self, tokens: TokenBatch) -> Tensor:
        """``score`` with the dropout of the model's configuration."""
        self._model.train()
        try:
            return self.score(tokens)
        finally:
            self._model.eval()
