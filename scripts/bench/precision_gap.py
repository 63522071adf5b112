"""The gap between engine and trainer by precision, with the output layer in float32 on neither, one or both
sides: python scripts/bench/precision_gap.py MODEL PROMPTS.parquet [rows] [tokens].

Prints a table in nats; the tokens are those that each engine sampled with these weights.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoTokenizer

from verl_rc.config.load import load_run_config
from verl_rc.data.batches import TokenBatch, left_padded
from verl_rc.data.parts import token_ids
from verl_rc.data.tokenize import encode_prompt
from verl_rc.distributed.child_process import ChildProcess
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.rollout.vllm.options import VllmOptions, engine_options
from verl_rc.workers.environment import engine_environment
from verl_rc.workers.forward import ForwardOptions, score_tokens
from verl_rc.workers.language_model import load_causal_lm, torch_dtype

DTYPES = ("bfloat16", "float16", "float32")
HEADS = (None, "float32")


def run_options(model: str, longest_prompt: int, tokens: int) -> VllmOptions:
    """An engine of a run on a CPU, with the model's weights."""
    config = load_run_config(
        [
            "data.train_files=unused",
            "data.val_files=unused",
            f"data.max_prompt_length={longest_prompt}",
            f"data.max_response_length={tokens}",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.load_format=auto",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
        ]
    )
    return engine_options(config, "cpu")


def sampled(
    options: VllmOptions, prompts: Sequence[list[int]], tokens: int
) -> tuple[TokenBatch, Tensor, float]:
    """What an engine samples, its log-probs ``[B, R]``, and the seconds of the second time."""
    engine = ChildProcess(
        "verl_rc.rollout.vllm.engine:VllmEngine", engine_environment(1, "cpu", one_node=True), options=options
    )
    requests = [GenerationRequest(prompt_token_ids=prompt, seed=row) for row, prompt in enumerate(prompts)]
    sampling = SamplingOptions(
        1.0, top_p=1.0, top_k=-1, max_tokens=tokens, stop_token_ids=(), ignore_eos=True
    )
    try:
        for _ in range(2):  # the first one warms up
            before = time.perf_counter()
            samples = engine.call("generate", requests, sampling)
            seconds = time.perf_counter() - before
    finally:
        engine.end()
    padded, lengths = left_padded(list(prompts), pad_token_id=0)
    batch = TokenBatch(
        prompts=padded,
        prompt_lengths=lengths,
        responses=torch.tensor([token_ids(sample.parts) for sample in samples]),
        response_lengths=torch.full([len(prompts)], tokens),
        batch_size=[len(prompts)],
    )
    return (
        batch,
        torch.stack([torch.cat([part.log_probs for part in sample.parts]) for sample in samples]),
        seconds,
    )


def measured(model: str, prompts: Sequence[list[int]], tokens: int) -> Iterator[tuple[object, ...]]:
    """Engine's and trainer's precision and head, mean |gap|, k3, largest |gap|, seconds of both."""
    options = run_options(model, max(map(len, prompts)), tokens)
    for dtype in DTYPES:
        for engine_head in HEADS if dtype != "float32" else (None,):
            overrides = {"hf_overrides": {"head_dtype": engine_head or "model"}}
            given = replace(options, dtype=dtype, arguments={**options.arguments, **overrides})
            batch, rollout, engine_seconds = sampled(given, prompts, tokens)
            for trainer in dict.fromkeys((dtype, "float32")):
                for head in HEADS if trainer != "float32" else (None,):
                    module = load_causal_lm(model, torch_dtype(trainer), head_dtype=head).eval()
                    before = time.perf_counter()
                    with torch.no_grad():
                        scores = [
                            score_tokens(module, part, ForwardOptions(), False) for part in batch.split(16)
                        ]
                    seconds = time.perf_counter() - before
                    gap = torch.cat([part.log_probs.float() for part in scores]) - rollout
                    k3 = (gap.exp() - 1 - gap).mean()
                    numbers = (float(gap.abs().mean()), float(k3), float(gap.abs().max()))
                    yield dtype, engine_head, trainer, head, *numbers, engine_seconds, seconds


def main(model: str, file: str, rows: int = 64, tokens: int = 64) -> None:
    """Print the table."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    conversations = pq.read_table(file).column("prompt").to_pylist()[:rows]
    prompts = [encode_prompt(tokenizer, conversation) for conversation in conversations]
    sys.stdout.write(
        "engine, its head, trainer, its head, mean |gap|, k3, largest |gap|, engine s, trainer s\n"
    )
    for row in measured(model, prompts, tokens):
        shown = (f"{value:.3g}" if isinstance(value, float) else str(value) for value in row)
        sys.stdout.write("  ".join(shown) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
