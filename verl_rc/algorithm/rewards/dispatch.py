"""The choice of the reward function: the user's own, loaded and checked once, or the built-in scorer of a
``data_source``."""

import inspect
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from verl_rc.algorithm.rewards.sample import RewardError, RewardOutput, RewardSample, as_reward_output
from verl_rc.algorithm.rewards.scorers import (
    dapo_math,
    exact_match,
    geometry,
    gsm8k,
    last_answer,
    math_answer,
)
from verl_rc.config.task import CustomRewardFunctionConfig, RewardConfig
from verl_rc.config.user_code import load_from_file

RewardFunction = Callable[..., Any]
"""``f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float | {"score": float,
...}``, or an awaitable of that."""

_KEY = "reward.custom_reward_function"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(
    path: str,
    name: str,
    reward_kwargs: Mapping[str, Any] | None = None,
    further_arguments: Sequence[str] = (),
) -> RewardFunction:
    """The function ``name`` of the Python file ``path`` with ``reward_kwargs`` filled in.

    ``further_arguments``: names of additional keyword arguments of every call. Raises ``ValueError`` when the
    file or the function is missing, or when it does not take the arguments it will get.
    """
    function = load_from_file(path, name, _KEY, "function", callable)
    settings = dict(reward_kwargs or {})
    arguments = [*_ARGUMENTS, *further_arguments]
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments), **settings)
    except TypeError as error:
        raise ValueError(
            f"{name} of {path} must accept the keyword arguments {', '.join([*arguments, *settings])}, its "
            f"signature is {name}{inspect.signature(function)}: {error}. Change it, or {_KEY}.reward_kwargs "
            f"({sorted(settings)})."
        ) from error

    return partial(function, **settings)


_SHOWN_CHARACTERS = 500
"""Characters of an exception's text that are shown."""
Scorer = Callable[[str, Any], Any]
"""``f(solution_str, ground_truth)`` returns a number or a dict with ``score``."""

_SCORERS: dict[str, Scorer] = {
    "digits": exact_match,
    "sums": last_answer,
    "openai/gsm8k": gsm8k,
    "lighteval/MATH": math_answer,
    "DigitalLearningGmbH/MATH-lighteval": math_answer,
    "HuggingFaceH4/MATH-500": math_answer,
    "hiyouga/geometry3k": geometry,
    "math": dapo_math,
    "math_dapo": dapo_math,
    "math_dapo_reasoning": dapo_math,
}
_FAMILIES: dict[str, Scorer] = {"aime": dapo_math, "numina_": math_answer}
"""Scorers by prefix of the data source's name."""


_SCORES_ON_TIMEOUT: dict[Scorer, float] = {math_answer: 0.0, geometry: 0.0, dapo_math: -1.0}
"""Scorers whose algebra on a response may not terminate: they run in processes with a time limit, and an
answer that is not proven equal in time counts as wrong."""


def register_scorer(data_source: str) -> Callable[[Scorer], Scorer]:
    """Decorator that registers a scorer of ``data_source``; it runs in the driver's process, without a time
    limit.

    Raises ``ValueError`` when the name is taken.
    """

    def register(scorer: Scorer) -> Scorer:
        if _SCORERS.setdefault(data_source, scorer) is not scorer:
            raise ValueError(f"data_source {data_source!r} already has a scorer; choose another name.")
        return scorer

    return register


def find_scorer(data_source: str) -> Scorer:
    """The scorer of a ``data_source``. Raises ``ValueError`` for an unknown one, listing the known ones."""
    if data_source in _SCORERS:
        return _SCORERS[data_source]
    for prefix, scorer in _FAMILIES.items():
        if data_source.startswith(prefix):
            return scorer
    sources = sorted([*_SCORERS, *(f"{prefix}*" for prefix in _FAMILIES)])
    raise ValueError(
        f"data_source must be one that has a scorer, got {data_source!r}; known are {sources}. Name a "
        "function of your own with reward.custom_reward_function.path and reward.custom_reward_function.name."
    )


def check_data_sources(sources: Mapping[str, str]) -> None:
    """Raise ``ValueError`` naming every source without a scorer; ``sources`` maps each to its first row."""
    unknown = []
    for source, first_row in sources.items():
        try:
            find_scorer(source)
        except ValueError as error:
            unknown.append(f"{first_row}: {error}")
    if unknown:
        raise ValueError("\n".join(unknown))


