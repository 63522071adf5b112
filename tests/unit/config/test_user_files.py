"""A user's Python file is a module like any other: it has a name under which every process imports it."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from verl_rc.config.user_code import load_user_module
from verl_rc.config.user_files import import_file

POSTPONED = """
from __future__ import annotations
import enum, pickle, typing
from dataclasses import dataclass
from pydantic import BaseModel

@dataclass
class Verdict:
    right: bool

class Part(BaseModel):
    points: float

class Judgement(BaseModel):
    parts: list[Part]

class Call(typing.NamedTuple):
    verdict: Verdict

class Level(enum.Enum):
    HIGH = 2

hints = typing.get_type_hints(Call)
entry = pickle.loads(pickle.dumps(Call(Verdict(True))))
level = pickle.loads(pickle.dumps(Level.HIGH))
"""
VERIFIER = "def verify(answer, truth):\n    return float(answer == truth)\n"


@pytest.fixture
def verifier(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(VERIFIER)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    "name", ["mine.py", "my-reward.v2.py", "my reward_5f_.py", "prüfung.py", "json.py", "1.py"]
)
def test_a_module_finds_its_own_names_while_it_runs_and_afterwards(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POSTPONED)
    module = load_user_module(str(tmp_path / name), "a.path")
    assert module.hints == {"verdict": module.Verdict}
    assert module.entry == module.Call(module.Verdict(True))
    assert module.level is module.Level.HIGH
    assert module.Judgement(parts=[{"points": 0.5}]).parts[0] == module.Part(points=0.5)
    assert module.__file__ == str(tmp_path / name)
    assert module.__name__.rpartition(".")[2].isidentifier()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_the_code_call_its_functions(verifier: Path, method: str) -> None:
    verify = import_file(verifier).verify
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        assert list(pool.map(verify, ["4", "5"], ["4", "4"])) == [1.0, 0.0]


def test_every_process_reads_what_another_pickled(verifier: Path) -> None:
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)('4', '4'))"
    written = pickle.dumps(import_file(verifier).verify)
    root = str(Path(__file__).parents[3])
    finished = subprocess.run(
        [sys.executable, "-c", program],
        input=written,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": root},
        cwd="/",
        check=True,
    )
    assert finished.stdout == b"1.0\n"


def test_a_file_runs_once_whatever_names_it(verifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_file(verifier)
    monkeypatch.chdir(verifier.parent)
    assert import_file(Path("mine.py")) is module
    assert sys.modules[module.__name__] is module
    (verifier.parent / "other").mkdir()
    (verifier.parent / "other/mine.py").write_text("answer = 42\n")
    assert import_file(Path("other/mine.py")).answer == 42


def test_a_changed_file_runs_again(verifier: Path) -> None:
    import_file(verifier)
    verifier.write_text("answer = 42\n")
    assert import_file(verifier).answer == 42


def test_a_file_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import os\nanswer = int(os.environ['ANSWER_OF_MINE'])\n")
    with pytest.raises(ValueError, match=r"must be a file that can be imported; .* raised KeyError"):
        load_user_module(str(tmp_path / "mine.py"), "a.path")
    monkeypatch.setenv("ANSWER_OF_MINE", "42")
    assert load_user_module(str(tmp_path / "mine.py"), "a.path").answer == 42


@pytest.mark.parametrize(
    "statement", ["import helper", "from helper import x", "from . import helper", "from .helper import x"]
)
def test_a_neighbour_that_is_not_on_the_path_is_refused(tmp_path: Path, statement: str) -> None:
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "mine.py").write_text(statement)
    with pytest.raises(ValueError, match=r"raised \w*Error\(.*helper.*\) \(is it on PYTHONPATH\?\)"):
        load_user_module(str(tmp_path / "mine.py"), "a.path")


def test_a_neighbour_on_the_path_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper_of_mine.py").write_text("x = 42\n")
    (tmp_path / "mine.py").write_text("from helper_of_mine import x")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_user_module(str(tmp_path / "mine.py"), "a.path").x == 42
