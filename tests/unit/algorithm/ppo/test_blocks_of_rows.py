"""The driver computes on blocks of rows of similar length: how they are cut changes nothing, and what comes
out is what the public functions say of the whole padded batch."""

from typing import Any

import pytest
import torch
from planned_runs import GROUP, INPUTS, ROWS, Given, config_of, driver_inputs, step_inputs
from ragged_rows import ragged, whole

from verl_rc.algorithm.advantage import compute_advantages
from verl_rc.algorithm.ppo import train_batch
from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS
from verl_rc.correction import batch as correction_batch
from verl_rc.correction import compute_rollout_correction

CORRECTION: Given = {
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": 1.3,
    "algorithm.rollout_correction.rollout_is_batch_normalize": True,
    "algorithm.rollout_correction.rollout_rs": "seq_mean_k3",
    "algorithm.rollout_correction.rollout_rs_threshold": 0.05,
    "algorithm.rollout_correction.diagnostics": "full",
}
NAMES = [name for name in ADVANTAGE_ESTIMATORS if name != "tir_optimal_token_baseline"]
PARTS = {"gdpo": {"algorithm.gdpo_reward_keys": ["score", "acc"]}}


def config_for(estimator: str, **further: object) -> Any:
    return config_of(
        {"algorithm.adv_estimator": estimator, **PARTS.get(estimator, {}), **CORRECTION, **further}
    )


@pytest.mark.parametrize("elements", [1, 30, 10**9])
@pytest.mark.parametrize("estimator", NAMES)
def test_advantages_are_those_of_the_whole_batch(
    estimator: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 rows of 7 places in 10 groups: a block has one group, one or two, or all."""
    monkeypatch.setattr(train_batch, "_ELEMENTS", elements)
    config = config_for(estimator)
    step, scored, evaluations = step_inputs(config), INPUTS.scored, INPUTS.evaluations
    mask = scored.rollouts.response_mask
    at_ends = train_batch.outcome_rewards(scored.scores, mask)
    weights = None
    if "rollout_is_weights" in ADVANTAGE_ESTIMATORS[estimator].inputs:
        weights = step.batch.rollout_is_weights
    advantages, returns = compute_advantages(
        estimator,
        at_ends,
        mask,
        group_ids=scored.rollouts.group_ids,
        values=evaluations.critic_values,
        reward_baselines=scored.reward_baselines,
        component_scores=scored.component_scores,
        old_log_probs=evaluations.proximal_log_probs,
        sum_pi_squared=evaluations.sum_pi_squared,
        rollout_is_weights=weights,
    )
    torch.testing.assert_close(step.batch.advantages, advantages, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(step.returns, returns, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(step.rewards, at_ends.sum(-1))


@pytest.mark.parametrize("elements", [1, 30, 10**9])
def test_correction_is_that_of_the_whole_batch(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correction_batch, "_SLICE_ELEMENTS", elements)
    config = config_for("grpo")
    step, rollouts, evaluations = step_inputs(config), INPUTS.scored.rollouts, INPUTS.evaluations
    monkeypatch.undo()
    expected = compute_rollout_correction(
        evaluations.proximal_log_probs,
        rollouts.rollout_log_probs,
        rollouts.response_mask,
        config.algorithm.rollout_correction,
        advantages=step.batch.advantages,
        group_ids=rollouts.group_ids,
        scores=INPUTS.scored.scores,
        entropies=evaluations.entropies,
        sum_pi_squared=evaluations.sum_pi_squared,
        varentropies=evaluations.varentropies,
    )
    mask = rollouts.response_mask
    torch.testing.assert_close(step.batch.rollout_is_weights, expected.weights * mask, rtol=1e-6, atol=0)
    assert torch.equal(step.batch.loss_mask, mask & expected.keep_mask)
    assert torch.equal(step.correction.rejected_rows, expected.rejected_rows)
    metrics = expected.metrics()
    assert any(name.endswith("ess_applied_prompt") for name in metrics)
    assert step.correction.metrics() == {
        name: pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in metrics.items()
    }


def test_rows_that_are_left_out_of_a_baseline_are_left_out_of_whitening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_batch, "_ELEMENTS", 1)
    exclude = {"algorithm.rollout_correction.rejected_in_group_baseline": "exclude"}
    step = step_inputs(config_for("reinforce_plus_plus_baseline", **exclude))
    rejected = step.correction.rejected_rows
    assert 0 < rejected.sum() < ROWS
    assert not step.batch.advantages[rejected].any()
    values = step.batch.advantages[step.batch.response_mask & (step.batch.advantages != 0)]
    assert float(values.double().mean()) == pytest.approx(0, abs=1e-6)
    assert float(values.double().std()) == pytest.approx(1, abs=1e-5)


def test_blocks_have_each_row_once_whole_groups_and_no_more_places_than_they_may() -> None:
    rows = driver_inputs(config_for("grpo")).batch
    lengths = rows.lengths["BR"]
    for elements in (1, 10, 30, 10**9):
        blocks = rows.blocks(elements)
        assert sorted(row for block in blocks for row in block) == list(range(ROWS))
        assert all(len(block) == 1 or len(block) * max(lengths[block]) <= elements for block in blocks)
        groups = torch.arange(ROWS) // GROUP
        by_group = rows.blocks(elements, groups)
        assert all(len(block) == GROUP * len(groups[block].unique()) for block in by_group)
    padded = whole(rows)
    columns = [rows.pad(rows.advantages, block) for block in rows.blocks(10)]
    assert torch.equal(rows.flattened(rows.blocks(10), columns), rows.advantages)
    assert torch.equal(rows.row_sums(rows.response_mask), padded.response_mask.sum(-1))
    assert torch.equal(rows.row_sums(rows.advantages), padded.advantages.double().sum(-1))
    assert torch.equal(ragged(padded).advantages, rows.advantages)
