"""Random overrides and run files are accepted, or refused with sentences; nothing else happens, whatever they
are."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from fuzzed_overrides import mistyped, typed
from sound_run import sound_run

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config, save_resolved_config
from verl_rc.config.paths import check_files
from verl_rc.plan.explain import plan_text

REASONS = re.compile(
    r"must|Write instead|Drop them|needs?\b|refused|not a known key|belong|cannot|no effect|drop it|pass "
    r"|write |several values"
    r"|bounds nothing|changes the sampled|can never|compares|options are|would all be equal"
)


def outcome(overrides: list[str], folder: Path) -> str:
    """What a run does with ``overrides`` before it reads a file: the accepted plan, or the message."""
    keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    try:
        config = load_run_config([*sound_run(without=keys), *overrides])
    except ConfigError as error:
        message = str(error)
        unclear = [
            line
            for line in message.splitlines()
            if not REASONS.search(line) and not line.startswith(("  ", "("))
        ]
        assert not unclear, repr(unclear)
        assert len(message) < 4000 or "Write instead" in message  # which is to be pasted, whole
        return message
    assert "Objective" in plan_text(config)
    save_resolved_config(config, folder)
    with pytest.raises(ConfigError, match="must"):  # none of the files is there
        check_files(config)
    return "accepted"


@pytest.mark.parametrize("generate", [typed, mistyped])
def test_overrides_are_accepted_or_refused_with_a_sentence(generate: Any, tmp_path: Path) -> None:
    outcomes = [outcome(generate(random.Random(seed)), tmp_path) for seed in range(100)]
    accepted = outcomes.count("accepted")
    assert generate is mistyped or accepted >= 20
    assert len(outcomes) - accepted >= 20


RUN_FILES = [
    *(
        b"",
        b"a: [",
        b"\t- x",
        b"- 1",
        b"text",
        b"7",
        b"\xff\xfe",
        b"\x00",
        b"a: 1\na: 2",
        b"? [1]\n: 2",
        b"1: 2",
        b"null: 3",
        b"&a [*a]",
    ),
    *(
        b"data: 7",
        b"data: []",
        b"data:\n  train_files: {a: 1}",
        b"data.seed: 3",
        b"trainer:\n  seed: !!python/name:os.system",
    ),
    *(
        b"defaults: [nope]",
        b"defaults: 3",
        b"defaults: [{a: b}]",
        b"trainer: ${nope}",
        b"trainer:\n  seed: ${oc.env:NOPE}",
        b"_target_: x",
    ),
    *(
        b"algorithm:\n  rollout_correction:\n    preset: [1]",
        b"algorithm:\n  rollout_correction: 3",
        b"hydra: {}",
        b"a: " + b"[" * 3000,
    ),
]


@pytest.mark.parametrize("content", RUN_FILES, ids=lambda content: repr(content[:40]))
def test_run_files_are_read_or_refused_with_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    try:
        load_run_config([f"--config-dir={tmp_path}", "--config-name=mine", *sound_run()])
    except ConfigError as error:
        message = str(error)
    else:
        message = "accepted"
    assert message == "accepted" or REASONS.search(message), message


@pytest.mark.chaos
@pytest.mark.parametrize("generate", [typed, mistyped])
def test_many_overrides(generate: Any, tmp_path: Path) -> None:
    for seed in range(100, 4000):
        outcome(generate(random.Random(seed)), tmp_path)
