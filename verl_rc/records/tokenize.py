"""Tokenizers and chat templates: encoding prompts, conversations, answers to turns, and training examples for
SFT."""

import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl_rc.config.models import model_source
from verl_rc.records.episode import Opening
from verl_rc.records.image_reader import ImageReader, with_pictures
from verl_rc.records.pictures import Pictures
from verl_rc.records.records import RecordFile, check_messages
from verl_rc.records.special_tokens import SpecialTokens
from verl_rc.records.unread import MEDIA

_REMOTE_CODE_PACKAGE = "transformers_modules"
_SHOWN_CHARACTERS = 200


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
            "policy's family in distillation.teacher_models."
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
    tokenizer: Any,
    opening: Opening,
    template_arguments: Mapping[str, Any] | None = None,
    allow_special_tokens: bool = False,
) -> list[int]:
    """Token ids of an environment's ``opening``, up to the start of the assistant's answer.

    Unless ``allow_special_tokens``, special tokens that its texts spell become ordinary tokens. Raises
    ``ValueError`` where they cannot.
    """
    special = None if allow_special_tokens else SpecialTokens(tokenizer)
    texts = {"messages": list(opening.messages), "tools": list(opening.tools)}
    mark = ""
    if special is not None:
        texts, mark = special.cut(texts)
    tools = {"tools": [dict(tool) for tool in texts["tools"]]} if texts["tools"] else {}
    arguments = {"add_generation_prompt": True, **(template_arguments or {}), **tools}
    token_ids = encode_messages(tokenizer, texts["messages"], arguments, special, mark)
    if special is not None:
        neutral = _render(tokenizer, _with_contents(texts["messages"], "x"), arguments)
        special.require_no_more(token_ids, special.tokenize(neutral, mark))
    return token_ids


def encode_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_arguments: Mapping[str, Any] | None = None,
    special: SpecialTokens | None = None,
    mark: str = "",
) -> list[int]:
    """Token ids of a whole conversation under the chat template. ``special`` has put ``mark`` into it.

    Raises ``ValueError`` when the template cannot render it, or leaves out a message that is not the
    assistant's.
    """
    text = _render_whole(tokenizer, messages, template_arguments or {})
    token_ids = _tokenize(tokenizer, text) if special is None else special.tokenize(text, mark)
    if not token_ids:
        raise ValueError(
            f"the chat template must render {reprlib.repr(messages)} to at least one token, but gives none."
        )
    return token_ids


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered conversation, or of its end from a special token on."""
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return token_ids


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
    """The chat template's text. Raises ``ValueError`` when the template raises."""
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, **arguments
        )
    except Exception as error:  # a template's code may raise any exception
        raise ValueError(
            f"the chat template must render {reprlib.repr(messages)}, but raised {type(error).__name__}: "
            f"{error}. Change the messages, data.apply_chat_template_kwargs, or the tokenizer's template."
        ) from error
    return text


