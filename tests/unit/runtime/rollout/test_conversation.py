"""Conversations with tools on a scripted sampler: which tokens are asked with, kept, masked and counted, and
where they end."""

import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch
from conversing import (
    END,
    ScriptedSampler,
    episode,
    ids,
    merging_tokenizer,
    options,
    tool_conversations,
    tool_reply,
)
from made_samples import of_parts, part

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.records.parts import Answer, Sample, last_turn, num_answers, num_tokens, token_ids
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.open_request import Box
from verl_rc.runtime.rollout.sampling import GenerationRequest, next_seed
from verl_rc.runtime.rollout.step_loop import StepLoop
from verl_rc.runtime.rollout.tool_environment import template_arguments
from verl_rc.runtime.rollout.tools import Tool

# A tool's thread shows what it raises, too, whenever the thread ends.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
PATIENCE = 10.0


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return merging_tokenizer()


def waiting_tool(answer: Any) -> tuple[Tool, threading.Event, threading.Event]:
    """A calculator that answers when told to; set by it: it was called; to be set: it may answer."""
    called, go_on = threading.Event(), threading.Event()

    def function(expression: str) -> Any:
        called.set()
        assert go_on.wait(PATIENCE)
        return answer

    return Tool("calculator", "adds", {"expression": "what"}, function), called, go_on


def talk(
    tokenizer: Any,
    scripts: list[list[list[int]]],
    max_tokens: int = 60,
    tools: dict[str, Tool] | None = None,
    **config: Any,
) -> tuple[ScriptedSampler, "StepLoop[ScriptedSampler]", Box]:
    """Begin conversations whose prompt is one token, their number."""
    limit, in_lockstep = config.pop("limit", None), config.pop("in_lockstep", False)
    multi_turn = MultiTurnConfig(enable=True, tools=["calculator"], **{"format": "tag", **config})
    conversations = tool_conversations(tokenizer, multi_turn, tools)
    sampler = ScriptedSampler(dict(enumerate(scripts)), conversations, tokenizer.eos_token_id)
    loop, box = StepLoop(lambda: sampler, limit, in_lockstep=in_lockstep), []
    asked = [GenerationRequest([index], 100 + index, episode=episode(index)) for index in range(len(scripts))]
    given = options(max_tokens, tokenizer.eos_token_id)
    loop.submit([Request(number, request, given) for number, request in enumerate(asked)], box)
    return sampler, loop, box


def converse(tokenizer: Any, scripts: list[list[list[int]]], max_tokens: int = 60, **config: Any) -> Any:
    """Conversations whose prompt is one token, their number; returns what the sampler was asked, and the
    samples."""
    sampler, loop, box = talk(tokenizer, scripts, max_tokens, **config)
    responses = dict(loop.take(box, len(scripts), PATIENCE))
    return sampler.calls, [responses[number] for number in range(len(scripts))]


def test_a_call_its_answer_and_the_turn_after_it(tokenizer: Any) -> None:
    """The call writes 12 as two tokens, which tokenising its text would make one: the next prompt keeps the
    two."""
    call = ids(tokenizer, "<tool>1", "2+3</tool>", END)
    assert call != ids(tokenizer, "<tool>12+3</tool>", END)
    said = ids(tokenizer, "15", END)
    calls, (response,) = converse(tokenizer, [[call, said]])
    answer = ids(tokenizer, "15=")
    assert [asked.prompt_token_ids for asked in calls] == [[0], [0, *call, *answer]]
    assert [type(one).__name__ for one in response.parts] == ["Part", "Answer", "Part"]
    assert of_parts(response.parts) == [
        *((token, -1 / 8, 10) for token in call),
        *((token, 0.0, -1) for token in answer),
        *((token, -2 / 8, 11) for token in said),
    ]
    assert (response.tool_calls, response.finished) == (1, True)


