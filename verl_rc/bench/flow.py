"""A short gradient flow: a tabular policy follows the expected update of a method, without noise, and says
right responses more often, or less."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from verl_rc.bench.exact import CONDITIONS, Condition, update
from verl_rc.bench.method import Method
from verl_rc.bench.policies import Problem

STEPS = 100
RATE = 20.0
"""Step size; a step is at most ``LONGEST`` long, as gradients are clipped."""
LONGEST = 0.5
OPTIMUM = 0.95
"""Score from which on a policy counts as optimal; the best there is has 1."""
FALL = 0.1
"""A flow has collapsed when it ends so far below its own best score, as in docs/evidence.md."""
FLOW_CONDITIONS: Mapping[str, Condition] = {
    **{name: CONDITIONS[name] for name in ("fresh", "8 steps", "top-p .9", "noise")},
    "frozen": Condition("all responses come from the policy that the flow began with", STEPS),
}


@dataclass(frozen=True)
class Flow:
    """Where a method leads under one condition: means over the problems."""

    score: float
    """Expected score at the end."""
    best: float
    """Highest expected score on the way."""
    optimal: float
    """Share of the problems that ended at ``OPTIMUM`` or above."""
    collapsed: float
    """Share of the problems that ended ``FALL`` or more below their best."""


def follow(method: Method, condition: Condition, problem: Problem, steps: int = STEPS) -> list[float]:
    """Expected scores before every step and at the end."""
    versions: list[Tensor] = [problem.logits]
    for _ in range(steps):
        sampling = condition.engine(versions[max(len(versions) - 1 - condition.age, 0)])
        change = RATE * update(method, problem, sampling, versions[-1]).mean
        versions.append(versions[-1] + change * min(1.0, LONGEST / max(float(change.norm()), 1e-300)))
    return [problem.expected_score(logits) for logits in versions]


def run_flow(method: Method, among: Sequence[Problem], steps: int = STEPS) -> dict[str, Flow]:
    """A method under every condition."""
    flows = {}
    for name, condition in FLOW_CONDITIONS.items():
        paths = [follow(method, condition, problem, steps) for problem in among]
        ends, peaks = [path[-1] for path in paths], [max(path) for path in paths]
        pairs = list(zip(ends, peaks, strict=True))
        flows[name] = Flow(
            score=sum(ends) / len(ends),
            best=sum(peaks) / len(peaks),
            optimal=sum(end >= OPTIMUM for end in ends) / len(ends),
            collapsed=sum(peak - end >= FALL for end, peak in pairs) / len(ends),
        )
    return flows
