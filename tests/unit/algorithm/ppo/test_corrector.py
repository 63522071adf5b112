"""Who corrects: when they evaluate the proximal policy, and what is left for the actor."""

import pytest
import torch
from bypass_cases import CASES, case_batch

from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.in_actor import OverRanks
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.records.batches import TokenScores

RANKS = OverRanks(sum=lambda tensor: tensor, maximum=lambda tensor: tensor)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [({}, [49, 50, 51]), ({"bypass_mode": True}, []), ({"proximal": "interpolate"}, [50])],
)
def test_the_proximal_policy_is_evaluated_where_a_mode_reads_it(
    fields: dict[str, object], steps: list[int]
) -> None:
    """Interpolated log-probs are compared with it in every 50th step."""
    mode = corrector_of(RolloutCorrectionConfig.model_validate(fields))
    assert [step for step in (49, 50, 51) if mode.evaluates_proximal(step)] == steps


@pytest.mark.parametrize(("version", "compares"), [(48, False), (49, True), (50, False)])
def test_every_50th_step_compares_interpolated_log_probs(version: int, compares: bool) -> None:
    mode = corrector_of(RolloutCorrectionConfig(proximal="interpolate", rollout_is="token"))
    batch = case_batch(CASES[0])
    current = torch.zeros(batch.response_mask.shape)
    scores = TokenScores(current, current, current)
    _, averages = mode.during_update(version, 1, RANKS).correct(batch, scores)
    assert ("actor/proximal_interpolation_gap" in averages) == compares


def test_what_the_driver_has_corrected_stays_as_it_is() -> None:
    left = corrector_of(RolloutCorrectionConfig(rollout_is="token")).during_update(0, 1, RANKS)
    batch, share = case_batch(CASES[0]), MiniBatch([[0]], 5, 2, 4)
    scores = TokenScores(torch.zeros(batch.response_mask.shape), None)
    assert left.begin_mini_batch(share, 0, lambda rows: (batch, scores.log_probs)) == (5, 2)
    assert left.correct(batch, scores) == (batch, {})
    assert left.end_mini_batch(share, 0) == 4
    assert left.measured() is None
