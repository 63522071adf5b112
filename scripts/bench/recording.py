"""What recording costs an engine: generation with and without sets of kept tokens, or experts.

Usage: OMP_NUM_THREADS=1 python scripts/bench/recording.py MODEL [--rounds N] [--responses N]. Processor
seconds of all that is between a request and its sample, for responses of 32 tokens, in turns; the median
ratio of pairs. A model with experts records those; of another one, which samples with top_p=.95 and top_k=20,
the sets are recorded.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from verl_rc.rollout.engine import QueuedSample
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.rollout.vllm.options import VllmOptions
from verl_rc.workers.environment import engine_environment

ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 << 20,
    "enable_chunked_prefill": False,
    "skip_tokenizer_init": True,
    "max_logprobs": 36,
}
PLAIN = SamplingOptions(1.0, 1.0, -1, 32, (), ignore_eos=True)
FILTERED = replace(PLAIN, top_p=0.95, top_k=20)
RECORDED = replace(FILTERED, max_kept_tokens=36)

Engine = tuple[Any, SamplingOptions]
engine: Engine


def start(model: str, arguments: dict[str, Any], options: SamplingOptions) -> None:
    """Build the engine of this process."""
    global engine
    os.environ.update(engine_environment(1, "cpu", one_node=True))
    from verl_rc.rollout.vllm.sampler import VllmSampler

    engine = VllmSampler(VllmOptions(model, "bfloat16", 64, arguments)), options


def seconds(responses: int) -> float:
    """Processor seconds of sampling ``responses`` responses, with nothing in the prefix cache."""
    sampler, options = engine
    sampler.reset_prefix_cache()
    started, ended = time.process_time(), 0
    for key in range(responses):
        request = GenerationRequest([5 + key % 20, *range(5, 12)], key)
        sampler.begin(key, QueuedSample(key, request, options))
    while ended < responses:
        ended += len(sampler.step())
    return time.process_time() - started


def pair_ratio(without: Executor, recording: Executor, responses: int, turn: int) -> float:
    """With over without; the one that begins alternates."""
    order = (without, recording) if turn % 2 else (recording, without)
    taken = {pool: pool.submit(seconds, responses).result() for pool in order}
    print(f"{taken[without]:.3f} s without, {taken[recording]:.3f} with", flush=True)
    return taken[recording] / taken[without]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--responses", type=int, default=256)
    given = parser.parse_args()
    if getattr(AutoConfig.from_pretrained(given.model), "num_experts", 0):
        ways = (ARGUMENTS, PLAIN), ({**ARGUMENTS, "enable_return_routed_experts": True}, PLAIN)
    else:
        ways = (ARGUMENTS, FILTERED), (ARGUMENTS, RECORDED)
    context = multiprocessing.get_context("spawn")
    with ExitStack() as pools:
        without, recording = (
            pools.enter_context(ProcessPoolExecutor(1, context, start, (given.model, *way))) for way in ways
        )
        ratios = [pair_ratio(without, recording, given.responses, turn) for turn in range(1 + given.rounds)][
            1:
        ]
    print(
        f"with / without records: median {statistics.median(ratios):.3f} of {given.rounds} pairs, from "
        f"{min(ratios):.3f} to {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
