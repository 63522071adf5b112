"""An engine that keeps what every operation of its model computed, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.inputs import tokens_input

from verl_rc.exact.capture import (
    ACTIVATION,
    ATTENTION,
    CAPTURED_MODULES,
    DOWN,
    EMBEDDING,
    FIRST_LAYER,
    HEAD,
    RESIDUAL,
    ROTARY,
)
from verl_rc.rollout.vllm.llm import build_llm
from verl_rc.rollout.vllm.options import VllmOptions

_SEED = 1000


@dataclass
class _Rows:
    """Where the rows of the forward pass that is running belong."""

    places: list[tuple[str, int, bool]] = field(default_factory=list)
    """Request, position, and whether it is decoding, of each row."""
    ends: list[tuple[str, int, bool]] = field(default_factory=list)
    """Those of the rows that are sampled from."""


class CapturingEngine:
    """Lives alone in its process: vLLM owns the process's threads."""

    def __init__(self, options: VllmOptions) -> None:
        """Build the engine with the weights of ``options.model_path``."""
        self._llm = build_llm(options, logprobs_mode="processed_logprobs")
        self._runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._now = _Rows()
        self._kept: dict[str, dict[tuple[str, int, bool], Tensor]] = {}
        model = self._runner.model
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in model.named_modules():
            if name.endswith(CAPTURED_MODULES):
                module.register_forward_hook(self._keeper(name), with_kwargs=True)
            # Activations are one module for all layers of some models: the next one's input says whose.
            if name.endswith(DOWN):
                module.register_forward_pre_hook(self._input_keeper(name.removesuffix(DOWN) + ACTIVATION))
            elif name.endswith(FIRST_LAYER):
                module.register_forward_pre_hook(
                    self._input_keeper(name.removesuffix(FIRST_LAYER) + EMBEDDING, place=1)
                )
        compute_logits = model.compute_logits

        def keep_logits(hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
            logits: Tensor = compute_logits(hidden, *arguments, **options)
            self._keep(HEAD, logits, self._now.ends)
            return logits

        model.compute_logits = keep_logits

    def sample(self, prompts: Sequence[Sequence[int]], num_tokens: int, file: str) -> int:
        """Sample a response to each prompt and write what was computed to ``file``; the cache of prefixes is
        kept from before. Returns how many tokens of prompts came from it."""
        self._kept = {}
        parameters = [
            SamplingParams(
                seed=_SEED + row,
                max_tokens=num_tokens,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for row in range(len(prompts))
        ]
        inputs = [tokens_input(list(prompt)) for prompt in prompts]
        outputs = self._llm.generate(inputs, parameters, use_tqdm=False)
        # vLLM's worker has a request's name with a suffix.
        rows = {output.request_id.partition("-")[0]: row for row, output in enumerate(outputs)}
        kept = {
            name: {
                (rows[request.partition("-")[0]], position, decodes): values
                for (request, position, decodes), values in of_name.items()
            }
            for name, of_name in self._kept.items()
        }
        torch.save(
            {
                "responses": [list(output.outputs[0].token_ids) for output in outputs],
                "log_probs": [list(output.outputs[0].logprobs.logprobs) for output in outputs],
                "kept": {
                    name: (list(of_name), torch.stack(list(of_name.values())))
                    for name, of_name in kept.items()
                },
            },
            file,
        )
        return sum(output.num_cached_tokens or 0 for output in outputs)

    def _begin(self, model: nn.Module, _: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        batch, positions = self._runner.input_batch, inputs["positions"].tolist()
        starts = self._runner.query_start_loc.cpu[: batch.num_reqs + 1].tolist()
        self._now = _Rows()
        for request, first, end in zip(batch.req_ids, starts[:-1], starts[1:], strict=False):
            self._now.places += [(request, positions[row], end - first == 1) for row in range(first, end)]
            self._now.ends.append(self._now.places[-1])

    def _input_keeper(self, name: str, place: int = 0) -> Any:
        return lambda module, inputs: self._keep(name, inputs[place], self._now.places)

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: tuple[Any, ...], _: dict[str, Any], output: Any) -> None:
            if name.endswith(ATTENTION):
                rotated = torch.cat([part.flatten(1) for part in inputs[:2]], -1)
                self._keep(name.removesuffix(ATTENTION) + ROTARY, rotated, self._now.places)
            elif isinstance(output, tuple) and isinstance(output[1], Tensor):
                self._keep(name + RESIDUAL, output[1], self._now.places)
            values = output[0] if isinstance(output, tuple) else output
            self._keep(name, values, self._now.places)

        return keep

    def _keep(self, name: str, values: Tensor, places: Sequence[tuple[str, int, bool]]) -> None:
        rows = values[: len(places)].reshape(len(places), -1).clone()
        self._kept.setdefault(name, {}).update(zip(places, rows, strict=True))
