"""Reward functions that hang, die, raise or return nonsense, in real processes."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from verl_rc.algorithm.rewards import RewardError, RewardOutput, RewardSample
from verl_rc.config.task import RewardConfig
from verl_rc.config.user_code import load_user_module
from verl_rc.runtime.workers.reward_pool import RewardPool

SOURCE = """
import enum, os, signal, subprocess, sys, time

class Verdict(enum.StrEnum):
    RIGHT = "right"

def verdict(argument, folder):
    print("x" * 100_000)
    return {"score": float(argument), "pred": Verdict.RIGHT, "level": enum.IntEnum("Level", "HIGH").HIGH}

def interrupt(argument, folder):
    raise KeyboardInterrupt

def recurse(argument, folder):
    return recurse(argument, folder)

def close_all(argument, folder):
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    return 1.0

def beyond_floats(argument, folder):
    return {"score": 10 ** 400}

def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    behaviour, _, argument = solution_str.partition(" ")
    return globals()[behaviour](argument, folder)

def by_rule(data_source, solution_str, ground_truth, extra_info, folder):
    return extra_info["rule"].points

def score(argument, folder):
    return float(argument)

def columns(argument, folder):
    return {"score": float(argument), "acc": True, "words": ["a", None], "process": os.getpid()}

def hang(argument, folder):
    while True:
        pass

