"""An engine that captures the output of every operation of its model, token by token."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.inputs import tokens_input

from verl_rc.runtime.exact.capture import (
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
from verl_rc.runtime.rollout.vllm.llm import build_llm
from verl_rc.runtime.rollout.vllm.options import VllmOptions

_SEED = 1000


_Token = tuple[str, int, bool]
"""Request, position, and whether it is decoded (else prefilled)."""


class CapturingEngine:
    """Lives alone in its process: vLLM owns the process's threads."""

    def __init__(self, options: VllmOptions) -> None:
        """Build the engine with the weights of ``options.model_path``."""
        self._llm = build_llm(options, logprobs_mode="processed_logprobs")
        self._runner = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._tokens: list[_Token] = []
        """Token of each row of the current forward pass."""
        self._sampled: list[_Token] = []
        """Token of each row of its logits."""
        self._captured: dict[str, dict[_Token, Tensor]] = {}
        model = self._runner.model
        model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        for name, module in model.named_modules():
            if name.endswith(CAPTURED_MODULES):
                module.register_forward_hook(self._output_hook(name), with_kwargs=True)
            # Some models have one activation module for all layers: the input of the next module is its
            # output.
            if name.endswith(DOWN):
                module.register_forward_pre_hook(self._input_hook(name.removesuffix(DOWN) + ACTIVATION))
            elif name.endswith(FIRST_LAYER):
                module.register_forward_pre_hook(
                    self._input_hook(name.removesuffix(FIRST_LAYER) + EMBEDDING, argument=1)
                )
        compute_logits = model.compute_logits

        def capture_logits(hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
            logits: Tensor = compute_logits(hidden, *arguments, **options)
            self._capture(HEAD, logits, self._sampled)
            return logits

        model.compute_logits = capture_logits

    def sample(self, prompts: Sequence[Sequence[int]], num_tokens: int, file: str) -> int:
        """Sample a response to each prompt and write the captured values to ``file``; returns the number of
        prompt tokens from the prefix cache, which outlives a call."""
        self._captured = {}
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
        # In vLLM's worker the name of a request has a suffix.
        rows = {output.request_id.partition("-")[0]: row for row, output in enumerate(outputs)}
        captured = {
            name: {
                (rows[request.partition("-")[0]], position, decodes): values
                for (request, position, decodes), values in values_by_token.items()
            }
            for name, values_by_token in self._captured.items()
        }
        torch.save(
            {
                "responses": [list(output.outputs[0].token_ids) for output in outputs],
                "log_probs": [list(output.outputs[0].logprobs.logprobs) for output in outputs],
                "results": {
                    name: (list(values_by_token), torch.stack(list(values_by_token.values())))
                    for name, values_by_token in captured.items()
                },
            },
            file,
        )
        return sum(output.num_cached_tokens or 0 for output in outputs)

    def _begin_pass(self, model: nn.Module, _: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        batch, positions = self._runner.input_batch, inputs["positions"].tolist()
        starts = self._runner.query_start_loc.cpu[: batch.num_reqs + 1].tolist()
        self._tokens, self._sampled = [], []
        for request, first, end in zip(batch.req_ids, starts[:-1], starts[1:], strict=False):
            self._tokens += [(request, positions[row], end - first == 1) for row in range(first, end)]
            self._sampled.append(self._tokens[-1])

    def _input_hook(self, name: str, argument: int = 0) -> Any:
        return lambda module, inputs: self._capture(name, inputs[argument], self._tokens)

    def _output_hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], _: dict[str, Any], output: Any) -> None:
            if name.endswith(ATTENTION):
                rotated = torch.cat([part.flatten(1) for part in inputs[:2]], -1)
                self._capture(name.removesuffix(ATTENTION) + ROTARY, rotated, self._tokens)
            elif isinstance(output, tuple) and isinstance(output[1], Tensor):
                self._capture(name + RESIDUAL, output[1], self._tokens)
            values = output[0] if isinstance(output, tuple) else output
            self._capture(name, values, self._tokens)

        return hook

    def _capture(self, name: str, values: Tensor, tokens: Sequence[_Token]) -> None:
        rows = values[: len(tokens)].reshape(len(tokens), -1).clone()
        self._captured.setdefault(name, {}).update(zip(tokens, rows, strict=True))
