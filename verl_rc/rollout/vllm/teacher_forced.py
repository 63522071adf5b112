"""An engine that computes the log-probs of given responses, by prefill or by decoding, with one or more
versions of the weights."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from verl_rc.rollout.vllm.llm import build_llm
from verl_rc.rollout.vllm.options import VllmOptions

_FORCED = "forced_tokens"
"""Name of a request's response ids among its further arguments."""


class ForcedTokens(AdapterLogitsProcessor):
    """Leaves each request its next token alone; vLLM takes raw log-probs before this processor."""

    def is_argmax_invariant(self) -> bool:
        """No: greedy sampling must take the forced token, too."""
        return False

    def new_req_logits_processor(
        self, params: SamplingParams
    ) -> Callable[[list[int], Tensor], Tensor] | None:
        """The processor of a request's logits. None means none."""
        forced = (params.extra_args or {}).get(_FORCED)
        if forced is None:
            return None

        def force(output_ids: list[int], logits: Tensor) -> Tensor:
            only = torch.full_like(logits, -torch.inf)
            only[forced[min(len(output_ids), len(forced) - 1)]] = 0.0
            return only

        return force


class TeacherForcedEngine:
    """Lives alone in its process: vLLM owns the process's threads."""

    def __init__(self, options: VllmOptions) -> None:
        """Build the engine with the weights of ``options.model_path``."""
        self._loaded = options.model_path
        self._llm = build_llm(
            options,
            logits_processors=[f"{ForcedTokens.__module__}:{ForcedTokens.__name__}"],
            async_scheduling=False,  # a token must be known before the next one is forced
        )

    def prefilled(
        self, model_path: str, rows: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[list[float]]:
        """Log-probs of each row's response, nats, at temperature 1; a row is a prompt and its response.

        vLLM does not read the prefix cache when it returns log-probs of prompts.
        """
        self._load(model_path)
        parameters = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
        prompts = [tokens_input([*prompt, *response]) for prompt, response in rows]
        log_probs = []
        for (prompt, response), output in zip(
            rows, self._llm.generate(prompts, parameters, use_tqdm=False), strict=True
        ):
            entries = output.prompt_logprobs
            assert entries is not None, "prompt log-probs were asked for"
            scored = zip(response, entries[len(prompt) :], strict=True)
            log_probs.append([entry[token].logprob for token, entry in scored if entry is not None])
        return log_probs

    def decoded(
        self,
        model_path: str,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        cached_by: str | None = None,
    ) -> tuple[list[list[float]], int]:
        """Log-probs as ``prefilled``, by decoding the responses behind prompts in the prefix cache, and the
        number of prompt tokens from the cache.

        The cache is empty at first; ``cached_by``: a model folder whose weights fill it with the prompts.
        """
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the engine's prefix cache must be empty, but vLLM refused to reset it.")
        prompts = [tokens_input(list(prompt)) for prompt, _ in rows]
        if cached_by is not None:
            self._load(cached_by)
            self._llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        self._load(model_path)
        parameters = [
            SamplingParams(
                max_tokens=len(response),
                temperature=0.0,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                extra_args={_FORCED: list(response)},
            )
            for _, response in rows
        ]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        log_probs = []
        for (_, response), output in zip(rows, outputs, strict=True):
            entries = output.outputs[0].logprobs
            assert entries is not None, "log-probs were asked for"
            log_probs.append([entry[token].logprob for token, entry in zip(response, entries, strict=True)])
        return log_probs, sum(output.num_cached_tokens or 0 for output in outputs)

    def _load(self, model_path: str) -> None:
        if model_path != self._loaded:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": model_path})
            self._loaded = model_path
