"""kill -9 from inside an environment, before a reply or just after it: episodes are resumed to the bit.

Five lives each end before a reply and five after one, in synchronous runs and in runs whose responses
publications cut, with a state in the engine's process and without one in two hosts. The process of the
environment itself is killed, too, and the run goes on. Run by hand: ``pytest
tests/chaos/test_kill_points_of_replies.py -m chaos -v``.
"""

from pathlib import Path

import pytest
from compared_runs import committed, differences
from guessing import KILL
from real_runs import of_folder, train

pytestmark = pytest.mark.chaos

STEPS = 6
CUT = (
    "algorithm.rollout_correction.preset=decoupled_token_is",
    "async_training.staleness_threshold=2",
    "async_training.partial_rollout=True",
    "async_training.deterministic_steps=5",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.max_num_seqs=32",
)
IN_ENGINE = ("actor_rollout_ref.rollout.environment.arguments={latency: 0.01, max_turns: 4}",)
IN_HOSTS = (
    "actor_rollout_ref.rollout.environment.arguments={latency: 0.01, max_turns: 4, snapshot: False}",
    "actor_rollout_ref.rollout.environment.hosts=2",
)
MODES = {
    "in turns": IN_ENGINE,
    "replayed in turns": IN_HOSTS,
    "cut": (*CUT, *IN_ENGINE),
    "replayed and cut": (*CUT, *IN_HOSTS),
    "cut at a limit": (*CUT, *IN_HOSTS, "actor_rollout_ref.rollout.environment.max_turns=2"),
}
KILLS = [(call, moment) for call in (1, 7, 20, 33, 46) for moment in ("before", "after")]
"""How many turns the process of the environment was asked in this life, and the side of the reply."""


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def of_mode(mode: str, game_overrides: list[str]) -> list[str]:
    return [*game_overrides, "actor_rollout_ref.rollout.environment.name=guessing:Deadly", *MODES[mode]]


@pytest.fixture(scope="module")
def whole(mode: str, of_mode: list[str], folder: Path) -> Path:
    """The run that nothing disturbs."""
    result = train([*of_mode, *of_folder(folder / f"{mode}_whole")])
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / f"{mode}_whole"


@pytest.mark.parametrize(("call", "moment"), KILLS)
def test_the_driver_is_killed_at_a_reply(
    mode: str,
    of_mode: list[str],
    whole: Path,
    folder: Path,
    call: int,
    moment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lives = folder / f"{mode}_lives"
    monkeypatch.setenv(KILL, f"driver {call} {moment} {tmp_path / 'killed'}")
    result = train([*of_mode, *of_folder(lives)])
    assert (tmp_path / "killed").exists()
    assert result.returncode == -9, result.stderr[-3000:]
    assert differences(whole, lives, len(committed(lives))) == []


def test_the_last_life_ends_as_the_run_that_never_died(
    mode: str, of_mode: list[str], whole: Path, folder: Path
) -> None:
    lives = folder / f"{mode}_lives"
    assert len(committed(lives)) < STEPS, "the kills must leave something to do"
    result = train([*of_mode, *of_folder(lives)])
    assert result.returncode == 0, result.stderr[-3000:]
    assert differences(whole, lives, STEPS) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_process_of_the_environment_is_killed_at_a_reply(
    mode: str,
    of_mode: list[str],
    whole: Path,
    folder: Path,
    moment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its host is lost, or with it the engine that it lives in: the run goes on."""
    there = folder / f"{mode}_{moment}"
    monkeypatch.setenv(KILL, f"itself 10 {moment} {tmp_path / 'killed'}")
    result = train([*of_mode, *of_folder(there), "trainer.hang_timeout_seconds=60"])
    assert (tmp_path / "killed").exists()
    assert result.returncode == 0, result.stderr[-3000:]
    assert differences(whole, there, STEPS) == []
