"""How long a step waits for a checkpoint that is written at once, or copied and written beside the next step
(``async_save``).

Weights and Adam's moments in fp32, 12 bytes per parameter, in one process. The last two columns say what the
next step, here forward, backward and update, takes alone and while the write is under way. ``python
scripts/bench/checkpoint_save.py [FOLDER]`` writes to a temporary folder in FOLDER.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

from verl_rc.checkpoint import BackgroundWriter, collect_shards, write_shards

WIDTH = 1024
LAYERS = (1, 10, 50)
"""Layers of ``WIDTH`` squared parameters each."""
SAVES = 5


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    """The one in the middle: the first copy is slower than the others, since its memory is new."""
    return sorted(values)[len(values) // 2]


def costs_of(layers: int, folder: Path) -> dict[str, float]:
    """Seconds of each part."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer, rows, writer = (
        AdamW(model.parameters(), fused=True),
        torch.rand(128, WIDTH),
        BackgroundWriter(pin_memory=False),
    )

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    costs: dict[str, list[float]] = {"waits": [], "copies": [], "writes": [], "step": [], "step beside": []}
    for save in range(SAVES):
        costs["waits"].append(
            seconds(
                lambda number=save: write_shards(
                    folder / f"waited_{number}", collect_shards(model, optimizer, {})
                )
            )
        )  # type: ignore[misc]
        costs["step"].append(seconds(step))
        start = time.perf_counter()
        writer.start(folder / f"beside_{save}", collect_shards(model, optimizer, {}))
        costs["copies"].append(time.perf_counter() - start)
        costs["step beside"].append(seconds(step))
        writer.is_finished(wait=True)
        costs["writes"].append(time.perf_counter() - start)
    return {name: median(values) for name, values in costs.items()}


def main() -> None:
    """Print one line per size."""
    torch.set_num_threads(1)
    columns = (
        "parameters",
        "waits for it",
        "waits for copy",
        "share",
        "until written",
        "next step alone",
        "and beside it",
    )
    print(" ".join(f"{column:>15}" for column in columns))
    for layers in LAYERS:
        with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
            cost = costs_of(layers, Path(folder))
        cells = [cost["waits"], cost["copies"], cost["writes"], cost["step"], cost["step beside"]]
        texts = [f"{1000 * value:.0f} ms" for value in cells]
        texts.insert(2, f"{cost['copies'] / cost['waits']:.1%}")
        print(" ".join(f"{text:>15}" for text in (f"{layers * WIDTH**2 / 1e6:.0f} M", *texts)))


if __name__ == "__main__":
    main()
