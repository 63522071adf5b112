"""verl's tools, interactions and agent loops by its own files: what the policy reads, what the reward
function gets, what is refused. Expected values follow verl's documents and its tool agent (0.7, 0.9)."""

import asyncio
import inspect
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tools_of_verl
import yaml

from verl_rc.config.rollout import EnvironmentConfig
from verl_rc.config.verl.environments import ADAPTER
from verl_rc.records.episode import Episode, Exchange, Opening, Reply, Turn
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.environment_host import Failure, Host, StepResult, environment_host
from verl_rc.runtime.rollout.environments import verl_files

GROUPS = itertools.count()
PROMPT = [{"role": "user", "content": "2 + 2 ="}]
JUDGE = {
    "class_name": "tools_of_verl.Judge",
    "config": {"type": "native"},
    "tool_schema": tools_of_verl.schema("judge"),
}
SEARCH = {
    "class_name": "tools_of_verl.OldSearch",
    "config": {},
    "tool_schema": tools_of_verl.schema("search", "query"),
}
TRUTH = {"class_name": "tools_of_verl.TruthInteraction", "config": {}}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    verl_files.load_tools.cache_clear()
    verl_files.load_interactions.cache_clear()


def written(folder: Path, **contents: Any) -> dict[str, str]:
    """Arguments of the environment: each content in a YAML file."""
    paths = {}
    for name, content in contents.items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        paths[f"{name}_path"] = str(path)
    return paths


def tools(folder: Path, *entries: dict[str, Any]) -> dict[str, str]:
    return written(folder, tool_config={"tools": list(entries)})


def host(arguments: dict[str, Any]) -> Host:
    return environment_host(EnvironmentConfig(name=ADAPTER, arguments=arguments, step_seconds=10))


def row(agent: str | None = None, **facts: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "ground_truth": "4", "extra_info": facts, "agent_name": agent}


def judged(truth: str = "4") -> dict[str, Any]:
    return row(tools_kwargs={"judge": {"create_kwargs": {"ground_truth": truth}}, "search": None})


def called(name: str, **arguments: Any) -> str:
    return f"so <tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(at: Host, data: dict[str, Any], *texts: str, stopped: bool = True) -> list[Any]:
    """What a host answers to turns of an episode; the reply of each, or why there is none."""

    async def steps() -> list[Any]:
        outcomes, state, history, key = [], None, list[Exchange](), (next(GROUPS), 0, 0)
        for number, text in enumerate(texts):
            turn = Turn(number, text, (number,), stopped)
            outcome = await at.step(Episode(key, data, 0, state=state, history=history), turn)
            outcomes.append(outcome)
            if isinstance(outcome, StepResult):
                state, history = outcome.state, [*history, Exchange(turn, outcome.reply)]
        return [one.reply if isinstance(one, StepResult) else one for one in outcomes]

    return asyncio.run(steps())


def contents(replies: Sequence[Reply]) -> list[list[str]]:
    return [[str(message["content"]) for message in reply.messages] for reply in replies]


def test_a_prompt_describes_the_tools_of_its_row(tmp_path: Path) -> None:
    at = host(tools(tmp_path, JUDGE, SEARCH))
    assert asyncio.run(at.open(row(), 0)) == Opening(PROMPT, [JUDGE["tool_schema"], SEARCH["tool_schema"]])
    chosen = asyncio.run(at.open(row(tool_selection=["search", "gone"]), 0))
    assert chosen == Opening(PROMPT, [SEARCH["tool_schema"]])
    assert asyncio.run(at.open(row("single_turn_agent"), 0)) is None
    assert tools_of_verl.Judge.made == 1


def test_a_call_creates_executes_and_releases_and_its_reward_reaches_the_reward_function(
    tmp_path: Path,
) -> None:
    at = host(tools(tmp_path, JUDGE, SEARCH))
    wrong, right, end = play(at, judged(), called("judge", answer="5"), called("judge", answer="4"), "#### 4")
    assert contents([wrong, right, end]) == [["False 1 2"], ["True 2 4"], []]
    assert wrong.messages[0]["role"] == "tool"
    assert (wrong.reward, right.reward, end.reward) == (-0.05, 0.0, 0.0)
    assert end.done
    assert not end.truncated
    assert end.extra_info == {"asked": 2, "turn_scores": [], "tool_rewards": [-0.05, 0.0]}
    assert wrong.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
    judge = verl_files.load_tools(str(tmp_path / "tool_config.yaml"), None)["judge"].call.__closure__[0]
    assert judge.cell_contents.truths == {}
    assert len(judge.cell_contents.released) == 2