def score_on_timeout(data_source: str) -> float | None:
    """The score, that of a wrong answer, when the built-in scorer of ``data_source`` exceeds the time limit;
    None for a scorer that always finishes."""
    return _SCORES_ON_TIMEOUT.get(find_scorer(data_source))


def build_reward(config: RewardConfig) -> "Reward":
    """Build what scores samples.

    Raises ``ValueError`` at once when the user's configured function cannot be loaded, settings of it were
    given without a file, or calls of it cannot overlap as ``reward.max_concurrent`` asks for.
    """
    custom = config.custom_reward_function
    with_model = config.reward_model.enable
    if custom.path is None:
        if custom != CustomRewardFunctionConfig():
            given = ", ".join(sorted(custom.model_fields_set - {"path"}))
            raise ValueError(
                f"{_KEY} has no effect without {_KEY}.path, but {given} was given: built-in scorers would "
                "score. Name the Python file, or drop the rest."
            )
        return Reward(None, with_model)
    function = load_reward_function(
        custom.path, custom.name, custom.reward_kwargs, ["reward_model_score"] if with_model else []
    )
    reward = Reward(function, with_model)
    if config.max_concurrent > 1 and not reward.is_async:
        raise ValueError(
            f"reward.max_concurrent={config.max_concurrent} needs an `async def`, and {custom.name} of "
            f"{custom.path} is none: its calls cannot overlap in one process. Set reward.num_workers instead."
        )
    return reward


class Reward:
    """Scores samples by a function of the user's, or by the built-in scorer of each one's source."""

    def __init__(self, function: RewardFunction | None, with_model: bool) -> None:
        """``function``: the user's. None means the built-in scorers. ``with_model``: it gets the score of a
        reward model."""
        self._function = function
        self._model_columns = ["reward_model_score"] if with_model else []
        call = function.func if isinstance(function, partial) else function
        self.is_async = any(map(inspect.iscoroutinefunction, (call, type(call).__call__)))
        """Whether the function is an ``async def``."""

    def __call__(self, sample: RewardSample) -> RewardOutput:
        """The score of a sample by a function that is no ``async def``. Raises ``RewardError`` naming the
        sample for every failure."""
        output = self.start(sample)
        assert isinstance(output, RewardOutput)
        return output

    def start(self, sample: RewardSample) -> RewardOutput | Coroutine[Any, Any, RewardOutput]:
        """The score of a sample, or a coroutine that returns it if the function must be awaited. Both raise
        ``RewardError`` naming the sample for every failure."""
        with _failures_of(sample):
            returned = self._call(sample)
        if self._function is not None and inspect.isawaitable(returned):
            return self._awaited(returned, sample)
        return self._output(returned, sample)

    async def _awaited(self, answer: Awaitable[Any], sample: RewardSample) -> RewardOutput:
        with _failures_of(sample):
            returned = await answer
        return self._output(returned, sample)

    def _call(self, sample: RewardSample) -> Any:
        if self._function is None and sample.ground_truth is None:
            raise ValueError(
                "the row has no ground_truth in its reward_model, which built-in scorers compare with"
            )
        if self._function is None:
            return find_scorer(sample.data_source)(sample.solution_str, sample.ground_truth)
        return self._function(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
            **dict.fromkeys(self._model_columns, sample.reward_model_score),
        )

    def _output(self, returned: object, sample: RewardSample) -> RewardOutput:
        try:
            output = as_reward_output(returned, sample)
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(
                "a reward function must return a number, or a dict with one under 'score', but what it "
                f"returned for {sample} cannot be read: {_described(error)}."
            ) from error
        extras = {**output.extras, **dict.fromkeys(self._model_columns, sample.reward_model_score)}
        return RewardOutput(output.score, extras)


@contextmanager
def _failures_of(sample: RewardSample) -> Iterator[None]:
    """A context whose exceptions become ``RewardError`` with the name of the sample."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise RewardError(f"the reward function raised {_described(error)} for {sample}.") from error


def _described(error: BaseException) -> str:
    """An exception's type, text and source line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    # Also works for an exception whose str() fails.
    text = "".join(traceback.format_exception_only(error)).strip()
    return f"{text[:_SHOWN_CHARACTERS]} ({place.filename}:{place.lineno}, in {place.name})"
