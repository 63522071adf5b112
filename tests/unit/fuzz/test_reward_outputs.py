"""Whatever a reward function does, a response has a finite score and columns that can be written, or a
failure that names it."""

import json
import math
import random
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from batches_of_ones import ones_rollouts

from verl_rc.algorithm.rewards import RewardError, RewardOutput, RewardSample, build_reward
from verl_rc.config.task import RewardConfig
from verl_rc.metrics import reduce_metrics
from verl_rc.records.dataset import PromptRow
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.trainer.evaluate import validation_metrics
from verl_rc.trainer.scoring import ResponseScorer, extra_columns, reward_metrics
from verl_rc.trainer.stages import write_samples

SOURCE = "def compute_score(solution_str, extra_info, **_):\n    return extra_info['behave'](solution_str)\n"
SAMPLES = 12


class Verdict(StrEnum):
    RIGHT = "right"


class Grade(str, Enum):  # noqa: UP042  (as it was written before Python 3.11)
    GOOD = "good"


class Level(IntEnum):
    HIGH = 3


class Unshowable:
    def __repr__(self) -> str:
        raise KeyError("no")


class Unsayable(Exception):
    def __str__(self) -> str:
        raise KeyError("no")


class StrangeMapping(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise LookupError(key)


class StrangeArray:
    shape = ()

    def tolist(self) -> Any:
        raise MemoryError("not now")


def endless() -> list[Any]:
    parts: list[Any] = []
    parts.append(parts)
    return parts


SCORES: list[Callable[[random.Random], Any]] = [
    lambda rng: rng.choice([0, 1, 0.5, -3, True, False, 1e300, -0.0, 5e-324]),
    lambda rng: rng.choice([np.float32(0.5), np.int64(2), np.bool_(True), np.array(1.5), np.float64(2)]),
    lambda rng: rng.choice([torch.tensor(0.5), torch.tensor(2), torch.tensor(True), Fraction(1, 3)]),
    lambda rng: rng.choice(
        [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf), 10**400, -(10**5000)]
    ),
    lambda rng: rng.choice(
        [None, "1.0", b"1", "", "nan", [1.0], (1.0,), {}, set(), 1j, Decimal("0.5"), object(), ...]
    ),
    lambda rng: rng.choice(
        [np.zeros(2), np.zeros((0,)), torch.zeros(1), torch.zeros(2, 2), np.array("x"), StrangeArray()]
    ),
    lambda rng: rng.choice(
        [Level.HIGH, Verdict.RIGHT, Unshowable(), print, int, lambda: 1.0, (part for part in ())]
    ),
]
EXTRAS: list[Callable[[random.Random], Any]] = [
    *SCORES,
    lambda rng: rng.choice(
        ["text", "🦆", "half \ud800 a pair", "x" * 100_000, "\x00", Verdict.RIGHT, Grade.GOOD, Level.HIGH]
    ),
    lambda rng: rng.choice(
        [
            [1, "a", None],
            {"a": {"b": [1.5]}},
            {1: 2},
            {None: 1},
            {Verdict.RIGHT: 0},
            [np.float32(1)],
            endless(),
        ]
    ),
]
NAMES = ["acc", "pred", "reward", "score ", "format/ok", "", "é", "length", "step", "a b"]


def returned(rng: random.Random) -> Any:
    """A number or a dict, mostly with something wrong with it."""
    if rng.random() < 0.4:
        return rng.choice(SCORES)(rng)
    columns = {name: rng.choice(EXTRAS)(rng) for name in rng.sample(NAMES, rng.randint(0, 3))}
    if rng.random() < 0.8:
        columns["score"] = SCORES[0](rng) if rng.random() < 0.7 else rng.choice(SCORES)(rng)
    return rng.choice([columns] * 6 + [StrangeMapping(columns), {**columns, 3: 1.0}])


