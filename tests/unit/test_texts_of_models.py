"""What reads a model's text takes time by its length, not by the square: one response must not hang a run."""

import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import get_args

import pytest

from verl_rc.algorithm.rewards import dispatch, scorers, words
from verl_rc.config.rejection_rules import _NUMBER as NUMBER_OF_A_RULE
from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.insight.run_folder import foreign
from verl_rc.records.episode import Turn
from verl_rc.runtime.rollout.environments.chat import assistant_message
from verl_rc.runtime.rollout.tool_environment import _bodies, choose_parser, truncate_text
from verl_rc.runtime.rollout.tools import CALCULATOR, ToolError, evaluate_expression

SIZES = (10_000, 100_000, 1_000_000)
SMALLER_SIZES = (1_000, 10_000, 100_000)
"""Of what runs in a process with a time limit, and takes seconds for a million characters."""
FACTOR, FLOOR_SECONDS = 30, 0.2
"""Of ten times the text: a square would be 100."""
ENDING = "x"
"""Of no expression, so that none may match to the end of a text."""
B = "\\"
MATHEMATICS = [
    *(("", marker) for marker in (" ", "{", B, B + "boxed{", B + "fbox ", B + "text{", B + "text ")),
    *(("", marker) for marker in (",", "and ", B + " ", "a-", "1,", "%", B + "begin{", B + "{", "~", "é")),
    *((B + "boxed{", marker) for marker in ("1", " ", "{", ",", "(", B + "text{a}")),
    *((B + "text{", marker) for marker in (" ", ",", "or ", "a", "1.")),
    *(("1", marker) for marker in (" ", "\n", B + " ", " 1", " cm")),
]
"""What a text begins with, and what it repeats."""
NUMBERS = [
    *(("", marker) for marker in ("#", "####", "#### ", "####1", "#### $ ", "=", " ")),
    *(("####", marker) for marker in (" ", "\n", "$", " $", "1", ",", "-")),
    *(("#### 1", marker) for marker in (" ", ",111", ".", "1", "/", " -", B + "frac", "e")),
]
CALLS = [
    *(("", marker) for marker in ("<tool_call>", "<tool>", "</tool_call>", "<tool_call>{}</tool_call>")),
    *(("", marker) for marker in ("<", "<tool></tool>", "<tool_call></tool>", " ")),
    *(('<tool_call>{"name": "a", "arguments": ', marker) for marker in ("{", "[", "1", '"', '{"a":', B)),
]
CONSOLE = [("", "step:1"), ("step:", "1"), ("step:1 - a:", "1"), ("step:1 - a:", "np."), ("step:1", " - a:1")]


def console(text: str) -> None:
    line = foreign._CONSOLE_LINE.search(foreign._COLOUR.sub("", text))
    list(foreign._console_metrics(line[2] if line else text))


def parsers() -> list[Callable[[str], object]]:
    formats = get_args(MultiTurnConfig.model_fields["format"].annotation)
    return [choose_parser(MultiTurnConfig(format=form), {"calculator": CALCULATOR}) for form in formats]


READERS: list[tuple[Callable[[str], object], list[tuple[str, str]]]] = [
    *(
        (lambda text, scorer=scorer: scorer(text, "4"), NUMBERS + MATHEMATICS)
        for scorer in dict.fromkeys(dispatch._SCORERS.values())
    ),
    (words.words_as_symbols, MATHEMATICS),
    (scorers._plain, MATHEMATICS),
    *((parse, CALLS) for parse in parsers()),
    (lambda text: assistant_message(Turn(0, text, (), stopped=True), [{}]), CALLS),
    (evaluate_expression, [("", "("), ("1", "+1"), ("", " ")]),
    (lambda text: truncate_text(text, 10, "middle"), [("", " ")]),
    (console, CONSOLE),
]


def seconds(read: Callable[[str], object], text: str, attempts: int = 1) -> float:
    """The least time of this thread, whatever else the machine does."""
    spent = []
    for _ in range(attempts):
        start = time.thread_time()
        with suppress(ToolError):
            read(text)
        spent.append(time.thread_time() - start)
    return min(spent)


