"""Router replay (R3, arXiv:2510.11370): in a model with experts, each token takes the experts that it took in
the engine. The probabilities of these experts, and their gradients, are the model's own."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl_rc.records.batches import TokenBatch, real_rows
from verl_rc.runtime.workers.experts import ROUTERS


@dataclass(frozen=True)
class Routes:
    """The experts of the N tokens of a forward pass."""

    expert_ids: Tensor
    """uint8 ``[N, layers, experts of a token]``."""
    is_known: Tensor
    """bool ``[N]``: tokens with recorded experts; the others take those that the model chooses."""


class RouterReplay:
    """Hooks on the routers of a model."""

    def __init__(self, model: Any) -> None:
        """Raises ``ValueError`` when the model has no router, or one of a class not in ``ROUTERS``."""
        routers = {
            name: module for name, module in model.named_modules() if type(module).__name__.endswith("Router")
        }
        names = sorted({type(router).__name__ for router in routers.values()})
        if not names or set(names) - set(ROUTERS.values()):
            raise ValueError(
                f"experts can be replayed with routers of the classes {', '.join(ROUTERS.values())}, the "
                f"model has {', '.join(names) or 'none'}: drop "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay."
            )
        for name, router in routers.items():
            layer = re.search(r"\blayers\.(\d+)\.", name)
            assert layer is not None, name
            router.register_forward_hook(partial(self._replayed_output, int(layer[1])))
        text = model.config.get_text_config()
        self._shape = text.num_hidden_layers, text.num_experts_per_tok
        self._routes: Routes | None = None
        self._is_flipped: Tensor | None = None

    def packed_routes(
        self, tokens: TokenBatch, predictors: Tensor, is_response: Tensor, num_tokens: int
    ) -> Routes:
        """The recorded experts of packed rows.

        Args:
            tokens: With ``experts_counts``.
            predictors: int64 ``[K]``: packed positions that predict the K response tokens.
            is_response: bool ``[B, R]``: where these lie.
            num_tokens: N, of all rows.

        Raises ``ValueError`` when the engine's model has other layers or another number of experts a token.
        """
        assert tokens.experts_counts is not None
        assert tokens.experts_ids is not None
        layers, top_k = self._shape
        counts = tokens.experts_counts[is_response]
        bad_counts = counts[counts % (layers * top_k) != 0].tolist()
        if bad_counts:
            raise ValueError(
                f"a token must have the {top_k} experts of all {layers} layers for each of its positions, "
                f"got {bad_counts[0]} numbers: engine and actor have different models. Load the actor's "
                "model into the engines."
            )
        num_positions = counts // (layers * top_k)
        # The last of a token's positions predicts it; the others lie before that.
        ends = num_positions.cumsum(0)
        offsets = torch.arange(int(num_positions.sum()), device=ends.device) - ends.repeat_interleave(
            num_positions
        )
        positions = predictors.repeat_interleave(num_positions) + 1 + offsets
        expert_ids = torch.zeros(num_tokens, layers, top_k, dtype=torch.uint8, device=positions.device)
        recorded = torch.cat(real_rows(tokens.experts_ids, tokens.experts_counts.sum(-1)))
        expert_ids[positions] = recorded.view(-1, layers, top_k)
        is_known = torch.zeros(num_tokens, dtype=torch.bool, device=positions.device)
        is_known[positions] = True
        return Routes(expert_ids, is_known)

    def use(self, routes: Routes | None) -> None:
        """Replay ``routes`` in the forward passes that follow, and when activations are recomputed in the
        backward pass. None if the model chooses experts."""
        self._routes = routes
        self._is_flipped = None if routes is None else torch.zeros_like(routes.is_known)

    @property
    def is_flipped(self) -> Tensor:
        """bool ``[N]``: tokens for which the model would have chosen other experts in some layer."""
        assert self._is_flipped is not None
        return self._is_flipped

    def _replayed_output(self, layer: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._routes is None or self._is_flipped is None:
            return output
        logits, weights, expert_ids = output
        is_known = self._routes.is_known[:, None]
        replayed = torch.where(is_known, self._routes.expert_ids[:, layer].to(expert_ids.dtype), expert_ids)
        self._is_flipped |= (expert_ids.sort(-1).values != replayed.sort(-1).values).any(-1)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, replayed)
        if router.norm_topk_prob:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return logits, probabilities.to(weights.dtype), replayed
