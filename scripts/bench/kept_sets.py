"""What recording the sets of kept tokens costs an engine: generation with a filter, with and without sets.

Usage: OMP_NUM_THREADS=1 python scripts/bench/kept_sets.py MODEL [--rounds N]. Processor seconds of all that
is between a request and its sample, for 256 responses of 32 tokens with top_p=.95 and top_k=20, in turns; the
median ratio of pairs.
"""

import argparse
import os
import statistics
import time
from dataclasses import replace

from verl_rc.rollout.engine import QueuedSample
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.rollout.vllm.options import VllmOptions
from verl_rc.workers.environment import engine_environment

ARGUMENTS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_chunked_prefill": False,
    "skip_tokenizer_init": True,
    "max_logprobs": 36,
}
FILTERED = SamplingOptions(1.0, 0.95, 20, 32, (), ignore_eos=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    os.environ.update(engine_environment(1, "cpu", one_node=True))
    from verl_rc.rollout.vllm.sampler import VllmSampler

    sampler = VllmSampler(VllmOptions(given.model, "bfloat16", 64, ARGUMENTS))
    requests = [GenerationRequest([5 + seed % 20, *range(5, 12)], seed) for seed in range(256)]

    def seconds(options: SamplingOptions) -> float:
        sampler.reset_prefix_cache()
        started, ended = time.process_time(), 0
        for key, request in enumerate(requests):
            sampler.begin(key, QueuedSample(key, request, options))
        while ended < len(requests):
            ended += len(sampler.step())
        return time.process_time() - started

    recorded = replace(FILTERED, max_kept_tokens=36)
    seconds(recorded)
    ratios = []
    for turn in range(given.rounds):
        order = (FILTERED, recorded) if turn % 2 else (recorded, FILTERED)
        taken = {options: seconds(options) for options in order}
        ratios.append(taken[recorded] / taken[FILTERED])
        print(f"{taken[FILTERED]:.3f} s without, {taken[recorded]:.3f} with", flush=True)
    print(
        f"with / without sets: median {statistics.median(ratios):.3f} of {given.rounds} pairs, from "
        f"{min(ratios):.3f} to {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
