"""Token records written by hand: what is in them is known, so that what is read and shown can be compared
with it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_rc.records.token_records.token_parquet import write_record
from verl_rc.records.token_records.token_record import FIELDS, FOLDER, PIECES, TokenRecord, class_of

PIECES_OF_DIGITS = {0: "<eos>", **{digit + 1: str(digit) for digit in range(10)}, 11: " and", 12: "\n"}


def token_record(
    step: int, lengths: Sequence[int] = (4, 2, 3), *, gap: float = 0.1, why: str = "regular", **changed: Any
) -> TokenRecord:
    """Rows of ids that count up; the log-ratio of token j of row i is ``gap * (i + 1) * (-1)^j``.

    ``changed``: columns to replace, None to leave them out; ``facts`` are added to the facts.
    """
    rows, count = len(lengths), sum(lengths)
    of_row = np.repeat(np.arange(rows), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths]) if count else np.zeros(0, "int64")
    rollout = (-0.1 * (1 + positions % 3) - gap * rows).astype("float32")
    old = (rollout + gap * (of_row + 1) * (-1.0) ** positions).astype("float32")
    scored = np.asarray(old if changed.get("old_log_prob") is None else changed["old_log_prob"], "float64")
    tokens: dict[str, Any] = {
        "response_ids": 1 + positions % 10,
        "token_class": np.full(count, 1),
        "response_mask": np.ones(count, bool),
        "rollout_log_prob": rollout,
        "old_log_prob": old,
        "entropy": np.full(count, 0.5),
        "sum_pi_squared": (2.0 * np.exp(scored) - 0.75).astype("float32"),  # g = 0.25
        "weight": np.full(count, 1.0),
        "kept": np.ones(count, bool),
        "advantage": np.ones(count, "float32"),
        "version": np.full(count, step - 1),
    }
    columns: dict[str, Any] = {
        "row": np.arange(rows) * 2,
        "group": np.arange(rows) // 2,
        "source": np.array(["digits"] * rows, dtype=object),
        "chosen_by": np.array(
            ["worst" if row == rows - 1 else "random" for row in range(rows)], dtype=object
        ),
        "inclusion": np.array([0.0 if row == rows - 1 else 0.25 for row in range(rows)]),
        "score": np.arange(rows, dtype="float32"),
        "finished": np.ones(rows, bool),
    }
    facts: Mapping[str, Any] = {
        "trainer": "verl_rc",
        "step": step,
        "why": why,
        "current_version": step - 1,
        **changed.pop("facts", {}),
    }
    prompts = changed.pop("prompts", [np.array([11, row + 1]) for row in range(rows)])
    for name, values in changed.items():
        target = tokens if FIELDS[name].is_of_tokens else columns
        if values is None:
            del target[name]
        else:
            target[name] = np.asarray(values)
    return TokenRecord(facts, columns, np.array(lengths, dtype="int64"), tokens, prompts)


def write_tokens(
    run: Path, records: Sequence[TokenRecord], pieces: Mapping[int, str] = PIECES_OF_DIGITS
) -> Path:
    """The folder of records of a run; returns it."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        write_record(folder, record)
    entries = [[token, text, class_of(text, token == 0)] for token, text in pieces.items()]
    (folder / PIECES).write_text(json.dumps({"step": 1, "pieces": entries}) + "\n", encoding="utf-8")
    return folder
