"""A study of two arms and two seeds, and a trainer that ends at once."""

import json
from collections.abc import Sequence
from pathlib import Path

from evidence.study import Study

from verl_rc.study.runs import Run, known_runs, missing, run_all
from verl_rc.study.study import ACCURACY

STUDY = Study(
    question="why?",
    expectation="this",
    found="that",
    common=("trainer.total_training_steps=1",),
    arms={"a": ("x=1",), "b": ("x=2",)},
    seeds=(1, 2),
    minutes=1.0,
    figures=("a", "b"),
    quick=("b",),
)


class Trainer:
    """Writes two validations; ends as told at the arms and seeds in ``ends``."""

    def __init__(self, **ends: int) -> None:
        self.ends, self.started = ends, list[str]()

    def __call__(self, overrides: Sequence[str], planted: str, core: int | None) -> int:
        given = dict(text.split("=", 1) for text in overrides)
        name = ("a" if given["x"] == "1" else "b") + given["trainer.seed"]
        self.started.append(name)
        folder = Path(given["trainer.default_local_dir"])
        folder.mkdir(parents=True)
        lines = [{"step": step, ACCURACY: 0.25 * (1 + step), "other": 1.0} for step in (0, 1)]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return self.ends.get(name, 0)


def finish(folder: Path, start: Trainer, *words: str) -> list[Run]:
    results = folder / "s.jsonl"
    return list(
        run_all(
            STUDY, missing(STUDY, known_runs(results, STUDY), words), folder / f"{start.ends}", results, start
        )
    )
