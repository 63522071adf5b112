"""Times how recorded experts go from an engine through the driver to the ranks.

Usage: OMP_NUM_THREADS=1 python scripts/bench/experts_transport.py [--rows N] [--tokens N] [--experts BYTES].
One process holds samples. The driver, this process, collects them, builds a batch and cuts it for two ranks;
a step cuts and sends twice. Prints the seconds of each part, without records and with, and the driver's
largest memory.
"""

import argparse
import resource
import time
from typing import Any

import numpy as np
import ray
import torch

from verl_rc.data.parts import Part, Sample
from verl_rc.data.ragged import Ragged
from verl_rc.data.ragged_column import RaggedColumn
from verl_rc.data.rollout_batch import build_rollout_batch

PROMPT = [1] * 64
RANKS = 2


@ray.remote
class Engine:
    """Holds samples until it is asked for them."""

    def make(self, rows: int, tokens: int, experts: int) -> None:
        """Samples of so many tokens, with ``experts`` bytes for each place; 0: no records."""
        counts = np.full(tokens, experts, dtype=np.int64)
        counts[0] *= len(PROMPT)
        self.samples = []
        for row in range(rows):
            values = np.random.default_rng(row).integers(0, 128, counts.sum(), dtype=np.uint8)
            columns = {"experts": RaggedColumn.from_counts(counts, values)} if experts else {}
            token_ids = torch.arange(tokens, dtype=torch.int32)
            self.samples.append(Sample(row, [Part(token_ids, -torch.rand(tokens), 0, columns)], True))

    def collect(self) -> list[Sample]:
        """All of them."""
        return self.samples


@ray.remote
class Rank:
    """A trainer's rank."""

    def take(self, rows: Ragged[Any]) -> float:
        """Seconds in which the rows are padded."""
        began = time.perf_counter()
        rows.padded()
        return time.perf_counter() - began


def measure(rows: int, tokens: int, experts: int) -> dict[str, float]:
    """Seconds of each part of the way, and GiB."""
    engine, ranks = Engine.remote(), [Rank.remote() for _ in range(RANKS)]  # type: ignore[attr-defined]
    ray.get(engine.make.remote(rows, tokens, experts))
    times = [time.perf_counter()]
    samples = ray.get(engine.collect.remote())
    times.append(time.perf_counter())
    batch = build_rollout_batch([PROMPT] * rows, list(range(rows)), samples, 0)
    times.append(time.perf_counter())
    halves = [Ragged.from_record(batch.tokens, list(range(rank, rows, RANKS))) for rank in range(RANKS)]
    times.append(time.perf_counter())
    pending = [rank.take.remote(half) for rank, half in zip(ranks, halves, strict=True)]
    times.append(time.perf_counter())
    padded = max(ray.get(pending))
    parts = dict(zip(("collect", "build", "cut", "send"), np.diff(times).tolist(), strict=True))
    return {**parts, "pad": padded, "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=384, help="bytes for each place: layers x experts")
    given = parser.parse_args()
    ray.init(num_cpus=1 + RANKS, object_store_memory=8 << 30, include_dashboard=False, log_to_driver=False)
    for experts in (0, given.experts):
        found = measure(given.rows, given.tokens, experts)
        print(f"{experts} bytes a place:", ", ".join(f"{name} {value:.2f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
