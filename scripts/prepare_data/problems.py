"""Problems drawn at random and rows made of them: what the scripts share that need no data set."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def distinct_problems(draw: Callable[[random.Random], str], count: int, seed: int) -> list[str]:
    """``count`` different problems as ``draw`` makes them, in random order; there must be more than
    ``count``."""
    generator = random.Random(seed)
    problems: dict[str, None] = {}
    while len(problems) < count:
        problems[draw(generator)] = None
    return list(problems)


def rl_row(data_source: str, ability: str, problem: str, answer: str, place: tuple[str, int]) -> Row:
    """One row of an RL file: the prompt as chat messages and the answer as ground truth; ``place``: split and
    row number."""
    split, index = place
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": problem}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def conversation(*turns: tuple[str, str]) -> Row:
    """One row of an SFT file, from pairs of role and text."""
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write_rows(rows: list[Row], path: Path) -> None:
    """Write a parquet file; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