@pytest.mark.parametrize("number", range(len(READERS)))
def test_ten_times_the_text_takes_ten_times_as_long(number: int) -> None:
    read, shapes = READERS[number]
    sizes = SMALLER_SIZES if read in (words.words_as_symbols, scorers._plain) else SIZES
    with suppress(ToolError):
        read("1")  # what is loaded once
    for prefix, marker in shapes:
        before = None
        for size in sizes:
            text = prefix + marker * (size // len(marker)) + ENDING
            spent = seconds(read, text)
            if before is not None and spent > max(FLOOR_SECONDS, FACTOR * before):
                before, spent = (
                    seconds(read, prefix + marker * (size // 10 // len(marker)) + ENDING, 3),
                    seconds(read, text, 3),
                )
                assert spent <= max(FLOOR_SECONDS, FACTOR * before), (prefix, marker, size, before, spent)
            before = spent


OLD_COMMAND_OF_SEVERAL = re.compile(rf"{words._COMMAND}\{{([^{{}}]*(?:,|\band\b|\bor\b)[^{{}}]*)\}}")
OLD_SEPARATOR = re.compile(r"((?:[,;=]|\band\b|\bor\b)(?![^{}]*(?<!\\)\}))")
OLD_NUMBER = r"\d+\.?\d*"
ALPHABETS = {
    "answers": ["####", "#", " ", "\n", "$", "1", "23", "456", ",", ".", "-", "/", "e", B + "frac", "x", "="],
    "units": [
        *(
            " ",
            "\n",
            B,
            B + " ",
            B + ",",
            B + "!",
            ":",
            "%",
            B + "%",
            B + "text{",
            "percent",
            "pct",
            "}",
            "{",
        ),
        *("^", B + "degree", "°", "1", "2", "a", "cm", "dollars", "3", "in", B + "text{ percent }", ","),
    ],
    "words": [
        *(B + "text{", B + "mathrm{", B + "text", "{", "}", B + "{", B + "}", B, ",", ";", "=", " and "),
        *(" or ", "and", "or", "a", "foo", " ", "1", "\n", "_"),
    ],
    "calls": ["<tool_call>", "</tool_call>", "<tool_call", "</tool_call", "a", "\n", "{}", "<", ">"],
    "numbers": ["1", "2", ".", "e", "-", "nan", "np.f(", ")", " ", "x"],
}


def old(new: re.Pattern[str], fast: str, slow: str) -> re.Pattern[str]:
    """An expression as it was before: the same language, in time by the square."""
    assert fast in new.pattern
    return re.compile(new.pattern.replace(fast, slow), new.flags)


def cut_before(text: str) -> list[str]:
    return OLD_SEPARATOR.split(OLD_COMMAND_OF_SEVERAL.sub(r"\1", text))


def cut_now(text: str) -> list[str]:
    return words._cut(words._TEXT.sub(words._text_of_several, text))


IGNORED_BEFORE = old(scorers._IGNORED, r"(?<!\s)(?<!\\[ ,;:!])(?<!\\(?= ))", "")
CALLS_BEFORE = re.compile("<tool_call>(.*?)</tool_call>", re.DOTALL)


@pytest.mark.parametrize(
    ("alphabet", "before", "now"),
    [
        (
            "answers",
            old(scorers._ANSWER, r"####\s*(?:\$\s*)?", r"####\s*\$?\s*").findall,
            scorers._ANSWER.findall,
        ),
        (
            "units",
            lambda text: IGNORED_BEFORE.sub("@", text),
            lambda text: scorers._IGNORED.sub("@", text),
        ),
        ("words", cut_before, cut_now),
        (
            "calls",
            CALLS_BEFORE.findall,
            lambda text: list(_bodies(text, "tool_call")),
        ),
        (
            "numbers",
            lambda text: str(old(foreign._NUMBER, r"\d+(?:\.\d*)?", OLD_NUMBER).match(text)),
            lambda text: str(foreign._NUMBER.match(text)),
        ),
        (
            "numbers",
            lambda text: str(old(NUMBER_OF_A_RULE, r"\d+(?:\.\d*)?", OLD_NUMBER).fullmatch(text)),
            lambda text: str(NUMBER_OF_A_RULE.fullmatch(text)),
        ),
    ],
)
def test_linear_readers_read_what_the_expressions_before_them_read(alphabet, before, now):
    random_numbers = random.Random(5)
    for _ in range(3000):
        pieces = random_numbers.choices(ALPHABETS[alphabet], k=random_numbers.randrange(16))
        assert now("".join(pieces)) == before("".join(pieces)), pieces
