"""The records of an episode, which the trainer and an environment exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from typing import Any

from verl_rc.records.plain import is_finite, plain, unwrapped

Message = Mapping[str, Any]
"""A chat message ``{role, content}``; the role of an environment's is user, tool or system."""
TOOL_CALLS = "tool_calls"
"""The metric of a reply: calls that tools answered in it."""
DROPPED_METRICS = "dropped_metrics"
"""The metric that counts the others that a reply or a batch has no room for."""
_MAX_METRICS = 100
_LONGEST_NAME = 100
EpisodeKey = tuple[int, int, int]
"""Number of the group, place of the sample in it, and attempt."""


class BadReplyError(ValueError):
    """A reply is none that an environment may give."""


@dataclass(frozen=True)
class Opening:
    """The state in which an episode begins, before the policy's first turn."""

    messages: Sequence[Message]
    """The prompt."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Descriptions of tools for the chat template (OpenAI's function format)."""

    def __post_init__(self) -> None:
        """Copy everything into plain values. Raise ``BadReplyError`` for what is none."""
        for name in ("messages", "tools"):
            object.__setattr__(self, name, _plain(f"Opening.{name}", list(getattr(self, name))))


@dataclass(frozen=True)
class Turn:
    """One turn of the policy."""

    number: int
    """Number of the turn, from 0."""
    text: str
    """The decoded turn with special tokens, without the stop token at its end. To be read: it is never
    encoded again."""
    token_ids: tuple[int, ...]
    """The sampled tokens."""
    stopped: bool
    """Ended by a stop token. False: a limit has cut it off, so no turn follows, and it only gets a reward.
    One without tokens had no room at all."""


@dataclass(frozen=True)
class Reply:
    """The answer of an environment to a turn."""

    messages: Sequence[Message] = ()
    """Messages that the policy reads before its next turn; none where the episode is done."""
    reward: float = 0.0
    """Reward of this turn."""
    done: bool = False
    """The episode has ended."""
    truncated: bool = False
    """The episode has ended at a limit: its sample counts as unfinished."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to be shown, by name: at most 100 whose names have at most 100 characters.
    ``dropped_metrics`` counts further ones."""
    opening: Opening | None = None
    """Another conversation, which the next turn answers in the place of ``messages``: it sees nothing of what
    was before."""
    waited: float = field(default=0.0, compare=False)
    """Seconds that the sample waited for it; the caller that asks for a reply measures them."""
    asked_again: int = field(default=0, compare=False)
    """Calls that were made once more for it, because one failed."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Plain values by name, which the reward function finds in its ``extra_info``. Of several replies with
    one name the last counts."""

    def __post_init__(self) -> None:
        """Copy everything into plain values, which checkpoints hold. Raise ``BadReplyError`` naming what is
        wrong."""
        metrics = {
            name: _number(f"Reply.metrics[{name!r}]", value) for name, value in _bounded(self.metrics).items()
        }
        values = {
            "messages": _plain("Reply.messages", list(self.messages)),
            "reward": _number("Reply.reward", self.reward),
            "done": bool(self.done),
            "truncated": bool(self.truncated),
            "metrics": metrics,
            "extra_info": _plain("Reply.extra_info", self.extra_info),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        for message in self.messages:
            if not isinstance(message, Mapping) or message.get("role") not in ("user", "tool", "system"):
                raise BadReplyError(
                    "Reply.messages must be of the roles user, tool or system, which are not the policy's, "
                    f"got {message!r}."
                )
        if not (self.messages or self.opening or self.ends):
            raise BadReplyError("a Reply must have messages for the policy's next turn, or done=True.")

    @property
    def ends(self) -> bool:
        """Whether no turn follows."""
        return self.done or self.truncated

    def joined(self, last: "Reply") -> "Reply":
        """One reply that ends the episode, from this one and the ``last`` one, to a turn that had no room."""
        names = {**self.metrics, **last.metrics}
        metrics = {name: self.metrics.get(name, 0.0) + last.metrics.get(name, 0.0) for name in names}
        return Reply(
            reward=self.reward + last.reward,
            truncated=True,
            metrics=metrics,
            asked_again=self.asked_again + last.asked_again,
            extra_info={**self.extra_info, **last.extra_info},
        )


def _bounded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The first metrics, and the number of the others: an agent may give as many names as it likes."""
    short = {str(name): value for name, value in metrics.items() if len(str(name)) <= _LONGEST_NAME}
    already = _number(DROPPED_METRICS, short.pop(DROPPED_METRICS, 0.0))
    dropped = len(metrics.keys() - {DROPPED_METRICS}) - min(len(short), _MAX_METRICS)
    if dropped or already:
        return {**dict(islice(short.items(), _MAX_METRICS)), DROPPED_METRICS: already + dropped}
    return short


def _plain(name: str, value: object) -> Any:
    try:
        return plain(value)
    except TypeError as error:
        raise BadReplyError(
            f"{name} must hold texts, numbers, None, and lists and dicts of those, got {error}."
        ) from error


def _number(name: str, value: object) -> float:
    number = unwrapped(value)
    if not isinstance(number, Real) or not is_finite(number):
        raise BadReplyError(f"{name} must be a finite number, got {value!r:.200}.")
    return float(number)


@dataclass(frozen=True)
class Exchange:
    """A turn with the reply to it."""

    turn: Turn
    reply: Reply


@dataclass(frozen=True)
class Episode:
    """An episode as any process can open it again: it comes with every turn."""

    key: EpisodeKey
    row: Mapping[str, Any]
    """The row of the data: ``prompt`` (messages), ``data_source``, ``ground_truth``, ``extra_info``,
    ``agent_name``."""
    seed: int
    """Seed of the environment's random numbers, the same for all samples of a group."""
    opening: Opening | None = None
    """The opening that its prompt was made of, which must be the same in every process. None means the row's
    prompt."""
    state: bytes | None = None
    """The result of ``Environment.state`` after the last reply."""
    history: Sequence[Exchange] | None = None
    """The turns so far. None means that they were not sent."""