def raised(rng: random.Random) -> Any:
    """Never returns."""
    match rng.randrange(6):
        case 0:
            raise rng.choice(
                [ValueError, KeyError, AssertionError, OSError, StopIteration, MemoryError, Unsayable]
            )("x" * 10_000)
        case 1:
            raise SystemExit(rng.choice([0, 1, None, "leaving"]))
        case 2:
            return raised_deep()
        case 3:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")
        case 4:
            raise ExceptionGroup("several", [ValueError("a"), TypeError("b")])
        case _:
            raise RewardError("of the function's own")


def raised_deep() -> Any:
    return raised_deep()


def behaviour(seed: int) -> Callable[[str], Any]:
    """A reward function; what it does depends on the sample too, so that columns change their types from row
    to row."""

    def behave(text: str) -> Any:
        rng = random.Random(f"{seed} {text}")
        print("a reward function may print")
        return raised(rng) if rng.random() < 0.15 else returned(rng)

    return behave


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RewardConfig:
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(SOURCE)
    section = {"custom_reward_function": {"path": str(path)}, "failure_score": -1.0}
    return RewardConfig.model_validate(section)


class Inline:
    """In the place of a pool: scores in this process."""

    def __init__(self, config: RewardConfig) -> None:
        self._reward = build_reward(config)
        self.failures: list[tuple[int, str]] = []

    def results(self, samples: list[RewardSample]) -> Any:
        for place, sample in enumerate(samples):
            try:
                yield place, self._reward(sample)
            except RewardError as error:
                self.failures.append((sample.row_index, str(error)))
                yield place, error


def is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(key) is str and is_plain(part) for key, part in value.items())
    return (
        all(map(is_plain, value))
        if type(value) is list
        else type(value) in (type(None), bool, int, float, str)
    )


def score_a_batch(seed: int, config: RewardConfig, folder: Path) -> list[RewardOutput]:
    """Scores of some responses, through all that reads them."""
    rows = [
        PromptRow(index, [1], [], "mine", "truth", {"behave": behaviour(seed)}) for index in range(SAMPLES)
    ]
    texts = [f"response {index}" for index in range(SAMPLES)]
    pool = Inline(config)
    outputs = ResponseScorer(config, cast(Any, pool), None).score(rows, texts)
    assert all(f"for row {row} (" in message and len(message) < 1500 for row, message in pool.failures), (
        pool.failures
    )
    assert all(type(output.score) is float and math.isfinite(output.score) for output in outputs)
    assert all(is_plain(dict(output.extras)) for output in outputs)
    extras = extra_columns(outputs)
    assert all(map(math.isfinite, reduce_metrics(reward_metrics(extras, len(outputs))).values()))
    rollouts = ones_rollouts(torch.zeros(SAMPLES, 1), torch.ones(SAMPLES, dtype=torch.int64), group=1)
    scores = torch.tensor([output.score for output in outputs], dtype=torch.float32)
    scored = ScoredBatch(rollouts, scores, prompts=rows, texts=texts, extras=extras)
    assert len(scored.accuracies()) == SAMPLES
    assert all(math.isfinite(value) for value in validation_metrics(scored, 1).values())
    write_samples(str(folder), scored, seed)
    assert (
        len(
            [json.loads(line) for line in (folder / f"{seed}.jsonl").read_text(encoding="utf-8").splitlines()]
        )
        == SAMPLES
    )
    return outputs


def test_outputs_become_finite_scores_and_plain_columns_or_named_failures(
    config: RewardConfig, tmp_path: Path
) -> None:
    outputs = [output for seed in range(20) for output in score_a_batch(seed, config, tmp_path)]
    failed = sum("reward_failure" in output.extras for output in outputs)
    assert len(outputs) == 20 * SAMPLES
    assert 0.2 < failed / len(outputs) < 0.9


@pytest.mark.chaos
def test_many_outputs(config: RewardConfig, tmp_path: Path) -> None:
    for seed in range(20, 500):
        score_a_batch(seed, config, tmp_path)
