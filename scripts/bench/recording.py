"""What recording costs an engine: generation with and without sets of kept tokens, or experts.

Usage: OMP_NUM_THREADS=1 python scripts/bench/recording.py MODEL [--processes N] [--rounds N]
[--responses N]. Processor seconds of all that is between a request and its sample, for responses of 32
tokens. Two processes that do the same differ by up to 10 % for as long as they live, so there are several
with and several without records. A model with experts records those; of another one, which samples with
top_p=.95 and top_k=20, the sets are recorded.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
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

own: tuple[Any, SamplingOptions]
"""Engine and options of a process."""


def start(model: str, arguments: dict[str, Any], options: SamplingOptions) -> None:
    """Build the engine of this process."""
    global own
    os.environ.update(engine_environment(1, "cpu", one_node=True))
    from verl_rc.rollout.vllm.sampler import VllmSampler

    own = VllmSampler(VllmOptions(model, "bfloat16", 64, arguments)), options


def seconds(responses: int) -> float:
    """Processor seconds of sampling ``responses`` responses, with nothing in the prefix cache."""
    sampler, options = own
    sampler.reset_prefix_cache()
    started, ended = time.process_time(), 0
    for key in range(responses):
        request = GenerationRequest([5 + key % 20, *range(5, 12)], key)
        sampler.begin(key, QueuedSample(key, request, options))
    while ended < responses:
        ended += len(sampler.step())
    return time.process_time() - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--processes", type=int, default=4, help="of each kind")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--responses", type=int, default=256)
    given = parser.parse_args()
    if getattr(AutoConfig.from_pretrained(given.model), "num_experts", 0):
        ways = (ARGUMENTS, PLAIN), ({**ARGUMENTS, "enable_return_routed_experts": True}, PLAIN)
    else:
        ways = (ARGUMENTS, FILTERED), (ARGUMENTS, RECORDED)
    context = multiprocessing.get_context("spawn")
    with ExitStack() as pools:
        engines = [
            [pools.enter_context(ProcessPoolExecutor(1, context, start, (given.model, *way))) for way in ways]
            for _ in range(given.processes)
        ]
        every = [engine for pair in engines for engine in pair]
        for engine in every:
            engine.submit(seconds, given.responses).result()
        taken = [
            [engine.submit(seconds, given.responses).result() for engine in every]
            for _ in range(given.rounds)
        ]
    medians = [statistics.median(of_one) for of_one in zip(*taken, strict=True)]
    without, recording = medians[::2], medians[1::2]
    for name, values in (("without", without), ("with", recording)):
        print(f"{name} records: {', '.join(f'{value:.3f}' for value in values)} s")
    print(f"with / without: {statistics.median(recording) / statistics.median(without):.3f}, of medians")


if __name__ == "__main__":
    main()
