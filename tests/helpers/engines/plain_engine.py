"""A vLLM engine that knows nothing of this project, for tests of what others load."""

from vllm import LLM, SamplingParams
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
