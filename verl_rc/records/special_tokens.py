"""Texts of tools and environments as tokens, none of them a special token such as the end of a turn."""

from collections.abc import Mapping, Sequence
from typing import Any

_MARKS = range(0xE000, 0xF900)
"""Characters of private use."""
_MOST_PASSES = 100
_ALLOW = "Write it in another way, or pass actor_rollout_ref.rollout.allow_special_tokens=True."


class SpecialTokenError(ValueError):
    """A text of a tool or an environment would become a special token."""


class SpecialTokens:
    """The special tokens of a tokenizer, which only the chat template may write.

    Where a text spells one, ``<|im_end|>``, ``cut`` puts a mark into it, and ``tokenize`` makes the tokens of
    its two halves, which decode to the text again. Texts that spell none have the tokens that the tokenizer
    makes of them.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int] = ()) -> None:
        """``stop_token_ids``: tokens that count as special if the tokenizer finds them before it cuts a text
        into words."""
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._texts = {
            number: token.content
            for number, token in added.items()
            if token.special or number in (*stop_token_ids, tokenizer.eos_token_id)
        }
        # Other texts than its own become the unknown token, too.
        self._counted = self._texts.keys() - {tokenizer.unk_token_id}
        self._knife = next(
            (
                number
                for number, text in self._texts.items()
                if len(text) > 1 and not added[number].single_word and not added[number].normalized
            ),
            None,
        )

    def cut(self, value: Any) -> tuple[Any, str]:
        """Messages, or what else a chat template reads, with a mark in each special token that a text spells,
        and the mark; it is empty where none does.

        Raises ``SpecialTokenError`` for a special token that cannot be cut.
        """
        texts = "".join(_texts(value))
        if not any(text in texts for text in self._texts.values()):
            return value, ""
        mark = next(chr(code) for code in _MARKS if chr(code) not in texts)
        return self._cut(value, mark), mark

    def _cut(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._cut_text(value, mark)
        if isinstance(value, Mapping):
            return {
                key if str(key).isidentifier() else self._cut(key, mark): self._cut(entry, mark)
                for key, entry in value.items()
            }
        return [self._cut(entry, mark) for entry in value] if isinstance(value, list | tuple) else value

    def _cut_text(self, text: str, mark: str) -> str:
        for _ in range(_MOST_PASSES):  # a special token may hide another one that overlaps it
            spelt = {name for name in self._texts.values() if name in text}
            if not spelt:
                return text
            if any(len(name) == 1 for name in spelt):
                break
            for name in spelt:
                text = text.replace(name, f"{name[0]}{mark}{name[1:]}")
        raise SpecialTokenError(
            "a tool or an environment must spell no special token that cannot be cut, but it spells "
            f"{sorted(spelt)}. {_ALLOW}"
        )

    def tokenize(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered conversation whose messages ``cut`` has marked."""
        if not mark or mark not in text:
            return self._ids(text)
        if self._knife is None:
            raise SpecialTokenError(
                f"the tokenizer has no special token that can cut others, which a reply spells. {_ALLOW}"
            )
        # A special token is where the tokenizer cuts a text: it stands at every mark, and is taken out again.
        knife = self._texts[self._knife]
        parts = text.split(mark)
        token_ids = self._ids(knife.join(parts))
        own, place = set(), 0
        for part in parts[:-1]:
            place += part.count(knife)
            own.add(place)
            place += 1
        places = [index for index, token in enumerate(token_ids) if token == self._knife]
        if len(places) != place + parts[-1].count(knife):
            raise SpecialTokenError(f"the tokenizer must find each {knife!r} of {text!r:.500}, but does not.")
        cuts = {places[number] for number in own}
        return [token for index, token in enumerate(token_ids) if index not in cuts]

    def _ids(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_ids

    def count(self, token_ids: Sequence[int]) -> int:
        """Number of special tokens."""
        return sum(token in self._counted for token in token_ids)

    def require_no_more(self, token_ids: Sequence[int], neutral: Sequence[int]) -> None:
        """Raise ``SpecialTokenError`` when messages have more special tokens than those of harmless contents,
        as where a template joins texts to one."""
        if self.count(token_ids) > self.count(neutral):
            raise SpecialTokenError(
                f"a tool or an environment must write no special tokens, but its messages make "
                f"{self.count(token_ids)} of them, and others {self.count(neutral)}. {_ALLOW}"
            )


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = [*(key for key in value if not str(key).isidentifier()), *value.values()]
    return [text for entry in value for text in _texts(entry)] if isinstance(value, list | tuple) else []