def _render_whole(tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
    """The chat template's text. Raises ``ValueError`` when it would be the same with another content of a
    message; the assistant's own may be shortened (as thinking of earlier turns is)."""
    text = _render(tokenizer, messages, arguments)
    for index, message in enumerate(messages):
        if message.get("role") == "assistant" or _first_lost([message], text) is None:
            continue
        # A template may rewrite a content (such as switches in a system message), as long as it reads it.
        others = list(messages)
        probe = _PROBE if isinstance(message["content"], str) else [{"type": "text", "text": _PROBE}]
        others[index] = {**message, "content": message["content"] + probe}
        if _render(tokenizer, others, arguments) == text:
            raise ValueError(
                f"the chat template must render every message of a prompt, but leaves out {message}. Drop "
                "the message, write its text into one of another role, or change the tokenizer's chat "
                "template."
            )
    return text


def _first_lost(messages: Sequence[Mapping[str, Any]], text: str) -> Mapping[str, Any] | None:
    """The first message whose content is not in ``text`` behind those of the messages before it. None if
    there is none. Templates may drop spaces around a content, and write it as JSON."""
    position = 0
    for message in messages:
        for content in _texts(message):
            for form in _forms(content.strip()):
                if (start := text.find(form, position)) >= 0:
                    position = start + len(form)
                    break
            else:
                return message
    return None


def _texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message, which may have pictures between them."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or () if part.get("type") == "text"]


def _forms(content: str) -> Iterator[str]:
    yield content
    for ascii_only in (False, True):
        yield json.dumps(content, ensure_ascii=ascii_only)[1:-1]


_PROBE = "\n".join(f'  {number}: The "Answer" is <b>-{number}.5</b> & {{c}}, não\\' for number in range(20))
"""A content that a template which shortens or rewrites contents does not leave as it is."""
_QUESTION = ({"role": "user", "content": "x"},)
_PAST_TURN = {"role": "assistant", "content": "y"}
_TURNS = (
    "first",
    "<think>\nsecond\n</think>\n\nthird",
    '<tool_call>\n{"name": "fourth", "arguments": {}}\n</tool_call>',
)
"""Texts of a turn with different ends, on which nothing that follows may depend."""


def _with_contents(messages: Sequence[Mapping[str, Any]], content: str) -> list[dict[str, Any]]:
    """The messages with other contents."""
    return [
        {**message, "content": content} if message.get("content") else dict(message) for message in messages
    ]


class ContinuationEncoder:
    """Encodes the messages after a turn of the assistant: the tokens between the stop token that ended it and
    the start of its next turn.

    Only these tokens come from text. The conversation before them stays as token ids, because retokenised
    text need not give the sampled tokens. The template may render the turn itself in any way, also in another
    one than if it were the last message: what follows is where renderings with different turns agree.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_arguments: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
        allow_special_tokens: bool = False,
    ) -> None:
        """``stop_token_ids``: tokens that end a turn, besides EOS. ``allow_special_tokens``: those that
        replies spell; else they become ordinary tokens."""
        self._tokenizer = tokenizer
        self._special = None if allow_special_tokens else SpecialTokens(tokenizer, stop_token_ids)
        self._arguments = {**(template_arguments or {}), "add_generation_prompt": True}
        texts = tokenizer.convert_ids_to_tokens([tokenizer.eos_token_id, *stop_token_ids])
        self._stop_tokens = list(dict.fromkeys(text for text in texts if text))
        self._before: Sequence[Mapping[str, Any]] = _QUESTION
        self._tried: dict[tuple[tuple[str, ...], ...], list[int]] = {}

    def behind(
        self,
        prompt: Sequence[Mapping[str, Any]],
        replies: Iterable[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> "ContinuationEncoder":
        """The encoder behind a conversation: a ``prompt`` (empty: a question) with ``tools``, and a turn
        before each of the ``replies``.

        What a template writes may depend on them, such as a thinking mode that the system message sets.
        """
        other = copy(self)
        other._before = [*(prompt or _QUESTION), *(m for reply in replies for m in (_PAST_TURN, *reply))]
        if tools:
            other._arguments = {**self._arguments, "tools": [dict(tool) for tool in tools]}
        return other

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of messages that answer the turn, up to the start of the next turn.

        Raises ``ValueError`` when they depend on the turn, lack what a message says, or hold special tokens
        that a message spells.
        """
        kind = tuple((message["role"], *sorted(message)) for message in messages)
        if kind not in self._tried:  # a short content could be in the template's own text by chance
            probes = [{**message, "content": f"{index}{_PROBE}"} for index, message in enumerate(messages)]
            self._tried[kind] = self._tokens(*self._following(probes))
        if self._special is None:
            return self._tokens(*self._following(messages))
        marked, mark = self._special.cut(list(messages))
        token_ids = self._tokens(*self._following(marked), mark)
        if self._special.count(token_ids) > self._special.count(self._tried[kind]):
            neutral = self._tokens(*self._following(_with_contents(marked, "x")), mark)
            self._special.require_no_more(token_ids, neutral)
        return token_ids

    def _tokens(self, stop: str, text: str, mark: str = "") -> list[int]:
        # From a special token on, text is tokenised as it is within the conversation.
        text = stop + text
        token_ids = self._special.tokenize(text, mark) if self._special else _tokenize(self._tokenizer, text)
        return token_ids[token_ids.index(self._tokenizer.convert_tokens_to_ids(stop)) + 1 :]

    def require_roles(self, roles: Sequence[str]) -> None:
        """Raise ``ValueError`` when a reply of messages of these ``roles`` could not be encoded."""
        self.encode([{"role": role, "content": "x"} for role in roles])

    def _following(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """The stop token at the end of the turn, and the text behind it."""
        texts = [
            _render(
                self._tokenizer,
                [*self._before, {"role": "assistant", "content": turn}, *messages],
                self._arguments,
            )
            for turn in _TURNS
        ]
        shared = _shared_end(texts)
        start, stop = min(
            ((start, token) for token in self._stop_tokens if (start := shared.find(token)) >= 0),
            default=(0, None),
        )
        if stop is None:
            raise ValueError(
                "for several turns the chat template must end an assistant's turn with the EOS token or "
                f"another stop token ({', '.join(self._stop_tokens)}) and render what follows alike after "
                f"every text of the turn, but it makes {_shown(texts[0])} of one and {_shown(texts[1])} of "
                "another. Change the tokenizer's chat template, its EOS token, or eos_token_id in "
                "generation_config.json."
            )
        following = shared[start + len(stop) :]
        lost = _first_lost(messages, following)
        if lost is not None or shared in texts or not following:
            raise ValueError(
                "for several turns the chat template must render a reply after the turns before it, with all "
                f"that it says, but of a message of the role {(lost or messages[0])['role']!r} it makes "
                f"{_shown(shared)}. Change the tokenizer's chat template, or let the environment answer in "
                "another role."
            )
        return stop, following


def _shared_end(texts: Sequence[str]) -> str:
    """The longest end that all ``texts`` have."""
    columns = zip(*(reversed(text) for text in texts), strict=False)
    length = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return texts[0][len(texts[0]) - length :]


def _shown(text: str) -> str:
    """The end of a rendered conversation, for messages."""
    text = text.replace(_PROBE, "…")
    return repr(text if len(text) <= _SHOWN_CHARACTERS else "…" + text[-_SHOWN_CHARACTERS:])


@dataclass(frozen=True)
class WorkedExample:
    """A training example for SFT: a prompt and its answer."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    """Token ids of the answer, its EOS token, and the chat template's text after it."""
    pictures: Pictures | None = None
    """Those of the prompt. None if it has none."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_token_ids) + len(self.answer_token_ids)


def read_worked_examples(
    files: Sequence[str],
    messages_key: str,
    tokenizer: Any,
    max_length: int,
    image_key: str = "images",
    reader: ImageReader | None = None,
) -> list[WorkedExample]:
    """Read the examples of data files whose column ``messages_key`` holds chat messages that end with the
    assistant's. ``reader`` reads the pictures of column ``image_key``. None if the model reads none.

    Raises ``ValueError`` naming the file or row when a file or column is missing, a conversation does not end
    with the assistant, the chat template does not continue the prompt, or an example is longer than
    ``max_length`` tokens.
    """
    examples = []
    for path in files:
        pictures_key = [] if reader is None and image_key in MEDIA else [image_key]
        file = RecordFile(path, [messages_key], pictures_key, messages=messages_key)
        for index, record in enumerate(file):
            location = f"row {index} of {path}"
            messages = check_messages(record[messages_key], messages_key, location)
            try:
                messages, pictures = with_pictures(messages, record.get(image_key), reader, Path(path).parent)
                if not isinstance(messages[-1]["content"], str):
                    raise ValueError("an answer has text alone: write <image> into the question")
            except ValueError as error:
                raise ValueError(f"{location}: {error}.") from error
            example = _encode(messages, tokenizer, location)
            if pictures is not None and reader is not None:
                example = _expanded(example, pictures, reader, location)
            if example.num_tokens > max_length:
                raise ValueError(
                    f"an example must have at most data.max_length={max_length} tokens, got "
                    f"{example.num_tokens} in {location}. Raise the limit or remove the row."
                )
            examples.append(example)
    return examples


def _expanded(
    example: WorkedExample, pictures: Pictures, reader: ImageReader, location: str
) -> WorkedExample:
    try:
        prompt = reader.expand(example.prompt_token_ids, pictures)
    except ValueError as error:
        raise ValueError(f"{location}: {error}.") from error
    return WorkedExample(prompt, example.answer_token_ids, pictures)


def _encode(messages: list[dict[str, Any]], tokenizer: Any, location: str) -> WorkedExample:
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise ValueError(
            "a worked example must have a question and end with an assistant message, got the roles "
            f"{[message['role'] for message in messages]} in {location}."
        )
    prompt_text = _render_whole(tokenizer, messages[:-1], {"add_generation_prompt": True})
    text = _render_whole(tokenizer, messages, {})
    prompt, token_ids = _tokenize(tokenizer, prompt_text), _tokenize(tokenizer, text)
    if token_ids[: len(prompt)] != prompt or len(token_ids) == len(prompt):
        raise ValueError(
            "the chat template must render a conversation as its prompt followed by the answer, but in "
            f"{location} the prompt is {prompt_text!r} and the conversation {text!r}. Change the tokenizer's "
            "chat template."
        )
    # A template may set thinking off by other spaces, and its tag may be the end of the prompt.
    answer, whole = _without_spaces(messages[-1]["content"]), _without_spaces(text)
    if whole.rfind(answer) + len(answer) <= len(_without_spaces(prompt_text)):
        raise ValueError(
            f"the chat template must render the whole answer, but in {location} it makes "
            f"{text.removeprefix(prompt_text)!r} of {messages[-1]['content']!r}. Change the tokenizer's chat "
            "template (such as one that cuts thinking off), or the answer."
        )
    return WorkedExample(prompt, token_ids[len(prompt) :])


def _without_spaces(text: str) -> str:
    return "".join(text.split())
