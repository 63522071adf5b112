"""The inputs of every advantage estimator: the batch, and its groups of rows of the same prompt."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS
from verl_rc.config.user_code import NamedFunctions
from verl_rc.tensor_ops.masked import group_numbers, is_rounding


@dataclass(frozen=True)
class Groups:
    """The group of each row, and which rows count."""

    group_of_row: Tensor
    """[B], int64, in [0, num_groups)."""
    is_counted: Tensor
    """[B], bool; rows without it neither enter a sum nor add to a size."""
    num_groups: int
    """An upper bound of the number of groups; the length of every per-group tensor."""

    def sum(self, values: Tensor) -> Tensor:
        """Add up the counted rows of ``values`` [B, ...] per group: [num_groups, ...]."""
        counted = self.is_counted.view(-1, *(1,) * (values.ndim - 1))
        sums = values.new_zeros((self.num_groups, *values.shape[1:]))
        return sums.index_add(0, self.group_of_row, values.where(counted, 0))

    def amax(self, values: Tensor) -> Tensor:
        """Largest counted value [B] per group: [num_groups]; −inf for a group without one."""
        values = values.where(self.is_counted, values.new_full((), -torch.inf))
        return values.new_full((self.num_groups,), -torch.inf).scatter_reduce(
            0, self.group_of_row, values, "amax"
        )

    def without_rounding(self, values: Tensor, sizes: Tensor) -> Tensor:
        """``values`` [B], and in a group whose values differ by rounding alone the largest of them for all
        its rows. ``sizes`` [B]: the magnitude of what each value is the sum of."""
        largest, smallest = self.amax(values), -self.amax(-values)
        equal = is_rounding(largest - smallest, self.amax(sizes))
        return torch.where(self.per_row(equal), self.per_row(largest), values)

    def per_row(self, values: Tensor) -> Tensor:
        """Spread values of groups [num_groups, ...] over their rows: [B, ...]."""
        return values[self.group_of_row]

    def sizes(self, dtype: torch.dtype) -> Tensor:
        """Counted rows in each row's group: [B]."""
        return self.per_row(self.sum(self.is_counted.to(dtype)))

    def means(self, values: Tensor) -> Tensor:
        """Mean over the counted rows of each row's group: [B]; 0 for a group without any."""
        return self.per_row(self.sum(values)) / self.sizes(values.dtype).clamp(min=1)

    def stds(self, values: Tensor) -> Tensor:
        """Standard deviation (n − 1 in the denominator) over each row's group: [B]; 0 for fewer than two
        rows."""
        squares = self.per_row(self.sum((values - self.means(values)).square()))
        return (squares / (self.sizes(values.dtype) - 1).clamp(min=1)).sqrt()


def make_groups(group_ids: Sequence[Hashable] | Tensor, is_counted: Tensor) -> Groups:
    """Number the groups.

    Args:
        group_ids: B identifiers of prompts, strings or integers, or an integer tensor [B]; order means
            nothing.
        is_counted: [B], bool; rows that count.

    Raises:
        ValueError: when there is not one identifier per row.
    """
    rows = is_counted.shape[0]
    if len(group_ids) != rows:
        raise ValueError(
            f"group_ids must name the prompt of each of the {rows} rows; got {len(group_ids)} identifiers"
        )
    num_groups = rows if isinstance(group_ids, Tensor) else len(set(group_ids))
    return Groups(group_numbers(group_ids, is_counted.device), is_counted, num_groups)


@dataclass(frozen=True)
class AdvantageInputs:
    """The inputs of an estimator."""

    token_level_rewards: Tensor
    """[B, T], in units of reward; finite wherever it is not padding."""
    response_mask: Tensor
    """[B, T], bool; tokens that get an advantage. Rows left out of the baseline have none."""
    groups: Groups | None = None
    """Rows of the same prompt, or None when the caller gave none."""
    values: Tensor | None = None
    """[B, T], in units of reward; the critic's estimate before each token."""
    reward_baselines: Tensor | None = None
    """[B], in units of reward; the score of each prompt's greedy answer."""
    component_scores: Tensor | None = None
    """[B, K], in units of reward; the parts of a reward that is normalised part by part."""
    component_weights: Sequence[float] | None = None
    """K dimensionless factors of these parts; None means 1 each."""
    old_log_probs: Tensor | None = None
    """[B, T], nats; of the policy before the update."""
    sum_pi_squared: Tensor | None = None
    """[B, T], dimensionless; Σ_v π(v)² over the vocabulary at each position."""
    rollout_is_weights: Tensor | None = None
    """[B, T], dimensionless; importance weights of the correction."""
    gamma: float = 1.0
    """Discount per response token, in [0, 1]."""
    lam: float = 1.0
    """Decay of GAE per response token, in [0, 1]."""
    norm_adv_by_std_in_grpo: bool = True
    """Whether ``grpo`` divides by the group's standard deviation."""
    credits_turns: bool = False
    """Whether turns are compared by their returns to go, and not rows by their scores."""


AdvantageEstimator = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]

_FUNCTIONS: NamedFunctions[AdvantageEstimator] = NamedFunctions(
    "advantage estimator",
    "algorithm.adv_estimator",
    remedy="Declare what it reads: algorithm.adv_estimator_inputs=[values], for example.",
    aliases={name: spec.same_as for name, spec in ADVANTAGE_ESTIMATORS.items() if spec.same_as is not None},
)


register_advantage_estimator = _FUNCTIONS.register
"""Decorator that makes a function known as an advantage estimator under a name. Raises ``ValueError`` when
another function has it."""
advantage_estimator_names = _FUNCTIONS.names
"""The names of all registered estimators and their aliases."""
resolve_advantage_estimator = _FUNCTIONS.resolve
"""Finds an estimator by its registered name, or imports it by ``module:function``. Raises ``ValueError``
when there is no such estimator."""


def required(value: Tensor | None, name: str, estimator: str) -> Tensor:
    """An optional input that this estimator cannot do without.

    Raises:
        ValueError: when it is None.
    """
    if value is None:
        raise ValueError(f"the advantage estimator {estimator!r} needs {name}; pass {name}=...")
    return value


def required_groups(inputs: AdvantageInputs, estimator: str) -> Groups:
    """The groups for an estimator that compares rows of one prompt.

    Raises:
        ValueError: when the caller gave no group identifiers.
    """
    if inputs.groups is None:
        raise ValueError(
            f"the advantage estimator {estimator!r} compares answers to one prompt; pass group_ids=..."
        )
    return inputs.groups
