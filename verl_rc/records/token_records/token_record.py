"""Token records, version 1: what a step computed for each token of some of its rows, of any trainer.

``FIELDS`` is the format, which docs/token_record.md shows; ``token_lines.py`` writes it as JSON lines,
``token_parquet.py`` as parquet. Every reader checks by ``checked``. Nothing here needs torch or pyarrow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

FOLDER = "tokens"
"""Below the run's folder."""
PIECES = "pieces.jsonl"
"""The file beside the records with the text of every token id, so that no tokenizer is needed to read
them."""
PICTURES = "pictures"
"""Folder of encoded images, each under its SHA-256, beside the records."""
VERSION = 1
"""Increased when fields change their meaning; files of another version are not read."""
VERSION_FACT = "token_record"
"""The fact that holds the version, and by which a file is known."""
PROMPTS = "prompt_ids"

Array = npt.NDArray[Any]


class DamagedRecordError(ValueError):
    """A file is no token record that can be read; the message says why."""


@dataclass(frozen=True)
class Field:
    """One field of a row."""

    dtype: str
    """numpy's name of the type that is read; ``str`` for text."""
    meaning: str
    is_of_tokens: bool = True
    """Whether the column has one value a response token; else it has one a row."""
    stored: str = ""
    """Type in this project's own parquet files, where it is a narrower one."""


FIELDS: Mapping[str, Field] = {
    "response_mask": Field(
        "bool", "1 where the policy sampled the token, 0 for tokens of tools and environments"
    ),
    "rollout_log_prob": Field("float32", "log-prob that the engine reported, nats"),
    "old_log_prob": Field("float32", "the trainer's log-prob before the update, nats; null: not computed"),
    "response_ids": Field("int32", "token ids"),
    "entropy": Field("float32", "of the trainer's distribution, nats", stored="float16"),
    "sum_pi_squared": Field("float32", "sum of the trainer's squared probabilities over the vocabulary"),
    "varentropy": Field("float32", "variance of log π under the trainer, nats²", stored="float16"),
    "ref_log_prob": Field("float32", "log-prob of the reference policy, nats", stored="float16"),
    "teacher_log_prob": Field("float32", "log-prob of the teacher, nats", stored="float16"),
    "value": Field("float32", "of the critic", stored="float16"),
    "weight": Field("float32", "importance weight that the update used", stored="float16"),
    "kept": Field("bool", "0 where rollout correction rejected the token"),
    "advantage": Field("float32", "by row or token"),
    "version": Field("int32", "number of the weights that sampled, by row or token"),
    "restart": Field(
        "bool", "1 where another conversation begins, which sees nothing of the tokens before; default 0"
    ),
    "turn_reward": Field("float32", "reward of the turn that ends with the token, else 0"),
    "turn_wait": Field("float32", "seconds that this turn waited for a reply"),
    "token_class": Field("int8", "kind of the token by its text, a number in `TOKEN_CLASSES`"),
    "row": Field("int32", "place in the batch; default: the order", is_of_tokens=False),
    "group": Field("int32", "number of the prompt; default: equal for equal prompts", is_of_tokens=False),
    "source": Field("str", "data source", is_of_tokens=False),
    "chosen_by": Field("str", "`random` (default), or `worst` by its log-ratios", is_of_tokens=False),
    "inclusion": Field("float32", "probability with which a random row was taken", is_of_tokens=False),
    "score": Field("float32", "outcome score", is_of_tokens=False),
    "finished": Field("bool", "whether a stop token ended it", is_of_tokens=False),
    "pictures": Field("str", "SHA-256 of its pictures, hexadecimal, in their order", is_of_tokens=False),
    "engine": Field("int32", "number of the engine that sampled the row", is_of_tokens=False),
}
"""Fields of a row beside ``step`` and ``prompt_ids``, by name."""
REQUIRED = ("response_mask", "rollout_log_prob")
LARGEST_LOG_PROB = 1e-3
"""Rounding may make a log-prob of a certain token so much larger than 0."""

TOKEN_CLASSES = ("word", "digits", "whitespace", "punctuation", "special", "fragment")
"""Kinds of tokens by their text; a fragment is part of a character, or not text at all."""