def test_calls_beyond_the_limit_are_left_out_and_those_below_are_answered_at_once(tmp_path: Path) -> None:
    at = host({**tools(tmp_path, JUDGE, SEARCH), "max_parallel_calls": 2})
    text = called("search", query="x") + called("judge", answer="4") + called("judge", answer="5")
    (reply,) = play(at, judged(), text)
    assert contents([reply]) == [["found x", "True 1 2"]]
    assert reply.extra_info["tool_rewards"] == [0.0]  # a search has none


def test_a_tool_that_raises_is_text_for_the_policy_and_is_counted(tmp_path: Path) -> None:
    limits = {"max_tool_response_length": 30, "tool_response_truncate_side": "right"}
    at = host({**tools(tmp_path, JUDGE), **limits})
    (reply,) = play(at, judged(), called("judge", answer="boom"))
    assert contents([reply]) == [["error: judge failed: the sandb...(truncated)"]]
    assert reply.metrics == {"tool_calls": 1.0, "tool_errors": 1.0}
    assert reply.extra_info["tool_rewards"] == [0.0]
    assert len(at) == 1


def test_unknown_tools_are_named_and_what_is_no_call_ends_the_episode(tmp_path: Path) -> None:
    at = host(tools(tmp_path, JUDGE, SEARCH))
    (reply,) = play(at, row(tool_selection=["search"]), called("judge", answer="4"))
    assert contents([reply]) == [['error: the tools are ["search"]']]
    (malformed,) = play(host(tools(tmp_path, JUDGE)), row(), "<tool_call>{judge}</tool_call>")
    assert malformed.done


@pytest.mark.parametrize(
    ("limits", "truncated"),
    [({"max_assistant_turns": 1}, True), ({"max_user_turns": 1}, False), ({}, False)],
)
def test_a_turn_at_a_limit_is_not_answered(tmp_path: Path, limits: dict[str, int], truncated: bool) -> None:
    first, *_ = play(host({**tools(tmp_path, JUDGE), **limits}), judged(), called("judge", answer="4"))
    assert (first.truncated, bool(first.messages)) == (truncated, not truncated)
    if "max_user_turns" in limits:
        at = host({**tools(tmp_path, JUDGE), **limits})
        _, second = play(at, judged(), *[called("judge", answer="4")] * 2)
        assert second.truncated


def test_a_turn_that_is_cut_off_is_not_answered(tmp_path: Path) -> None:
    (reply,) = play(host(tools(tmp_path, JUDGE)), judged(), called("judge", answer="4"), stopped=False)
    assert reply == Reply(done=True, extra_info={"turn_scores": [], "tool_rewards": []})


def test_an_episode_with_tools_goes_on_elsewhere_from_its_state(tmp_path: Path) -> None:
    arguments = tools(tmp_path, JUDGE)
    calls = [called("judge", answer=answer) for answer in ("5", "4")]
    expected = play(host(arguments), judged(), *calls)
    here, there = host(arguments), host(arguments)

    async def moved() -> Any:
        first, second = (Turn(number, text, (number,), True) for number, text in enumerate(calls))
        answered = await here.step(Episode((0, 0, 0), judged(), 0), first)
        assert isinstance(answered, StepResult)
        assert answered.state is not None
        return await there.step(Episode((0, 0, 0), judged(), 0, state=answered.state), second)

    assert asyncio.run(moved()).reply == expected[1]


def test_a_tool_that_answers_with_pictures_fails_its_episode(tmp_path: Path) -> None:
    (failed,) = play(host(tools(tmp_path, JUDGE)), judged(), called("judge", answer="picture"))
    assert isinstance(failed, Failure)
    assert "must answer with text alone" in failed.reason
    assert not failed.may_retry


