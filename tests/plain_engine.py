"""A vLLM engine that knows nothing of this project, for tests of what others load and what went wrong in
other engines."""

from collections.abc import Sequence

from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest


class PlainEngine:
    """Serves a Hugging Face folder, with a PEFT adapter if one is given."""

    def __init__(self, model: str, adapter: str | None) -> None:
        self._adapter = LoRARequest("adapter", 1, adapter) if adapter else None
        lora = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
        self._llm = LLM(
            model,
            dtype="float32",
            max_model_len=96,
            enforce_eager=True,
            kv_cache_memory_bytes=32 << 20,
            block_size=32,
            **lora,
        )

    def continue_greedily(self, prompt: str, num_tokens: int) -> tuple[list[int], list[int]]:
        """Token ids of ``prompt`` and of its continuation."""
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        (request,) = self._llm.generate(prompt, sampling, lora_request=self._adapter, use_tqdm=False)
        return list(request.prompt_token_ids), list(request.outputs[0].token_ids)

    def sample(
        self, prompts: Sequence[list[int]], num_tokens: int, weights: str, filled_by: str
    ) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probs of a response to each prompt; the prefix cache keeps what ``filled_by``
        computed of them."""
        assert self._llm.reset_prefix_cache()
        given = [tokens_input(prompt) for prompt in prompts]
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": filled_by})
        self._llm.generate(given, SamplingParams(max_tokens=1), use_tqdm=False)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=0, seed=3)
        found = []
        for output in self._llm.generate(given, sampling, use_tqdm=False):
            (response,) = output.outputs
            ids = list(response.token_ids)
            found.append(
                (ids, [entry[token].logprob for token, entry in zip(ids, response.logprobs, strict=True)])
            )
        return found
