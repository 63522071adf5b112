"""A small vLLM engine in a process of its own, without Ray."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from small_models import log_probs
from transformers import PreTrainedModel

from verl_rc.records.parts import token_ids
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.weight_sync.proof import LoadReceipt, check_receipts
from verl_rc.runtime.weight_sync.sender import ModelWeights, WeightSender
from verl_rc.runtime.workers.environment import engine_environment

# Room for the query projection but not for key and value with it: vLLM fuses the three into one layer.
BUCKET_BYTES = 20 << 10
ARGUMENTS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "block_size": 32,
    "skip_tokenizer_init": True,
    # As on every CPU, see ``engine_options``: a prompt that is cut in two cannot be sampled from with a seed.
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 4096,
}


def start_small_engine(
    model: Path,
    arguments: dict[str, Any],
    served: str = "observed_engine:ObservedEngine",
    dtype: str = "float32",
    **options: Any,
) -> ChildProcess:
    """An engine of the class ``served``."""
    built = VllmOptions(str(model), dtype, max_model_len=96, arguments={**ARGUMENTS, **arguments}, **options)
    environment = engine_environment(num_threads=1, device="cpu", one_node=True)
    return ChildProcess(served, environment, options=built)


@contextmanager
def engine_of(
    model: PreTrainedModel,
    folder: Path,
    served: str = "loaded_engine:LoadedEngine",
    dtype: str = "float32",
    **arguments: Any,
) -> Iterator[ChildProcess]:
    """An engine of a model, which is written to ``folder``."""
    model.save_pretrained(folder)
    engine = start_small_engine(folder, arguments, served, dtype)
    try:
        yield engine
    finally:
        engine.end()


def largest_gap(engine: ChildProcess, model: PreTrainedModel, prompts: Sequence[list[int]]) -> float:
    """Largest |log-ratio| of tokens that the engine samples, nats."""
    sampled, of_model = sampled_log_probs(engine, [model], prompts)
    return float((sampled - of_model).abs().max())


def sampled_log_probs(
    engine: ChildProcess, models: Sequence[PreTrainedModel], prompts: Sequence[list[int]]
) -> list[torch.Tensor]:
    """Log-probs of tokens that the engine samples: its own, and those of each model."""
    requests = [GenerationRequest(prompt, seed=row) for row, prompt in enumerate(prompts)]
    sampling = SamplingOptions(1.0, 1.0, -1, max_tokens=16, stop_token_ids=(), ignore_eos=True)
    samples = engine.call("generate", requests, sampling)
    of_engine = [part.log_probs for sample in samples for part in sample.parts]
    rows = [(prompt, token_ids(sample.parts)) for prompt, sample in zip(prompts, samples, strict=True)]
    return [torch.cat(of_engine), *(torch.cat([log_probs(model, *row) for row in rows]) for model in models)]


def publish(sender: WeightSender, engine: ChildProcess, version: int, full: bool = True) -> list[LoadReceipt]:
    """One update, in the order in which a driver has to make the calls; returns the engine's receipts."""
    engine.call("begin_update")
    try:
        for index in range(sender.num_buckets(full)):
            engine.call("load_bucket", sender.offer(index, True, full))
    finally:
        sent = sender.release()
    received: list[LoadReceipt] = engine.call("finish_update", version)
    check_receipts(sender.update_manifest(full), sent, [received], version)
    return received


def sender_of(model: Any) -> WeightSender:
    """Of all weights of a model, in float32."""
    return WeightSender(ModelWeights(model), 0, torch.device("cpu"), "float32", BUCKET_BYTES)
