"""Worked examples for supervised training: tokenised conversations of which only the last answer is learnt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from verl_rc.data.tokenize import encode_messages


@dataclass(frozen=True)
class WorkedExample:
    """A prompt and the answer to learn."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]


def read_worked_examples(files: Sequence[str] | str, key: str, tokenizer: Any, max_length: int) -> list[WorkedExample]:
    """Examples of parquet files whose column ``key`` holds chat messages that end with the assistant's.

    Raises ``ValueError`` when a file or column is missing, a conversation does not end with the assistant, or one is
    longer than ``max_length`` tokens.
    """
    examples = []
    for file in [files] if isinstance(files, str) else files:
        if not Path(file).is_file():
            raise ValueError(f"data files must exist, {file!r} does not. Check data.train_files and data.val_files.")
        table = pq.read_table(file)
        if key not in table.column_names or table.num_rows == 0:
            raise ValueError(f"{file} must have rows and a column {key!r}, it has {table.num_rows} rows of {table.column_names}.")
        examples += [_encode(messages, tokenizer, max_length) for messages in table[key].to_pylist()]
    return examples


def _encode(messages: list[dict[str, str]], tokenizer: Any, max_length: int) -> WorkedExample:
    if not messages or messages[-1]["role"] != "assistant":
        raise ValueError(f"a worked example must end with an assistant message, got {str(messages)[:80]!r}.")
    prompt = encode_messages(tokenizer, messages[:-1], {"add_generation_prompt": True})
    whole = encode_messages(tokenizer, messages, {})
    if whole[: len(prompt)] != prompt:
        raise ValueError("the chat template must render a conversation as a continuation of its prompt; this one does not.")
    if len(whole) > max_length:
        raise ValueError(f"examples must be at most data.max_length={max_length} tokens, one has {len(whole)}.")
    return WorkedExample(prompt, whole[len(prompt) :])
