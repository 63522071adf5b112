"""What a terminal or a page shows of texts that others have written."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_rc.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m\x85", r"\x9b31m\x85"),
        ("over\rwritten\b\x7f\0", r"over\rwritten\x08\x7f\x00"),
        ("a\u202eb\u2066c\u200fd\u061ce", r"a\u202eb\u2066c\u200fd\u061ce"),
        ("a\u2028b\ud800", r"a\u2028b\ud800"),
        ("two\n\tlines, Ä, 数, 🙂, \\x1b", "two\n\tlines, Ä, 数, 🙂, \\x1b"),
        ("", ""),
    ],
)
def test_codes_are_shown_and_letters_stay(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_every_code_of_a_terminal_is_shown() -> None:
    controls = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\t", "\n"}
    assert all(printable(code).isascii() and printable(code).isprintable() for code in controls)


@pytest.mark.parametrize(
    "entry",
    [
        "run_with_config(RunConfig, fail, 'x')",
        "SUBCOMMANDS['doctor'] = replace(SUBCOMMANDS['doctor'], run=fail); main(['doctor', 'a=1'])",
    ],
)
def test_an_exception_that_ends_a_process_is_printable(entry: str, tmp_path: Path) -> None:
    program = f"""
import sys
from dataclasses import replace
from verl_rc.cli import SUBCOMMANDS, main
from verl_rc.config import load
from verl_rc.config.load import run_with_config
from verl_rc.config.run import RunConfig

load._load = lambda schema, options: None
load._checked = lambda config: config
sys.argv[1:] = []

def fail(options):
    raise KeyError("\x1b[2J") from ValueError("said \x1b[31m\u202e")

{entry}
"""
    root = Path(__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert r"ValueError: said \x1b[31m\u202e" in ended.stderr
    assert "KeyError: '\\x1b[2J'" in ended.stderr
    assert "\x1b" not in ended.stderr