@dataclass(frozen=True)
class TokenRecord:
    """``n`` rows of one step, and the tokens of all their responses, concatenated."""

    facts: Mapping[str, Any]
    """Facts of the step and its run: at least ``step`` and ``trainer``."""
    rows: Mapping[str, Array]
    """``[n]`` by name in ``FIELDS``; ``row``, ``group``, ``source`` and ``chosen_by`` always."""
    lengths: Array
    """int64 ``[n]``: response tokens of each row."""
    tokens: Mapping[str, Array]
    """``[sum of lengths]`` by name in ``FIELDS``, without fields that were not computed."""
    prompts: Sequence[Array] | None = None
    """Token ids of each row's prompt."""
    left_out: Sequence[str] = ()
    """Fields that some rows have and others lack."""

    @property
    def step(self) -> int:
        """The training step."""
        return int(self.facts["step"])

    @property
    def starts(self) -> Array:
        """int64 ``[n]``: where each row's tokens begin."""
        starts: Array = np.cumsum(self.lengths) - self.lengths
        return starts

    @property
    def row_numbers(self) -> Array:
        """int64 ``[tokens]``: the row of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def span(self, index: int) -> slice:
        """The slice of ``tokens`` that holds a row."""
        start = int(self.starts[index])
        return slice(start, start + int(self.lengths[index]))

    def log_ratio(self) -> Array | None:
        """float64 ``[tokens]``: log-prob of the trainer minus that of the engine, nats; None without
        log-probs of the trainer."""
        if "old_log_prob" not in self.tokens:
            return None
        with np.errstate(invalid="ignore"):
            difference: Array = (
                self.tokens["old_log_prob"].astype("float64") - self.tokens["rollout_log_prob"]
            )
        return difference

    def ages(self) -> Array | None:
        """int64 ``[tokens]``: the fact ``current_version`` (without it, the newest version of a sampled
        token) minus the version that sampled each token; None without versions."""
        mask = self.tokens["response_mask"]
        if "version" not in self.tokens or not mask.any():
            return None
        versions = self.tokens["version"].astype("int64")
        current = self.facts.get("current_version")
        ages: Array = (current if isinstance(current, int) else versions[mask].max()) - versions
        return ages


def noise_scale(tokens: Mapping[str, Array]) -> Array | None:
    """float64 ``[tokens]``: √g, g = 1 - 2p + sum of p²: the factor from a logit's noise to the noise of the
    token's log-prob; None without sums of squared probabilities or log-probs of the trainer."""
    if "sum_pi_squared" not in tokens or "old_log_prob" not in tokens:
        return None
    with np.errstate(invalid="ignore"):
        squared = 1.0 - 2.0 * np.exp(tokens["old_log_prob"].astype("float64")) + tokens["sum_pi_squared"]
        scale: Array = np.sqrt(np.maximum(squared, 0.0))
    return scale


def required_facts(facts: object) -> dict[str, Any]:
    """The ``facts`` of a file of this version. Raises ``DamagedRecordError`` for other files."""
    if not isinstance(facts, dict) or VERSION_FACT not in facts:
        raise DamagedRecordError("it has no facts of a token record")
    if facts[VERSION_FACT] != VERSION:
        version = facts[VERSION_FACT]
        raise DamagedRecordError(
            f"it has version {version} of the record, and version {VERSION} is read here"
        )
    return facts


def checked(record: TokenRecord) -> TokenRecord:
    """The record, without the trainer's log-probs where they are all 0, so not computed.

    Raises:
        DamagedRecordError: no token was sampled, or log-probs of the engine are none.
    """
    mask = record.tokens["response_mask"]
    if not len(mask):
        return record
    if not mask.any():
        raise DamagedRecordError("response_mask must mark the tokens that the policy sampled; it marks none")
    for name in ("rollout_log_prob", "old_log_prob"):
        sampled = record.tokens[name][mask] if name in record.tokens else np.zeros(0)
        positive = int((sampled > LARGEST_LOG_PROB).sum())
        if positive:
            raise DamagedRecordError(
                f"{name} must be at most 0; {positive:,} of {len(sampled):,} sampled tokens have more: are "
                "these probabilities, log-ratios or marks of missing values?"
            )
    computed = {
        name: bool(record.tokens[name][mask].any())
        for name in ("rollout_log_prob", "old_log_prob")
        if name in record.tokens
    }
    if not any(computed.values()) and len(computed) == 2:  # a policy that is certain of every token
        return record
    if not computed["rollout_log_prob"]:
        raise DamagedRecordError("rollout_log_prob is 0 for every sampled token: it was not computed")
    tokens = {name: values for name, values in record.tokens.items() if computed.get(name, True)}
    return replace(record, tokens=tokens)


def prompt_numbers(prompts: Sequence[Array]) -> Array:
    """int64 ``[rows]``: the same for rows with the same prompt."""
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(ids.tobytes(), len(numbers)) for ids in prompts], "int64")


def with_defaults(rows: Mapping[str, Array], count: int, prompts: Sequence[Array] | None) -> dict[str, Array]:
    """Columns ``[count]``, with defaults of those that every record has."""
    groups = np.arange(count) if prompts is None else prompt_numbers(prompts).astype("int32")
    defaults = {
        "row": np.arange(count),
        "group": groups,
        "source": np.full(count, "", dtype=object),
        "chosen_by": np.full(count, "random", dtype=object),
    }
    return {**defaults, **rows}


def class_of(text: str, is_special: bool) -> int:
    """The number in ``TOKEN_CLASSES`` of a token with this text."""
    bare = text.strip()
    if is_special:
        name = "special"
    elif "\ufffd" in text or not text:
        name = "fragment"
    elif not bare:
        name = "whitespace"
    elif bare.isdecimal():
        name = "digits"
    else:
        name = "word" if any(letter.isalnum() for letter in bare) else "punctuation"
    return TOKEN_CLASSES.index(name)
