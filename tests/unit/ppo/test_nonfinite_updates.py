"""Non-finite gradients in a row are counted across steps."""

import math

import pytest

from verl_rc.ppo.nonfinite_updates import NonFiniteGradientsError, count_nonfinite_updates


def test_a_finite_gradient_in_between_starts_the_count_again() -> None:
    in_a_row = 0
    for norms, expected in (([math.nan, 1.0], 0), ([math.inf], 1), ([0.0, math.nan], 1)):
        in_a_row = count_nonfinite_updates(in_a_row, "actor", norms, limit=2)
        assert in_a_row == expected


def test_the_limit_holds_across_steps_and_the_role_is_named() -> None:
    in_a_row = count_nonfinite_updates(0, "critic", [1.0, math.nan], limit=2)
    with pytest.raises(NonFiniteGradientsError, match="the critic's gradients must be finite, but those of 2"):
        count_nonfinite_updates(in_a_row, "critic", [-math.inf, 1.0], limit=2)
