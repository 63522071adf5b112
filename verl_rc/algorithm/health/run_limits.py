"""Stopping a run that no longer learns: nothing is left to train on, gradients are not finite, or rewards
collapse."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.records.optimizer_step import OptimizerStep

MOST_SKIPPED_UPDATES = 10
"""Consecutive updates skipped because rejection kept no token, after which the run stops."""
MOST_NONFINITE_UPDATES = 3
"""Consecutive updates skipped because of a NaN or infinite gradient, after which the run stops."""
REWARD_DROP = 0.5
"""Fall of the mean score, relative to the best mean so far, that is a collapse."""


class TooManySkippedUpdatesError(RuntimeError):
    """Too many mini-batches in a row kept no token."""


def count_skipped_updates(
    in_a_row: int, kept_tokens: Iterable[int], limit: int = MOST_SKIPPED_UPDATES
) -> int:
    """Optimizer steps in a row that were skipped because no token of their mini-batch was kept.

    ``in_a_row`` were skipped up to now; ``kept_tokens`` are those of each following mini-batch, in their
    order. Raises ``TooManySkippedUpdatesError`` at ``limit``.
    """
    for count in kept_tokens:
        in_a_row = 0 if count else in_a_row + 1
        if in_a_row >= limit:
            raise TooManySkippedUpdatesError(
                "rollout correction must leave something of a mini-batch, but it rejected every token of "
                f"{in_a_row} in a row. Look at rollout_corr/kl and the rollout_rs_* metrics: widen "
                "algorithm.rollout_correction.rollout_rs_threshold, or find out why trainer and engine "
                "disagree."
            )
    return in_a_row


class NonFiniteGradientsError(RuntimeError):
    """Too many gradients in a row were not finite."""


def count_nonfinite_updates(
    in_a_row: int, role: str, steps: Iterable[OptimizerStep], limit: int = MOST_NONFINITE_UPDATES
) -> int:
    """Optimizer steps in a row of ``role`` that were left out because their gradient was NaN or infinite.

    ``in_a_row`` were left out up to now; ``steps`` are those that follow, in their order. An overflow of
    float16 is none of them and ends no row: it halves the scale of the loss, and from a scale of 1 on the
    gradient itself is not finite. Raises ``NonFiniteGradientsError`` at ``limit``.
    """
    for step in steps:
        if step.outcome == "overflow":
            continue
        in_a_row = 0 if step.outcome == "trained" else in_a_row + 1
        if in_a_row >= limit:
            raise NonFiniteGradientsError(
                f"the {role}'s gradients must be finite, but those of {limit} optimizer steps in a row were "
                "NaN or infinite. They were left out, so the weights are as before. Lower the learning rate, "
                "look for extreme rewards and advantages, or compute in float32 (fsdp_config.dtype)."
            )
    return in_a_row


@dataclass(frozen=True)
class LeftOutUpdates:
    """Consecutive optimizer steps that were left out, up to the last one. Immutable."""

    skipped: int = 0
    """Updates of the actor, because rejection kept no token."""
    nonfinite_actor: int = 0
    """Updates of the actor, because a gradient was not finite."""
    nonfinite_critic: int = 0
    """Updates of the critic, because a gradient was not finite."""


class TooManyFailedGroupsError(RuntimeError):
    """More groups failed than a run may lose."""


_JUDGED_GROUPS = 100
_FAILED_GROUPS = 1


@dataclass(frozen=True)
class FailedGroups:
    """Groups that failed in every attempt, among the last ones. Immutable: ``with_failure`` returns the next
    record."""

    at: tuple[int, ...] = ()
    """The number of groups that had been decided before each failure; failures among the last 100 count."""
    first_error: str | None = None
    """The error of the run's first failed group, or None."""

    def with_failure(self, num_decided: int, error: str) -> "FailedGroups":
        """Add a failure after ``num_decided`` groups. Raises ``TooManyFailedGroupsError`` above 1 % of the
        last 100."""
        recent = tuple(place for place in self.at if place > num_decided - _JUDGED_GROUPS)
        groups = FailedGroups((*recent, num_decided), self.first_error or error)
        if len(groups.at) > _FAILED_GROUPS:
            raise TooManyFailedGroupsError(
                f"at most {_FAILED_GROUPS} % of the last {_JUDGED_GROUPS} groups may fail in every attempt, "
                f"but {len(groups.at)} did; the first error of the run: {groups.first_error} Correct its "
                "cause and start the same command again."
            )
        return groups


_STANDARD_ERRORS = 4.0
"""A fall of fewer standard errors of the mean may be chance."""


@dataclass(frozen=True)
class StepScores:
    """The scores of one step, summed up."""

    count: int
    total: float
    squares: float


@dataclass(frozen=True)
class RewardHistory:
    """The scores of the last steps, and the best mean over as many steps. Immutable: ``with_scores`` returns
    the next one."""

    recent: tuple[StepScores, ...] = ()
    """Scores of the last steps, oldest first; at most a window of them."""
    best: float | None = None
    """The best mean over a window. None if no window was full yet."""

    def with_scores(self, scores: Tensor, window: int) -> "RewardHistory":
        """Add the scores ``[B]`` of a step; the last ``window`` steps stay
        (``trainer.alerts.reward_window``)."""
        values = scores.double()
        total, squares = torch.stack([values.sum(), values.square().sum()]).tolist()
        recent = (*self.recent, StepScores(values.numel(), total, squares))[-window:]
        if len(recent) < window:
            return RewardHistory(recent, self.best)
        mean, _ = _mean_and_variance(recent)
        return RewardHistory(recent, mean if self.best is None else max(self.best, mean))

    def collapse(self, window: int, drop: float = REWARD_DROP) -> str | None:
        """The sentence about a collapse. None if there is none.

        The reward has collapsed when the mean of the last ``window`` steps is below the best one by more than
        the share ``drop`` of it, and by more than chance explains.
        """
        if self.best is None or len(self.recent) < window:
            return None
        mean, variance = _mean_and_variance(self.recent)
        count, fall = sum(step.count for step in self.recent), self.best - mean
        if fall <= drop * abs(self.best) or fall <= _STANDARD_ERRORS * math.sqrt(variance / count):
            return None
        return (
            f"the mean score of the last {len(self.recent)} steps is {mean:.3g}, down from {self.best:.3g}: "
            f"more than {drop:.0%} of it is lost"
        )


def _mean_and_variance(steps: tuple[StepScores, ...]) -> tuple[float, float]:
    count = sum(step.count for step in steps)
    mean = sum(step.total for step in steps) / count
    return mean, max(0.0, sum(step.squares for step in steps) / count - mean**2)
