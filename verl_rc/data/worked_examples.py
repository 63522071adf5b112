"""Worked examples for supervised training: tokenised conversations of which only the last answer is learnt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_rc.data.records import RecordFile, check_messages
from verl_rc.data.tokenize import encode_messages, encode_prompt


@dataclass(frozen=True)
class WorkedExample:
    """A prompt and the answer to learn."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    """The answer and what the chat template puts behind it, the end token first of all."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_token_ids) + len(self.answer_token_ids)


def read_worked_examples(files: Sequence[str], messages_key: str, tokenizer: Any, max_length: int) -> list[WorkedExample]:
    """Examples of data files whose column ``messages_key`` holds chat messages that end with the assistant's.

    Raises ``ValueError`` naming the file or row when a file or column is missing, a conversation does not end with the
    assistant, the chat template does not continue the prompt, or an example is longer than ``max_length`` tokens.
    """
    examples = []
    for path in files:
        file = RecordFile(path, [messages_key])
        for index in range(len(file)):
            where = f"row {index} of {path}"
            messages = check_messages(file[index][messages_key], messages_key, where)
            examples.append(_encode(messages, tokenizer, max_length, where))
    return examples


def _encode(messages: list[dict[str, Any]], tokenizer: Any, max_length: int, where: str) -> WorkedExample:
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            "a worked example must have a question and end with an assistant message, got the roles "
            f"{[message['role'] for message in messages]} in {where}."
        )
    prompt = encode_prompt(tokenizer, messages[:-1])
    whole = encode_messages(tokenizer, messages)
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        raise ValueError(
            "the chat template must render a conversation as its prompt followed by the answer, but in "
            f"{where} the prompt is {tokenizer.decode(prompt)!r} and the whole {tokenizer.decode(whole)!r}. Change the "
            "tokenizer's chat template."
        )
    if len(whole) > max_length:
        raise ValueError(
            f"an example must have at most data.max_length={max_length} tokens, got {len(whole)} in {where}. Raise the "
            "limit or remove the row."
        )
    return WorkedExample(prompt, whole[len(prompt) :])
