"""Router replay (R3, arXiv:2510.11370): in a model with experts, each token takes the experts that the engine
took for it. The router's probabilities of them, and their gradients, stay those of the model."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl_rc.data.batches import TokenBatch, real_rows
from verl_rc.workers.experts import ROUTERS


@dataclass(frozen=True)
class Routes:
    """The experts of the N tokens of a forward pass."""

    expert_ids: Tensor
    """uint8 ``[N, layers, experts of a token]``."""
    is_known: Tensor
    """bool ``[N]``; the other tokens take the model's own."""


class RouterReplay:
    """Hooks on the routers of a model."""

    def __init__(self, model: Any) -> None:
        """Raises ``ValueError`` when the model has no router, or one of a class that is not known."""
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
            router.register_forward_hook(partial(self._replace, int(layer[1])))
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
        wrong = counts[counts % (layers * top_k) != 0].tolist()
        if wrong:
            raise ValueError(
                f"beside a token there must be the {top_k} experts of all {layers} layers for each of its "
                f"places, got {wrong[0]} numbers: engine and actor have other models."
            )
        places = counts // (layers * top_k)
        # A token's last place is the position that predicts it, the others are those before.
        ends = places.cumsum(0)
        behind = torch.arange(int(places.sum()), device=places.device) - ends.repeat_interleave(places)
        positions = predictors.repeat_interleave(places) + 1 + behind
        expert_ids = torch.zeros(num_tokens, layers, top_k, dtype=torch.uint8, device=positions.device)
        recorded = torch.cat(real_rows(tokens.experts_ids, tokens.experts_counts.sum(-1)))
        expert_ids[positions] = recorded.view(-1, layers, top_k)
        is_known = torch.zeros(num_tokens, dtype=torch.bool, device=positions.device)
        is_known[positions] = True
        return Routes(expert_ids, is_known)

    def use(self, routes: Routes | None) -> None:
        """Replay ``routes`` in the forward passes that follow, and where activations are computed again for
        their gradients; None: the model's own."""
        self._routes = routes
        self._is_flipped = None if routes is None else torch.zeros_like(routes.is_known)

    @property
    def is_flipped(self) -> Tensor:
        """bool ``[N]``: tokens that would take another set of experts, in a layer, than those replayed."""
        assert self._is_flipped is not None
        return self._is_flipped

    def _replace(self, layer: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if self._routes is None or self._is_flipped is None:
            return output
        logits, weights, own = output
        is_known = self._routes.is_known[:, None]
        taken = torch.where(is_known, self._routes.expert_ids[:, layer].to(own.dtype), own)
        self._is_flipped |= (own.sort(-1).values != taken.sort(-1).values).any(-1)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, taken)
        if router.norm_topk_prob:
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        return logits, probabilities.to(weights.dtype), taken
