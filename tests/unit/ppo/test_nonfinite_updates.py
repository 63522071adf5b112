"""The guard counts non-finite gradients in a row, role by role, across steps."""

import math

import pytest

from verl_rc.ppo.nonfinite_updates import NonFiniteGradientsError, NonFiniteUpdateGuard


def test_a_finite_gradient_in_between_starts_the_count_again() -> None:
    guard = NonFiniteUpdateGuard(limit=2)
    for norms in ([math.nan, 1.0], [math.inf], [0.0, math.nan]):
        guard.observe("actor", norms)


def test_roles_are_counted_apart_and_the_limit_holds_across_steps() -> None:
    guard = NonFiniteUpdateGuard(limit=2)
    guard.observe("actor", [math.nan])
    guard.observe("critic", [1.0, math.nan])
    with pytest.raises(NonFiniteGradientsError, match="the actor's gradients must be finite, but those of 2"):
        guard.observe("actor", [-math.inf])
