"""Tokenizers and chat templates: encoding prompts, conversations, answers to turns, and training examples for
SFT."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl_rc.config.models import model_source
from verl_rc.data.episode import Opening
from verl_rc.data.records import RecordFile, check_messages

_REMOTE_CODE_PACKAGE = "transformers_modules"


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id from its ``tokenizer.json``.

    A ``tokenizer.json`` is read as it stands: ``AutoTokenizer`` of transformers 5 would replace the file's
    pre-tokenizer by that of the model's architecture, which cuts text of a custom vocabulary in the wrong
    places. Only code that comes with the model (``trust_remote_code``) takes precedence over the file.
    Without a padding token, EOS is the padding token.

    Raises ``ValueError`` when the folder, the tokenizer, its chat template or its EOS token is missing.
    """
    tokenizer = _read_tokenizer(path, trust_remote_code)
    missing = [name for name in ("chat_template", "eos_token") if not getattr(tokenizer, name)]
    if missing:
        raise ValueError(
            f"a tokenizer must have a chat template and an EOS token, but {path!r} lacks "
            f"{' and '.join(missing)}. Add them to its tokenizer_config.json, or take the instruction-tuned "
            "variant of the model."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_same_vocabulary(
    tokenizer: PreTrainedTokenizerBase, path: str, trust_remote_code: bool = False
) -> None:
    """Raise ``ValueError`` unless the teacher at ``path`` has the vocabulary of ``tokenizer``, with the same
    ids. Its output layer may have more rows."""
    policy_ids, teacher_ids = tokenizer.get_vocab(), _read_tokenizer(path, trust_remote_code).get_vocab()
    if policy_ids != teacher_ids:
        num_differences = len(policy_ids.items() ^ teacher_ids.items())
        raise ValueError(
            "a teacher scores the policy's tokens and must have its tokenizer, but that of "
            f"{path!r} has {len(teacher_ids)} tokens, that of the policy {len(policy_ids)}, and "
            f"{num_differences} pairs of token and id are in one of them alone; take a teacher of the "
            "policy's family as distillation.teacher_models.teacher_model.model_path."
        )
    source = AutoConfig.from_pretrained(model_source(path), trust_remote_code=trust_remote_code)
    rows = source.get_text_config().vocab_size
    largest_id = max(policy_ids.values())
    if rows <= largest_id:
        raise ValueError(
            f"a teacher must have a weight for each token of the policy, but {path!r} has {rows} (vocab_size "
            f"in its config.json) for ids up to {largest_id}; take a teacher of the policy's family."
        )


def _read_tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    folder = Path(path).expanduser()
    if path.startswith((".", "/", "~")) and not folder.is_dir():
        raise ValueError(
            f"model.path must be an existing folder or a hub id, got {path!r}: there is no such folder."
        )
    if folder.is_dir() and not any(folder.glob("*token*")) and not any(folder.glob("vocab*")):
        # transformers 5 would make a tokenizer of one token up
        raise ValueError(
            f"model.path must hold the model's tokenizer (tokenizer.json), and {path!r} has no such file."
        )
    source = model_source(path)
    tokenizer = _load_remote_code(source) if trust_remote_code else None
    return _load_files(source) if tokenizer is None else tokenizer


def _load_remote_code(source: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer whose class comes with the model; None when it is one of transformers' own."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
    return tokenizer if type(tokenizer).__module__.startswith(_REMOTE_CODE_PACKAGE) else None


def _load_files(source: str) -> PreTrainedTokenizerBase:
    try:
        return PreTrainedTokenizerFast.from_pretrained(source)
    except (OSError, ValueError):  # no tokenizer.json: AutoTokenizer converts what is there
        try:
            return AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"model.path must be a folder or hub id with a tokenizer (tokenizer.json), got {source!r}: "
                f"{reason}"
            ) from error


def encode_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of ``messages`` under the chat template, up to the start of the assistant's answer.

    ``template_arguments`` go to the chat template (e.g. ``{"enable_thinking": False}``).
    """
    return encode_messages(tokenizer, messages, {"add_generation_prompt": True, **(template_arguments or {})})


def encode_opening(
    tokenizer: Any, opening: Opening, template_arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of an environment's ``opening``, up to the start of the assistant's answer."""
    tools = {"tools": [dict(tool) for tool in opening.tools]} if opening.tools else {}
    return encode_prompt(tokenizer, opening.messages, {**(template_arguments or {}), **tools})


def encode_messages(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], template_arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a whole conversation under the chat template.

    Raises ``ValueError`` when the template cannot render it.
    """
    try:
        token_ids: list[int] = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=True,
            return_dict=False,
            **(template_arguments or {}),
        )
    except Exception as error:  # a template's code may raise any exception
        raise ValueError(
            f"the chat template must render {reprlib.repr(messages)}, but raised {type(error).__name__}: "
            f"{error}. Change the messages, data.apply_chat_template_kwargs, or the tokenizer's template."
        ) from error
    if not token_ids:
        raise ValueError(
            f"the chat template must render {reprlib.repr(messages)} to at least one token, but gives none."
        )
    return token_ids


# Texts of digits: every tokenizer has them, and no template writes these.
_TURNS, _ANSWER = ("518306", "518307"), "729415"


class ContinuationEncoder:
    """Encodes the messages after a turn of the assistant: the tokens between the end of the turn and the
    start of its next turn.

    Only these tokens come from text. The conversation before them stays as token ids, because retokenised
    text need not give the sampled tokens. They are found by rendering two conversations that differ in the
    assistant's text alone: what follows the text is the same in both, and begins with the stop token that
    ends the turn. So a template may render an earlier turn in another way than the last one, as Qwen3's does.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_arguments: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """``stop_token_ids``: tokens that end a turn, besides EOS."""
        self._tokenizer = tokenizer
        self._arguments = {**(template_arguments or {}), "add_generation_prompt": True}
        self._stops = {tokenizer.eos_token_id, *stop_token_ids}
        self._answering: set[str] = set()
        """Roles whose messages the template renders."""

    def require_role(self, role: str) -> None:
        """Raise ``ValueError`` unless the chat template renders an answer of ``role`` after the end of a turn
        of the assistant, whatever the turn was."""
        if role in self._answering:
            return
        answer = [{"role": role, "content": _ANSWER}]
        if _ANSWER not in self._tokenizer.decode(self._after_the_turn(answer)):
            raise ValueError(
                "for several turns the chat template must end a turn of the assistant with a stop token "
                f"({self._tokenizer.decode(sorted(self._stops))}) and render the answer of the role {role!r} "
                f"behind it, but it makes {self._rendered(answer)!r} of the turn {_TURNS[0]!r} and the "
                f"answer {_ANSWER!r}. Change the tokenizer's chat template or its stop tokens, or answer in "
                "another role."
            )
        self._answering.add(role)

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of messages that answer a turn, up to the start of the next turn.

        Raises ``ValueError`` when the template cannot render them, or drops messages of their role.
        """
        for message in messages:
            self.require_role(str(message["role"]))
        return self._after_the_turn(messages)

    def _after_the_turn(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        first, second = (self._render(turn, messages) for turn in _TURNS)
        texts = [self._tokenizer.decode(token_ids) for token_ids in (first, second)]
        if texts[0].count(_TURNS[0]) != 1 or texts[0].replace(*_TURNS) != texts[1]:
            raise ValueError(
                "for several turns the chat template must render a turn of the assistant once, and what "
                f"follows it independently of its text, but it makes {texts[0]!r} of the turn {_TURNS[0]!r} "
                f"and {texts[1]!r} of the turn {_TURNS[1]!r}. Change the tokenizer's chat template."
            )
        # Equal from the end to the turn's text; tokens at its border may hold both.
        pairs = zip(reversed(first), reversed(second), strict=False)
        same = next(number for number, (one, other) in enumerate(pairs) if one != other)
        following = first[len(first) - same :]
        ends = (index for index, token_id in enumerate(following) if token_id in self._stops)
        return following[next(ends, len(following)) + 1 :]

    def _render(self, turn: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": turn}]
        return encode_messages(self._tokenizer, [*turns, *messages], self._arguments)

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return str(self._tokenizer.decode(self._render(_TURNS[0], messages)))


@dataclass(frozen=True)
class WorkedExample:
    """A training example for SFT: a prompt and its answer."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    """Token ids of the answer, its EOS token, and the chat template's text after it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_token_ids) + len(self.answer_token_ids)


def read_worked_examples(
    files: Sequence[str], messages_key: str, tokenizer: Any, max_length: int
) -> list[WorkedExample]:
    """Read the examples of data files whose column ``messages_key`` holds chat messages that end with the
    assistant's.

    Raises ``ValueError`` naming the file or row when a file or column is missing, a conversation does not end
    with the assistant, the chat template does not continue the prompt, or an example is longer than
    ``max_length`` tokens.
    """
    examples = []
    for path in files:
        file = RecordFile(path, [messages_key], messages=messages_key)
        for index, record in enumerate(file):
            location = f"row {index} of {path}"
            messages = check_messages(record[messages_key], messages_key, location)
            examples.append(_encode(messages, tokenizer, max_length, location))
    return examples


def _encode(messages: list[dict[str, Any]], tokenizer: Any, max_length: int, location: str) -> WorkedExample:
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            "a worked example must have a question and end with an assistant message, got the roles "
            f"{[message['role'] for message in messages]} in {location}."
        )
    prompt = encode_prompt(tokenizer, messages[:-1])
    token_ids = encode_messages(tokenizer, messages)
    if token_ids[: len(prompt)] != prompt or len(token_ids) == len(prompt):
        raise ValueError(
            "the chat template must render a conversation as its prompt followed by the answer, but in "
            f"{location} the prompt is {tokenizer.decode(prompt)!r} and the conversation "
            f"{tokenizer.decode(token_ids)!r}. Change the tokenizer's chat template."
        )
    if len(token_ids) > max_length:
        raise ValueError(
            f"an example must have at most data.max_length={max_length} tokens, got {len(token_ids)} in "
            f"{location}. Raise the limit or remove the row."
        )
    return WorkedExample(prompt, token_ids[len(prompt) :])