# interactions


def test_an_interaction_answers_turns_without_calls_and_its_scores_reach_the_reward_function(
    tmp_path: Path,
) -> None:
    arguments = {**tools(tmp_path, JUDGE), **written(tmp_path, interaction_config={"interaction": [TRUTH]})}
    at = host(arguments)
    data = row(interaction_kwargs={"name": "truth", "ground_truth": "4", "query": "2 + 2"})
    replies = play(at, data, "5", called("judge", answer="4"), "4")
    assert contents(replies) == [["wrong, 2"], ["False 1 4"], []]
    assert [message["role"] for reply in replies for message in reply.messages] == ["user", "tool"]
    assert [reply.reward for reply in replies] == [0.0, -0.05, 1.0]
    assert [reply.done for reply in replies] == [False, False, True]
    assert replies[-1].extra_info == {"asked": 1, "turn_scores": [0.0, 1.0], "tool_rewards": [-0.05]}
    assert replies[-1].metrics == {"turn_score": 1.0}
    interaction = verl_files.load_interactions(arguments["interaction_config_path"])["truth"]
    assert interaction.config == {"name": "truth"}
    assert (interaction.truths, interaction.finalized) == ({}, 1)


def test_an_interaction_goes_on_elsewhere_by_its_turns(tmp_path: Path) -> None:
    arguments = written(tmp_path, interaction_config={"interaction": [{**TRUTH, "name": "gsm8k"}]})
    data = row(interaction_kwargs={"name": "gsm8k", "ground_truth": "4"})
    first, second = Turn(0, "5", (0,), True), Turn(1, "4", (1,), True)

    async def moved() -> Any:
        answered = await host(arguments).step(Episode((0, 0, 0), data, 0), first)
        assert isinstance(answered, StepResult)
        assert answered.state is None
        history = [Exchange(first, answered.reply)]
        return await host(arguments).step(Episode((0, 0, 0), data, 0, history=history), second)

    outcome = asyncio.run(moved())
    assert outcome.reply.extra_info["turn_scores"] == [0.0, 1.0]


def test_a_row_names_its_interaction(tmp_path: Path) -> None:
    at = host(written(tmp_path, interaction_config={"interaction": [TRUTH]}))
    for facts in ({}, {"interaction_kwargs": {"name": "gsm8k"}}):
        with pytest.raises(EpisodeFailedError, match=r"interaction_kwargs.name .* \['truth'\], got"):
            asyncio.run(at.open(row(**facts), 0))


# loops


def test_a_row_names_its_loop(tmp_path: Path) -> None:
    entry = {"name": "echo", "_target_": "tools_of_verl.Echo", "word": "hello"}
    arguments = {**tools(tmp_path, JUDGE), **written(tmp_path, agent_loop_config=[entry])}
    at = host({**arguments, "default_agent_loop": "single_turn_agent"})
    asked = called("judge", answer="4")
    assert play(at, judged(), asked) == [Reply(done=True)]
    assert contents(play(at, {**judged(), "agent_name": "tool_agent"}, asked)) == [["True 1 2"]]
    assert play(at, row("echo"), "hello") == [Reply(reward=1.0, done=True)]
    (unknown,) = play(at, row("ecko"), "hello")
    assert "must name one of ['echo', 'single_turn_agent', 'tool_agent'], got 'ecko'" in unknown.reason


# refusals


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({**JUDGE, "config": {"type": "mcp"}}, "must have config.type=native, got 'mcp'"),
        ({**JUDGE, "class_name": "tools_of_verl.Gone"}, "must name a class in an importable module"),
        ({**JUDGE, "class_name": "Judge"}, "must have class_name: module.Class"),
        ({**JUDGE, "class_name": "tools_of_verl.Unfinished"}, r"lacks \['release'\]"),
        ({**JUDGE, "tool_schema": {"type": "function"}}, "the tool_schema of tools_of_verl.Judge"),
        ({**JUDGE, "config": {"url": "${oc.env:URL}"}}, "write the value"),
        (
            {**JUDGE, "class_name": "verl.tools.gsm8k_tool.NotThere"},
            "not installed here. Install a release|must name a class",
        ),
    ],
)
def test_a_tool_that_cannot_be_made_is_refused_by_name(tmp_path: Path, entry: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"tool_config_path=.*{why}"):
        host(tools(tmp_path, entry))