def hang_with_child(argument, folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    open(os.path.join(folder, "child"), "w").write(str(child.pid))
    child.wait()

def leave(argument, folder):
    os._exit(int(argument))

def sys_exit(argument, folder):
    sys.exit(int(argument))

def daemon(argument, folder):
    program = f"import os, time; open({argument!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    subprocess.run(["setsid", "--fork", sys.executable, "-c", program], check=True)
    while not (os.path.exists(argument) and open(argument).read()):
        time.sleep(0.01)
    return 1.0

def write(argument, folder):
    os.write(int(sys.argv[1]), bytes.fromhex(argument))
    time.sleep(3600)

def pickled(argument, folder):
    import pickle, struct
    data = pickle.dumps((eval(argument), None))
    os.write(int(sys.argv[1]), struct.pack("!i", len(data)) + data)
    time.sleep(3600)

def variable(argument, folder):
    return {"score": 1.0, "value": os.environ.get(argument)}

def crash(argument, folder):
    os.kill(os.getpid(), signal.SIGSEGV)

def complain(argument, folder):
    raise KeyError(argument)

def text(argument, folder):
    return "good"

def not_a_number(argument, folder):
    return float("nan")

def nothing(argument, folder):
    return None

def an_object(argument, folder):
    return {"score": 1.0, "model": object()}
"""
Configure = Callable[..., RewardConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rewards")


@pytest.fixture(scope="module")
def configure(folder: Path) -> Configure:
    (folder / "mine.py").write_text(SOURCE)

    def make(**fields: object) -> RewardConfig:
        name = fields.pop("name", "compute_score")
        custom = {"path": str(folder / "mine.py"), "name": name, "reward_kwargs": {"folder": str(folder)}}
        return RewardConfig.model_validate(
            {"custom_reward_function": custom, "num_workers": 2, "timeout_seconds": 600, **fields}
        )

    return make


@pytest.fixture
def open_pool(configure: Configure) -> Iterator[Callable[..., RewardPool]]:
    pools = []

    def make(**fields: object) -> RewardPool:
        pools.append(RewardPool(configure(**fields), start_timeout_seconds=600))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(scope="module")
def pool(configure: Configure) -> Iterator[RewardPool]:
    pool = RewardPool(configure(), start_timeout_seconds=600)
    yield pool
    pool.close()


def samples_of(*texts: str) -> list[RewardSample]:
    return [RewardSample(100 + index, "mine", "truth", {}, text) for index, text in enumerate(texts)]


def results_of(pool: RewardPool, *texts: str) -> list[RewardOutput | RewardError]:
    results = dict(pool.results(samples_of(*texts)))
    return [results[place] for place in range(len(texts))]


def scores_of(pool: RewardPool, *texts: str) -> list[float]:
    results = results_of(pool, *texts)
    return [result.score for result in results if isinstance(result, RewardOutput)]


def test_results_belong_to_their_samples_and_columns_arrive(pool: RewardPool) -> None:
    texts = [f"score {number / 7}" for number in range(40)]
    assert scores_of(pool, *texts) == [number / 7 for number in range(40)]
    results = results_of(pool, *["columns 2"] * 20)
    assert {result.score for result in results if isinstance(result, RewardOutput)} == {2.0}
    extras = [dict(result.extras) for result in results if isinstance(result, RewardOutput)]
    assert all(extra["words"] == ["a", None] and extra["acc"] == 1.0 for extra in extras)
    assert os.getpid() not in {extra["process"] for extra in extras}
    assert results_of(pool) == []
    [output] = results_of(pool, "verdict 1")  # values of classes that only the reward function's module has
    assert isinstance(output, RewardOutput)
    assert {name: type(value) for name, value in output.extras.items()} == {"pred": str, "level": int}


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("leave 3", "the reward function did not return, its process ended with exit code 3, for row 101 "),
        ("sys_exit 4", r"raised SystemExit: 4 \(.*mine.py:\d+, in sys_exit\) for row 101 "),
        ("crash", "its process was ended by SIGSEGV, for row 101 "),
        (
            "complain lost",
            r"raised KeyError: 'lost' \(.*mine.py:\d+, in complain\) for row 101 \(data_source 'mine'",
        ),
        (
            "write 6a756e6b",
            "the reward function did not return, its process wrote into its connection: .* row 101 ",
        ),
        ("write 000000046a756e6b", "its process wrote into its connection: a message must be a pickle"),
        ("pickled 5", "its process wrote something else than results into its connection, for row 101 "),
        ("pickled []", "its process wrote something else than results into its connection, for row 101 "),
        ("pickled [(77,None)]", "its process wrote something else than results into its connection"),
        ("interrupt", r"the reward function did not return, its process .* for row 101 "),
        ("close_all", r"the reward function did not return, its process .* for row 101 "),
        ("recurse", r"raised RecursionError: .* for row 101 "),
        (
            "beyond_floats",
            r"the score of a reward function must be a finite number, got 1000.* \(int\) for row 101 ",
        ),
        ("text", r"must be a finite number, got 'good' \(str\) for row 101 "),
        ("not_a_number", r"must be a finite number, got nan \(float\) for row 101 "),
        ("nothing", r"must be a finite number, got None \(NoneType\) for row 101 "),
        (
            "an_object",
            "numbers, texts, None, or lists and dicts of those, got object under 'model' for row 101 ",
        ),
    ],
)
def test_a_failure_is_named_and_the_others_are_scored(pool: RewardPool, behaviour: str, reason: str) -> None:
    first, failed, third = results_of(pool, "score 0.25", behaviour, "score 0.75")
    assert isinstance(first, RewardOutput)
    assert isinstance(third, RewardOutput)
    assert (first.score, third.score) == (0.25, 0.75)
    assert isinstance(failed, RewardError)
    with pytest.raises(RewardError, match=reason):
        raise failed
    assert scores_of(pool, "score 1", "score 2", "score 3") == [1, 2, 3]


def test_calls_that_hang_are_killed_with_all_they_started(
    open_pool: Callable[..., RewardPool], folder: Path
) -> None:
    pool = open_pool(timeout_seconds=3)
    results = results_of(pool, "score 1", "hang", "hang_with_child", "score 4")
    assert [isinstance(result, RewardError) for result in results] == [False, True, True, False]
    assert "it took longer than 3 s, for row 101 " in str(results[1])
    child, deadline = int((folder / "child").read_text()), time.monotonic() + 120
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the reward function's child is still running"
        time.sleep(0.05)
    assert scores_of(pool, "score 1", "score 2") == [1, 2]


def test_half_a_message_counts_as_a_hang(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool(timeout_seconds=1)
    first, half, beginning = results_of(pool, "score 1", "write 00000040aa", "write 0000")
    assert isinstance(first, RewardOutput)
    assert "it took longer than 1 s, for row 101 " in str(half)
    assert "it took longer than 1 s, for row 102 " in str(beginning)


def test_daemons_of_reward_functions_end_with_the_pool(
    open_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    pool = open_pool()
    assert scores_of(pool, f"daemon {tmp_path / 'pid'}") == [1.0]
    daemon = Path(f"/proc/{(tmp_path / 'pid').read_text()}")
    assert daemon.exists()
    pool.close()
    assert not daemon.exists()


def test_secrets_of_the_environment_reach_a_function_only_by_name(
    open_pool: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"JUDGE_API_KEY": "a", "HF_TOKEN": "b", "DATABASE": "postgres://me:word@host/db"}
    for name, value in {**secrets, "JUDGE_URL": "http://host/v1"}.items():
        monkeypatch.setenv(name, value)
    asked = ["JUDGE_API_KEY", "HF_TOKEN", "DATABASE", "JUDGE_URL", "PATH", "PWD"]
    monkeypatch.setenv("PWD", "/somewhere")

    def given(**fields: object) -> set[str]:
        results = results_of(open_pool(num_workers=1, **fields), *(f"variable {name}" for name in asked))
        outputs = [result for result in results if isinstance(result, RewardOutput)]
        return {name for name, output in zip(asked, outputs, strict=True) if output.extras["value"]}

    assert given() == {"JUDGE_URL", "PATH", "PWD"}
    assert given(pass_env=["JUDGE_API_KEY"]) == {"JUDGE_URL", "PATH", "PWD", "JUDGE_API_KEY"}
    with pytest.raises(ValueError, match=r"reward.pass_env must name .* but \['NO_SUCH_KEY'\] are not set"):
        open_pool(pass_env=["NO_SUCH_KEY"])
    with pytest.raises(ValueError, match="pass_env must be empty without"):
        RewardConfig(pass_env=["JUDGE_API_KEY"])


def test_who_stops_early_gives_the_rest_up(pool: RewardPool) -> None:
    with closing(pool.results(samples_of("hang", "score 1", "score 2"))) as results:
        assert next(results)[0] == 1
    assert scores_of(pool, "score 8", "score 9") == [8, 9]


@pytest.mark.parametrize(
    ("source", "seconds", "message"),
    [
        ("import a_module_that_is_not_there", 600, "broken.py' raised ModuleNotFoundError"),
        (
            "import os; os._exit(7)",
            600,
            "must load .*broken.py, but it failed: its process ended with exit code 7",
        ),
        ("import time; time.sleep(3600)", 1, "but it failed: it took longer than 1 s"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_at_once(
    tmp_path: Path, source: str, seconds: float, message: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    custom = {"path": str(tmp_path / "broken.py")}
    config = RewardConfig.model_validate({"custom_reward_function": custom, "num_workers": 1})
    with pytest.raises(ValueError, match=message):
        RewardPool(config, start_timeout_seconds=seconds)


def test_built_in_mathematics_runs_there_too() -> None:
    pool = RewardPool(RewardConfig(num_workers=1), start_timeout_seconds=600)
    sample = RewardSample(0, "lighteval/MATH", r"\frac{1}{2}", {}, r"so \boxed{0.5}")
    [(_, result)] = pool.results([sample])
    pool.close()
    assert isinstance(result, RewardOutput)
    assert (result.score, result.extras["pred"]) == (1.0, "0.5")


def test_a_class_of_another_file_of_the_user_arrives(
    open_pool: Callable[..., RewardPool], folder: Path
) -> None:
    (folder / "data.py").write_text("class Rule:\n    points = 0.5\n")
    rule = load_user_module(str(folder / "data.py"), "data.custom_cls.path").Rule()
    sample = RewardSample(0, "mine", "truth", {"rule": rule}, "x")
    [(_, result)] = open_pool(name="by_rule", num_workers=1).results([sample])
    assert isinstance(result, RewardOutput)
    assert result.score == 0.5


def test_the_processes_end_with_the_pool(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool(num_workers=1)
    [result] = results_of(pool, "columns 1")
    assert isinstance(result, RewardOutput)
    pool.close()
    assert not Path(f"/proc/{result.extras['process']}").exists()