def test_each_conversation_takes_its_turns_at_its_own_pace(tokenizer: Any) -> None:
    """While a tool keeps one waiting, the other ends: no turn waits for the slowest tool."""
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    slow_call = ids(tokenizer, "<tool>slow</tool>", END)
    go_on = threading.Event()

    def function(expression: str) -> str:
        if expression == "slow":
            assert go_on.wait(PATIENCE)
        return "2"

    tool = Tool("calculator", "adds", {"expression": "what"}, function)
    _, loop, box = talk(
        tokenizer, [[slow_call, said], [call, call, call, said]], 200, tools={"calculator": tool}
    )
    ((first, response),) = loop.take(box, 1, PATIENCE)
    assert (first, num_answers(response.parts)) == (1, 3)
    go_on.set()
    assert [number for number, _ in loop.take(box, 1, PATIENCE)] == [0]


def test_in_lockstep_no_sample_is_decoded_while_another_waits_for_its_answer(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    tool, called, go_on = waiting_tool("2")
    script = [[call, said], [call, call, call, said]]
    sampler, loop, box = talk(tokenizer, script, tools={"calculator": tool}, in_lockstep=True)
    assert called.wait(PATIENCE)
    assert len(sampler.calls) == 2
    go_on.set()
    loop.take(box, 2, PATIENCE)
    turns = [(asked.number, asked.turn) for asked in sampler.calls]
    assert turns == [(0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (1, 3)]


def test_a_sample_that_waits_for_its_tool_counts_among_those_that_have_begun(tokenizer: Any) -> None:
    """And the engine rests meanwhile: it makes no step without a sample."""
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    tool, called, go_on = waiting_tool("2")
    sampler, loop, box = talk(tokenizer, [[call, said], [said]], tools={"calculator": tool}, limit=1)
    assert called.wait(PATIENCE)
    assert loop.call(lambda _: len(box)) == 0
    assert len(loop.call(lambda _: loop.take_activity())) == 1
    assert loop.call(lambda _: loop.take_activity()) == []
    go_on.set()
    assert [number for number, _ in loop.take(box, 2, PATIENCE)] == [0, 1]
    assert [asked.number for asked in sampler.calls] == [0, 0, 1]


def test_an_update_that_waits_for_the_end_of_all_waits_for_tools_too(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    tool, called, go_on = waiting_tool("2")
    _, loop, box = talk(tokenizer, [[call, said]], tools={"calculator": tool})
    assert called.wait(PATIENCE)
    assert token_ids(loop.call(loop.so_far)[0].parts) == call  # kept if the engine is lost
    update: Future[int] = Future()
    threading.Thread(target=lambda: update.set_result(loop.call(lambda _: len(box), after="all"))).start()
    go_on.set()
    assert update.result(PATIENCE) == 1  # the sample was in its box when the update began


def test_a_cancelled_sample_is_forgotten_while_its_tool_is_at_work_or_fails(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    tool, called, go_on = waiting_tool(2)  # no text: a failure
    _, loop, box = talk(tokenizer, [[call, said], [said]], tools={"calculator": tool})
    assert called.wait(PATIENCE)
    loop.call(lambda sampler: loop.cancel(sampler, [0]))
    assert loop.call(lambda _: len(box), after="all") == 1  # nothing is waited for
    go_on.set()
    assert [number for number, _ in loop.take(box, 1, PATIENCE)] == [1]
    loop.submit(
        [Request(1, GenerationRequest([1], seed=5, episode=episode(5)), options(end=tokenizer.eos_token_id))],
        box,
    )
    assert [number for number, _ in loop.take(box, 1, PATIENCE)] == [1]  # the loop lives


def test_a_response_goes_on_from_its_parts_with_the_same_seeds(tokenizer: Any) -> None:
    """As on another engine, after one was lost: behind an answer, inside a turn, and while tools were at
    work."""
    call, said = ids(tokenizer, "<tool>1", "2+3</tool>", END), ids(tokenizer, "15", END)
    answer = ids(tokenizer, "15=")
    calls, _ = converse(tokenizer, [[call, said]])

    told, sampled = Answer(torch.tensor(answer, dtype=torch.int32)), partial(part, version=10)
    for parts in (
        [sampled(call), told],
        [sampled(call[:3]), sampled(call[3:])],
    ):
        sampler, loop, box = talk(tokenizer, [])
        sampler.scripts = {0: [call, said]}
        replies = [tool_reply()] if parts[1] is told else []
        request = GenerationRequest([0], 100, None, Sample(0, parts, False, replies, b""), episode(9))
        loop.submit([Request(0, request, options(end=tokenizer.eos_token_id))], box)
        ((_, response),) = loop.take(box, 1, PATIENCE)
        assert token_ids(response.parts) == call + answer + said
        assert (num_answers(response.parts), response.tool_calls) == (1, 1)
        assert [(asked.prompt_token_ids, asked.seed) for asked in sampler.calls] == [
            (asked.prompt_token_ids, asked.seed) for asked in calls[1:]
        ]
    inside = next_seed(100, [sampled(call), told, sampled(said[:1])])
    assert inside not in {asked.seed for asked in calls}
    assert token_ids(last_turn([sampled(call), told, sampled(said[:1]), sampled(said[1:])])) == said


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_tool_that_fails_fails_its_sample_and_no_other(how: str, tokenizer: Any) -> None:
    """T12: each failure names the tool; the engine goes on, also with that tool."""
    hanging = threading.Event()

    def function(expression: str) -> str:
        if expression == "1+1":
            return "2"
        if how == "raises":
            raise ArithmeticError("no")
        hanging.wait()
        return ""

    tool = Tool("calculator", "adds", {"expression": "what"}, function)
    bad, call, said = (ids(tokenizer, text, END) for text in ("<tool>bad</tool>", "<tool>1+1</tool>", "2"))
    scripts = [[bad], [bad], [call, said]]
    _, loop, box = talk(tokenizer, scripts, tools={"calculator": tool}, tool_timeout_seconds=0.2)
    ended = dict(loop.take(box, 3, PATIENCE))
    for number in (0, 1):
        assert isinstance(ended[number], EpisodeFailedError)
        assert "the tool 'calculator' of actor_rollout_ref.rollout.multi_turn.tools, called with" in str(
            ended[number]
        )
    assert ended[2].tool_calls == 1
    assert not [*loop._waiting, *loop._running, *loop._unanswered]  # nothing is kept of them
    loop.submit(
        [Request(2, GenerationRequest([1], seed=5, episode=episode(5)), options(end=tokenizer.eos_token_id))],
        box,
    )
    ((_, response),) = loop.take(box, 1, PATIENCE)
    assert response.tool_calls == 1
    assert loop.call(lambda _: len(box), after="all") == 0  # an update waits for none of them
    hanging.set()


def test_what_follows_from_an_error_of_the_program_ends_the_engine(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ids(tokenizer, "<tool>1+1</tool>", END)
    monkeypatch.setattr("verl_rc.records.tokenize.ContinuationEncoder.encode", lambda *_: 1 / 0)
    _, loop, box = talk(tokenizer, [[call]])
    with pytest.raises(ZeroDivisionError):
        loop.take(box, 1, PATIENCE)


def test_every_turn_of_every_sample_has_a_seed_of_its_own(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    calls, _ = converse(tokenizer, [[call, call, said], [call, call, said]])
    seeds = {(asked.number, asked.turn): asked.seed for asked in calls}
    assert (seeds[0, 0], seeds[1, 0]) == (100, 101)
    assert len(set(seeds.values())) == 6
    alone, _ = converse(tokenizer, [[call, call, said]])
    assert [asked.seed for asked in alone] == [seeds[0, turn] for turn in range(3)]


def test_what_follows_an_answer_has_what_is_left_of_the_limit(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    calls, (response,) = converse(tokenizer, [[call, said * 20]], max_tokens=len(call) + 2 + 3)
    assert [asked.max_tokens for asked in calls] == [len(call) + 5, 3]
    assert (num_tokens(response.parts), response.finished) == (len(call) + 5, False)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_an_answer_that_leaves_no_room_is_left_out(room: int, tokenizer: Any) -> None:
    """The answer "2=" has two tokens, and a third must fit behind it."""
    call = ids(tokenizer, "<tool>1+1</tool>", END)
    calls, (response,) = converse(tokenizer, [[call]], max_tokens=len(call) + room)
    assert len(calls) == 1
    assert token_ids(response.parts) == call
    assert (response.finished, num_answers(response.parts)) == (False, 0)


def test_a_turn_cut_off_inside_or_behind_a_call_is_not_answered(tokenizer: Any) -> None:
    whole = ids(tokenizer, "<tool>1+1</tool>")
    calls, responses = converse(tokenizer, [[whole[:5]], [whole]], max_tokens=len(whole))
    assert len(calls) == 2
    assert [(response.tool_calls, response.finished) for response in responses] == [(0, False), (0, False)]


@pytest.mark.parametrize(
    ("limit", "turns"), [({"max_assistant_turns": 2}, 2), ({"max_user_turns": 2}, 3), ({}, 4)]
)
def test_limits_of_turns(limit: dict[str, int], turns: int, tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1</tool>", END), ids(tokenizer, "2", END)
    calls, (response,) = converse(tokenizer, [[call, call, call, said]], max_tokens=200, **limit)
    assert len(calls) == turns
    assert (num_answers(response.parts) + 1, response.finished) == (turns, turns == 4)


def test_calls_of_one_turn_are_answered_up_to_their_limit(tokenizer: Any) -> None:
    three, said = ids(tokenizer, "<tool>1</tool><tool>2</tool><tool>3</tool>", END), ids(tokenizer, "9", END)
    for most, answers in ((1, "1="), (2, "12="), (5, "123=")):
        calls, (response,) = converse(tokenizer, [[three, said]], max_tokens=100, max_parallel_calls=most)
        assert calls[1].prompt_token_ids[1 + len(three) :] == ids(tokenizer, answers)
        assert response.tool_calls == min(most, 3)


def test_long_answers_are_cut_and_errors_are_answers(tokenizer: Any) -> None:
    for expression, side, answer in (
        ("2**40", "middle", "10...(truncated)...76"),
        ("1/0", "middle", "er...(truncated)...ro"),
        ("2**40", "left", "(truncated)...7776"),
    ):
        call, said = ids(tokenizer, f"<tool>{expression}</tool>", END), ids(tokenizer, "9", END)
        cut = {"max_tool_response_length": 4, "tool_response_truncate_side": side}
        calls, _ = converse(tokenizer, [[call, said]], max_tokens=200, **cut)
        assert tokenizer.decode(calls[1].prompt_token_ids[1 + len(call) :]) == answer + "="


def test_hermes_calls(tokenizer: Any) -> None:
    call = ids(
        tokenizer, '<tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call>', END
    )
    calls, _ = converse(tokenizer, [[call, ids(tokenizer, "4", END)]], max_tokens=200, format="hermes")
    assert calls[1].prompt_token_ids == [0, *call, *ids(tokenizer, "4=")]


def test_prompts_describe_the_tools_in_the_hermes_format_only() -> None:
    config = MultiTurnConfig(enable=True, tools=["calculator"])
    arguments = template_arguments(config, {"enable_thinking": False})
    assert arguments["enable_thinking"] is False
    assert [tool["function"]["name"] for tool in arguments["tools"]] == ["calculator"]
    assert template_arguments(config.model_copy(update={"format": "tag"}), {"a": 1}) == {"a": 1}


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>", "!"])
def test_the_text_of_a_turn_has_no_stop_token_at_its_end(stop: str, tokenizer: Any) -> None:
    """Whichever of the model's has ended it, a special one or not; a turn that a limit cut off keeps all."""
    conversations = tool_conversations(tokenizer, MultiTurnConfig(enable=True, tools=["calculator"]))
    (stop_id,) = tokenizer.encode(stop, add_special_tokens=False)
    tokens = [*tokenizer.encode("5", add_special_tokens=False), stop_id]
    ended, cut = (conversations._turn(0, tokens, stopped=stopped) for stopped in (True, False))
    assert (ended.text, cut.text) == ("5", f"5{stop}")
    assert ended.token_ids == cut.token_ids == tuple(tokens)