def test_two_tools_of_one_name_and_files_that_hold_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"different names, got \['judge', 'judge'\]"):
        host(tools(tmp_path, JUDGE, JUDGE))
    with pytest.raises(ValueError, match="must hold a list under 'tools'"):
        host(written(tmp_path, tool_config={"tool": []}))
    with pytest.raises(ValueError, match="must be a YAML file that can be read"):
        host({"tool_config_path": str(tmp_path / "gone.yaml")})
    with pytest.raises(ValueError, match="different names, got two 'truth'"):
        host(written(tmp_path, interaction_config={"interaction": [TRUTH, TRUTH]}))


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"format": "tag"}, "multi_turn.format=hermes"),
        ({"tools": ["calculator"]}, "multi_turn.tools must be empty"),
        ({"max_user_turn": 3}, "max_user_turn"),
        ({"default_agent_loop": "tool"}, "default_agent_loop must be one of"),
    ],
)
def test_limits_without_effect_are_refused(tmp_path: Path, limits: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        host({**tools(tmp_path, JUDGE), **limits})


@pytest.mark.parametrize("target", ["tools_of_verl.OwnLoop", "verl_that_is_not_there.loops.Loop"])
def test_a_loop_of_verls_is_refused_with_the_ways_out(tmp_path: Path, target: str) -> None:
    entry = {"name": "react", "_target_": target}
    with pytest.raises(
        ValueError, match=f"react is {target}, which must be a .*Environment.*docs/tasks.md#agents"
    ):
        host(written(tmp_path, agent_loop_config=[entry]))


# functions

FUNCTIONS = '''
from verl.tools.function_tool import function_tool


@function_tool
def add(a: str, b: str):
    """Adds.

    Args:
        a: One number.
        b: Another one.
    """
    return {"sum": int(a) + int(b)}, 0.5


@function_tool("shout")
async def loud(word: str):
    """Shouts.

    Args:
        word: What is shouted.
    """
    return word.upper()
'''


@pytest.fixture
def decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's, where it is installed, else one that books functions as it does."""
    try:
        import verl.tools.function_tool  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "verl.tools.function_tool", stand_in())


def stand_in() -> Any:
    registry: dict[str, Any] = {}

    def function_tool(named: Any) -> Any:
        def book(function: Any, name: str) -> Any:
            async def call(parameters: dict[str, Any]) -> Any:
                returned = function(**parameters)
                return await returned if inspect.isawaitable(returned) else returned

            described = {"type": "function", "function": {"name": name, "description": "does"}}
            tool_schema = verl_files.ToolSchema.model_validate(described)
            registry[name] = SimpleNamespace(name=name, call=call, tool_schema=tool_schema)
            return function

        if isinstance(named, str):
            return lambda function: book(function, named)
        return book(named, named.__name__)

    return SimpleNamespace(function_tool=function_tool, FUNCTION_TOOL_REGISTRY=registry)


@pytest.mark.usefixtures("decorator")
def test_functions_are_tools_beside_those_of_classes(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    at = host({**tools(tmp_path, JUDGE), "function_tool_path": str(path), "max_parallel_calls": 3})
    opening = asyncio.run(at.open(row(), 0))
    assert opening is not None
    assert [tool["function"]["name"] for tool in opening.tools] == ["judge", "add", "shout"]
    text = called("add", a="1", b="2") + called("shout", word="x") + called("add", a="1")
    (reply,) = play(at, judged(), text)
    [[added, shouted, failed]] = contents([reply])
    assert (added, shouted) == ('{"sum": 3}', "X")
    assert "add failed" in failed
    assert reply.extra_info["tool_rewards"] == [0.5, 0.0]
    assert reply.metrics["tool_errors"] == 1.0


@pytest.mark.usefixtures("decorator")
def test_a_file_without_functions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match="with verl's decorator @function_tool, and holds none"):
        host({"function_tool_path": str(path)})
