"""Conversations with tools on scripted engines: which tokens are asked with, kept, masked and counted, and where they end."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from make_tiny_model import CHAT_TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.data.batches import Completions, Timed
from verl_rc.rollout.agent_loop import AgentLoop, template_arguments
from verl_rc.rollout.collect import build_rollout_batch
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions

END = "<|im_end|>"
WIDTH = 200


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tiny model's, with one merge: the text "12" is one token when it is tokenised, and may be two when it is sampled."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
    bpe = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[("1", "2")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE)


def ids(tokenizer: Any, *pieces: str) -> list[int]:
    """Token ids of pieces, each tokenised by itself."""
    return [token for piece in pieces for token in tokenizer(piece)["input_ids"]]


class ScriptedEngines:
    """Answers each turn of a conversation (told apart by its first prompt token) with the next token ids of its script.

    The log-prob of a token is -(turn + 1) / 8 and its version ``10 + turn``. A turn longer than its request allows is cut.
    """

    def __init__(self, scripts: dict[int, list[list[int]]], end: int) -> None:
        self.scripts, self.end = scripts, end
        self.calls: list[list[GenerationRequest]] = []
        self._turns: dict[int, int] = {}

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> Timed[Completions]:
        self.calls.append(list(requests))
        rows, log_probs, versions = [], [], []
        for request in requests:
            first = request.prompt_token_ids[0]
            turn = self._turns[first] = self._turns.get(first, -1) + 1
            row = self.scripts[first][turn][: request.max_tokens]
            rows.append(row)
            log_probs.append([-(turn + 1) / 8] * len(row) + [0.0] * (WIDTH - len(row)))
            versions.append([10 + turn] * len(row) + [-1] * (WIDTH - len(row)))
        completions = Completions(
            responses=torch.tensor([row + [0] * (WIDTH - len(row)) for row in rows]),
            response_lengths=torch.tensor([len(row) for row in rows]),
            rollout_log_probs=torch.tensor(log_probs),
            policy_versions=torch.tensor(versions),
            finished=torch.tensor([row[-1] == self.end for row in rows]),
            batch_size=[len(rows)],
        )
        return Timed(completions, 0.25)


def options(max_tokens: int = 60) -> SamplingOptions:
    return SamplingOptions(1.0, 1.0, -1, max_tokens, (0,))


def converse(tokenizer: Any, scripts: list[list[list[int]]], max_tokens: int = 60, **config: Any) -> Any:
    """Conversations whose prompt is one token, their number; returns the engines and the completions."""
    engines = ScriptedEngines(dict(enumerate(scripts)), tokenizer.eos_token_id)
    multi_turn = MultiTurnConfig(enable=True, tools=["calculator"], **{"format": "tag", **config})
    loop = AgentLoop(tokenizer, multi_turn, {})
    requests = [GenerationRequest([index], seed=100 + index) for index in range(len(scripts))]
    answer = loop.generate(requests, options(max_tokens), engines.generate)
    assert answer.busy_seconds == 0.25 * len(engines.calls)
    return engines, answer.result


def test_a_call_its_answer_and_the_turn_after_it(tokenizer: Any) -> None:
    """The call writes 12 as two tokens, which tokenising its text would make one: the next prompt keeps the two."""
    call = ids(tokenizer, "<tool>1", "2+3</tool>", END)
    assert call != ids(tokenizer, "<tool>12+3</tool>", END)
    said = ids(tokenizer, "15", END)
    engines, completions = converse(tokenizer, [[call, said]])
    answer = ids(tokenizer, "15=")
    assert [request.prompt_token_ids for turn in engines.calls for request in turn] == [[0], [0, *call, *answer]]
    length = len(call + answer + said)
    assert completions.response_lengths.tolist() == [length]
    assert completions.responses[0, :length].tolist() == call + answer + said
    mask = [True] * len(call) + [False] * len(answer) + [True] * len(said) + [False] * (WIDTH - length)
    assert completions.response_mask.tolist() == [mask]
    log_probs = [-1 / 8] * len(call) + [0.0] * len(answer) + [-2 / 8] * len(said) + [0.0] * (WIDTH - length)
    assert completions.rollout_log_probs.tolist() == [log_probs]
    versions = [10] * len(call) + [-1] * len(answer) + [11] * len(said) + [-1] * (WIDTH - length)
    assert completions.policy_versions.tolist() == [versions]
    assert (completions.num_turns.tolist(), completions.tool_calls.tolist(), completions.finished.tolist()) == ([4], [1], [True])


def test_tokens_and_mask_reach_the_rollout_batch_as_they_are(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1", "2*2</tool>", END), ids(tokenizer, "24", END)
    _, completions = converse(tokenizer, [[call, said], [said]])
    rollouts = build_rollout_batch([[0], [1]], [0, 1], completions, pad_token_id=tokenizer.pad_token_id)
    length = int(rollouts.tokens.response_lengths[0])
    assert rollouts.tokens.responses[0, :length].tolist() == call + ids(tokenizer, "24=") + said
    assert rollouts.tokens.responses[1, 3:].unique().tolist() == [tokenizer.pad_token_id]
    assert torch.equal(rollouts.response_mask, completions.response_mask)
    assert rollouts.num_turns.tolist() == [4, 2]
    assert rollouts.tool_calls.tolist() == [1, 0]


def test_conversations_that_go_on_share_a_call_and_keep_their_places(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    engines, completions = converse(tokenizer, [[call, said], [said], [call, call, said]])
    assert [[r.prompt_token_ids[0] for r in turn] for turn in engines.calls] == [[0, 1, 2], [0, 2], [2]]
    assert completions.num_turns.tolist() == [4, 2, 6]
    assert completions.tool_calls.tolist() == [1, 0, 2]
    assert completions.finished.all()


def test_every_turn_of_every_sample_has_a_seed_of_its_own(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    engines, _ = converse(tokenizer, [[call, call, said], [call, call, said]])
    seeds = [request.seed for turn in engines.calls for request in turn]
    assert seeds[:2] == [100, 101]
    assert len(set(seeds)) == 6
    alone, _ = converse(tokenizer, [[call, call, said]])
    assert [request.seed for turn in alone.calls for request in turn] == seeds[::2]


def test_what_follows_an_answer_has_what_is_left_of_the_limit(tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1+1</tool>", END), ids(tokenizer, "2", END)
    engines, completions = converse(tokenizer, [[call, said * 20]], max_tokens=len(call) + 2 + 3)
    assert [turn[0].max_tokens for turn in engines.calls] == [len(call) + 5, 3]
    assert completions.response_lengths.tolist() == [len(call) + 5]
    assert completions.finished.tolist() == [False]


@pytest.mark.parametrize("room", [0, 1, 2])
def test_an_answer_that_leaves_no_room_is_left_out(room: int, tokenizer: Any) -> None:
    """The answer "2=" has two tokens, and a third must fit behind it."""
    call = ids(tokenizer, "<tool>1+1</tool>", END)
    engines, completions = converse(tokenizer, [[call]], max_tokens=len(call) + room)
    assert len(engines.calls) == 1
    assert completions.response_lengths.tolist() == [len(call)]
    assert completions.response_mask.sum().tolist() == len(call)
    assert (completions.finished.tolist(), completions.num_turns.tolist()) == ([False], [2])


def test_a_turn_cut_off_inside_or_behind_a_call_is_not_answered(tokenizer: Any) -> None:
    whole = ids(tokenizer, "<tool>1+1</tool>")
    engines, completions = converse(tokenizer, [[whole[:5]], [whole]], max_tokens=len(whole))
    assert len(engines.calls) == 1
    assert completions.tool_calls.tolist() == [0, 0]
    assert completions.finished.tolist() == [False, False]


@pytest.mark.parametrize(("limit", "turns"), [({"max_assistant_turns": 2}, 2), ({"max_user_turns": 2}, 3), ({}, 4)])
def test_limits_of_turns(limit: dict[str, int], turns: int, tokenizer: Any) -> None:
    call, said = ids(tokenizer, "<tool>1</tool>", END), ids(tokenizer, "2", END)
    engines, completions = converse(tokenizer, [[call, call, call, said]], max_tokens=200, **limit)
    assert len(engines.calls) == turns
    assert completions.num_turns.tolist() == [2 * turns]
    assert completions.finished.tolist() == [turns == 4]


def test_calls_of_one_turn_are_answered_up_to_their_limit(tokenizer: Any) -> None:
    calls, said = ids(tokenizer, "<tool>1</tool><tool>2</tool><tool>3</tool>", END), ids(tokenizer, "9", END)
    for most, answers in ((1, "1="), (2, "12="), (5, "123=")):
        engines, completions = converse(tokenizer, [[calls, said]], max_tokens=100, max_parallel_calls=most)
        assert engines.calls[1][0].prompt_token_ids[1 + len(calls) :] == ids(tokenizer, answers)
        assert completions.tool_calls.tolist() == [min(most, 3)]


def test_long_answers_are_cut_and_errors_are_answers(tokenizer: Any) -> None:
    for expression, side, answer in (
        ("2**40", "middle", "10...(truncated)...76"),
        ("1/0", "middle", "er...(truncated)...ro"),
        ("2**40", "left", "(truncated)...7776"),
    ):
        call, said = ids(tokenizer, f"<tool>{expression}</tool>", END), ids(tokenizer, "9", END)
        cut = {"max_tool_response_length": 4, "tool_response_truncate_side": side}
        engines, _ = converse(tokenizer, [[call, said]], max_tokens=200, **cut)
        assert tokenizer.decode(engines.calls[1][0].prompt_token_ids[1 + len(call) :]) == answer + "="


def test_hermes_calls(tokenizer: Any) -> None:
    call = ids(tokenizer, '<tool_call>{"name": "calculator", "arguments": {"expression": "2+2"}}</tool_call>', END)
    engines, _ = converse(tokenizer, [[call, ids(tokenizer, "4", END)]], max_tokens=200, format="hermes")
    assert engines.calls[1][0].prompt_token_ids == [0, *call, *ids(tokenizer, "4=")]


def test_prompts_describe_the_tools_in_the_hermes_format_only() -> None:
    config = MultiTurnConfig(enable=True, tools=["calculator"])
    arguments = template_arguments(config, {"enable_thinking": False})
    assert arguments["enable_thinking"] is False
    assert [tool["function"]["name"] for tool in arguments["tools"]] == ["calculator"]
    assert template_arguments(config.model_copy(update={"format": "tag"}), {"a": 1}) == {"a": 1}
