"""Words among mathematics, for math-verify, which reads ``listen`` as a product of six variables."""

import hashlib
import re
from functools import cache

_LETTER = r"[^\W\d_]"
_BLANK = r"(?:\s|~|\\[ ,;:!])"
_COMMAND = r"\\(?:text(?:normal|bf|it|rm|sf|tt)?|math(?:rm|it|bf|sf|tt)|mbox|emph|operatorname\*?)\s*"
_TEXT = re.compile(rf"{_COMMAND}\{{([^{{}}]*)\}}")
_TEXT_AT_END = re.compile(rf"(\S?)\s*{_TEXT.pattern}(?:\^\{{?\d\}}?)?$")
_SEPARATOR_IN_TEXT = re.compile(r",|\band\b|\bor\b")
_SEPARATOR = re.compile(r"[,;=]|\band\b|\bor\b")
_BETWEEN_BRACES = re.compile(r"[^{}]+")
_PHRASE = rf"{_LETTER}+(?:(?:{_BLANK}|[-'’.])+{_LETTER}+)*"
_LETTERS_ALONE = re.compile(rf"((?:{_BLANK}|[(\[]|\\\{{)*)({_PHRASE})((?:{_BLANK}|[.)\]]|\\\}})*)")
_OF_NO_FORMULA = r"[^\W\d_a-zA-Zα-ωΑ-Ω]"
_WORD_ALONE = re.compile(rf"{_LETTER}{{3}}|(?i:{_LETTER}[eiou]|[eiou]{_LETTER})|{_OF_NO_FORMULA}")
_WORD_AMONG_SIGNS = re.compile(rf"{_LETTER}{{4}}")
_RUN = re.compile(
    rf"\\(?:begin|end)\s*\{{[^{{}}]*\}}|{_TEXT.pattern}|\\[a-zA-Z]+|(?P<letters>{_LETTER}{{4,}})"
)
_KNOWN = ("sqrt", "inf", "infty", "infinity")
"""Names that math-verify reads."""
_VARIABLE_AT_END = re.compile(
    r"(?:(?<=[0-9}])|(?<=[^0-9\s]\s))(?!(?:kg|gm|km|dm|cm|mm|ft|lb|hr|yr)$)[a-df-hj-z]{1,2}$|(?<=\s)(?:ab|bc)$"
)
"""Letters at the end of a text that math-verify would take off as a unit, but for those that are one."""


def words_as_symbols(text: str) -> str:
    """``text`` with one symbol for each word, the same in every case, font and spacing.

    A part of ``text`` (between commas, equals signs, "and", "or") that is letters alone is a word when three
    letters stand together, or two with an e, i, o or u; ``xy`` is a product. A part with digits or signs has
    words of four letters. What math-verify takes off as a unit behind a number stays, but for variables:
    ``2t`` is not 2.
    """
    *parts, last = _cut(_TEXT.sub(_text_of_several, text.strip()))
    separated = zip(parts[::2], parts[1::2], strict=True)
    return "".join(_part(part) + separator for part, separator in separated) + _last_part(last)


def _text_of_several(command: re.Match[str]) -> str:
    return command[1] if _SEPARATOR_IN_TEXT.search(command[1]) else command[0]


def _cut(text: str) -> list[str]:
    r"""The parts of ``text`` with the separators between them; none inside braces (those of a set are ``\\{``
    and ``\\}``)."""
    pieces, start = [], 0
    for run in _BETWEEN_BRACES.finditer(text):
        if text.startswith("}", run.end()) and not run[0].endswith("\\"):
            continue
        for separator in _SEPARATOR.finditer(text, *run.span()):
            pieces += [text[start : separator.start()], separator[0]]
            start = separator.end()
    return [*pieces, text[start:]]


def _last_part(part: str) -> str:
    part = re.sub(r"\s+", " ", part)
    unit = _TEXT_AT_END.search(part) or _load_units().search(part)
    variable = _VARIABLE_AT_END.search(part)
    if _word_alone(part):
        return _part(part)
    if variable:
        return f"{_part(part[: variable.start()])}{{{variable[0]}}}"
    if unit and re.search(r"[0-9)}]\s*$", part[: unit.end(1)]):
        return _part(part[: unit.end(1)]) + part[unit.end(1) :]
    return _part(part)


def _part(part: str) -> str:
    alone = _word_alone(part)
    return f"{alone[1]}{_symbol(alone[2])}{alone[3]}" if alone else _RUN.sub(_symbol_of_run, part)


def _word_alone(part: str) -> re.Match[str] | None:
    """The match of ``_LETTERS_ALONE`` if ``part`` is words and nothing else."""
    alone = _LETTERS_ALONE.fullmatch(_TEXT.sub(r"\1", part))
    if alone is None or alone[2] in _KNOWN:
        return None
    word = _WORD_AMONG_SIGNS if "-" in alone[2] else _WORD_ALONE
    return alone if word.search(alone[2]) else None


def _symbol_of_run(run: re.Match[str]) -> str:
    word = run["letters"] or run[1] or ""
    return _symbol(word) if word not in _KNOWN and _WORD_AMONG_SIGNS.search(word) else run[0]


def _symbol(words: str) -> str:
    """A variable whose index is a number made from the words: no rule of math-verify changes it."""
    letters = re.sub(rf"{_BLANK}+", "", words).casefold()
    number = int.from_bytes(hashlib.blake2b(letters.encode(), digest_size=8).digest(), "big")
    return f"w_{{{number}}}"


@cache
def _load_units() -> re.Pattern[str]:
    from latex2sympy2_extended.math_normalization import units_regex  # noqa: PLC0415  (loads sympy)

    pattern: re.Pattern[str] = units_regex
    return pattern
