"""Conversations for tests: with tools that are given, and the episodes of requests."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from made_samples import part
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.records.episode import TOOL_CALLS, Episode, Opening, Reply
from verl_rc.records.parts import Sample, context, num_answers, num_tokens
from verl_rc.runtime.rollout.conversation import AnsweredSample, Conversations, LocalHosts
from verl_rc.runtime.rollout.environment_host import Host, HostLimits
from verl_rc.runtime.rollout.open_request import OpenRequest
from verl_rc.runtime.rollout.sampling import SamplingOptions, next_seed
from verl_rc.runtime.rollout.tool_environment import Parser, Toolbox, ToolEnvironment
from verl_rc.runtime.rollout.tools import Tool

END = "<|im_end|>"


def tool_conversations(
    tokenizer: Any,
    config: MultiTurnConfig,
    tools: Mapping[str, Tool] | None = None,
    parse: Parser | None = None,
) -> Conversations:
    """Conversations in this process, with these tools and parser in the place of the configuration's."""
    toolbox = Toolbox(config)
    toolbox._tools = toolbox._tools if tools is None else dict(tools)
    toolbox._parse = parse or toolbox._parse
    return Conversations(tokenizer, LocalHosts(Host(lambda _: ToolEnvironment(toolbox), HostLimits())), {})


def episode(number: int, opening: Opening | None = None) -> Episode:
    return Episode((number, 0, 0), {}, number, opening)


def tool_reply(calls: int = 1) -> Reply:
    """The reply to a turn with so many calls."""
    return Reply([{"role": "tool", "content": "7"}] * calls, metrics={TOOL_CALLS: float(calls)})


def merging_tokenizer() -> Any:
    """The tiny model's, with one merge: the text "12" is one token when it is tokenised, and may be two when
    it is sampled."""
    from make_tiny_model import CHAT_TEMPLATE  # which actors that import this module do not find

    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12"]
    bpe = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[("1", "2")])
    )
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def ids(tokenizer: Any, *pieces: str) -> list[int]:
    """Token ids of pieces, each tokenised by itself."""
    return [token for piece in pieces for token in tokenizer(piece)["input_ids"]]


class ScriptedSampler:
    """Each step ends a turn of every running conversation, with the next token ids of its script.

    The log-prob of a token is -(turn + 1) / 8 and its version ``10 + turn``. A turn longer than its request
    allows is cut.
    """

    capacity = 8

    def __init__(self, scripts: dict[int, list[list[int]]], conversations: Conversations, end: int) -> None:
        self.scripts, self.end = scripts, end
        self.calls: list[SimpleNamespace] = []
        self._conversations = conversations

    def begin(self, opened: OpenRequest) -> "Future[AnsweredSample] | None":
        answers = opened.begin(self._conversations)
        if answers is not None:
            return answers
        request, so_far = opened.request.request, opened.sample
        opened.decoding = SimpleNamespace(
            number=opened.request.number,
            turn=num_answers(so_far.parts),
            prompt_token_ids=context(request.prompt_token_ids, so_far.parts),
            seed=next_seed(request.seed, so_far.parts),
            max_tokens=request.limit(opened.request.options) - num_tokens(so_far.parts),
        )
        self.calls.append(opened.decoding)
        return None

    def step(self, running: Mapping[int, OpenRequest]) -> list[tuple[OpenRequest, Any]]:
        ended = []
        for opened in running.values():
            asked = opened.decoding
            row = self.scripts[asked.number][asked.turn][: asked.max_tokens]
            turn = [part(row, 10 + asked.turn, -(asked.turn + 1) / 8)]
            ended.append((opened, opened.end_turn(self._conversations, turn, row[-1] == self.end)))
        return ended

    def so_far(self, opened: OpenRequest) -> Sample:
        return opened.sample

    def drop(self, requests: Sequence[OpenRequest]) -> None:
        for opened in requests:
            opened.close(self._conversations)

    def cut(self, requests: Sequence[OpenRequest]) -> None:
        raise NotImplementedError


def options(max_tokens: int = 60, end: int = 0) -> SamplingOptions:
    return SamplingOptions(1.0, 1.0, -1, max_tokens, (end,))
