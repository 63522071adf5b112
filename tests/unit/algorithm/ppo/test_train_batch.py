"""From scored rollouts to the train batch: rejection changes the loss mask and nothing else."""

import math
from typing import Any

import pytest
import torch
from batches_of_ones import ones_rollouts
from ragged_rows import padded_critic_batch, padded_step_of

from verl_rc.algorithm.ppo.control import Control
from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.in_actor import OverRanks
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.algorithm.ppo.objective import ratio_denominator
from verl_rc.algorithm.ppo.train_batch import StepInputs, outcome_rewards
from verl_rc.config.algorithm import AlgorithmConfig, KlControlConfig
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionResult, correct_rows
from verl_rc.records.batches import PolicyEvaluations, RolloutBatch, TokenScores, positions_mask
from verl_rc.records.scored_batch import ScoredBatch

LENGTHS = torch.tensor([3, 2, 3, 1])
SCORES = torch.tensor([1.0, 0.0, 1.0, 1.0])


def make_rollouts(log_ratio_of_last_token: float = 0.0) -> tuple[RolloutBatch, PolicyEvaluations]:
    """Two groups of two rows; the last token of row 0 has the given log-ratio, all others agree."""
    mask = positions_mask(LENGTHS, 3)
    rollout = torch.where(mask, -1.0, 0.0)
    proximal = rollout.clone()
    proximal[0, 2] += log_ratio_of_last_token
    rollouts = ones_rollouts(rollout, LENGTHS, group=2)
    return rollouts, PolicyEvaluations(
        proximal_log_probs=proximal, entropies=torch.zeros(4, 3), batch_size=[4]
    )


def algorithm(**correction: object) -> AlgorithmConfig:
    config = RolloutCorrectionConfig.model_validate(correction)
    return AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False, rollout_correction=config)


def run_step(
    rollouts: RolloutBatch,
    evaluations: PolicyEvaluations,
    config: AlgorithmConfig,
    current_version: int = 0,
    max_token_age: int | None = None,
    by_age: bool = False,
) -> StepInputs:
    mode = corrector_of(config.rollout_correction, by_age)
    return padded_step_of(
        ScoredBatch(rollouts, SCORES),
        evaluations,
        config,
        mode,
        config.kl_ctrl.kl_coef,
        current_version,
        max_token_age,
    )


def test_scores_lie_on_the_last_token_of_the_mask() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
    rewards = outcome_rewards(torch.tensor([2.0, 3.0, 5.0]), mask)
    assert rewards.tolist() == [[0, 2, 0], [0, 0, 3], [0, 0, 0]]


def test_without_correction_everything_is_kept_and_unweighted() -> None:
    rollouts, evaluations = make_rollouts()
    step = run_step(rollouts, evaluations, algorithm())
    batch = step.batch
    assert batch.rollout_is_weights is None
    assert torch.equal(batch.loss_mask, batch.response_mask)
    assert batch.advantages[:, 0].tolist() == [0.5, -0.5, 0.0, 0.0]


def test_rejecting_the_last_token_loses_no_reward() -> None:
    rollouts, evaluations = make_rollouts(log_ratio_of_last_token=-2.0)
    rule = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}
    step = run_step(rollouts, evaluations, algorithm(**rule))
    batch = step.batch
    assert batch.loss_mask[0].tolist() == [True, True, False]
    assert torch.equal(batch.response_mask, rollouts.response_mask)
    assert batch.advantages[0].tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(("baseline", "other_advantage"), [("include", -0.5), ("exclude", 0.0)])
def test_a_rejected_row_in_its_groups_baseline(baseline: str, other_advantage: float) -> None:
    rollouts, evaluations = make_rollouts(log_ratio_of_last_token=-2.0)
    rule = {
        "rollout_rs": "seq_sum_k1",
        "rollout_rs_threshold": "0.5_2.0",
        "rejected_in_group_baseline": baseline,
    }
    step = run_step(rollouts, evaluations, algorithm(**rule))
    batch = step.batch
    assert not batch.loss_mask[0].any()
    assert float(batch.advantages[1, 0]) == other_advantage


@pytest.mark.parametrize("bypass", [False, True])
def test_a_token_from_a_set_that_is_not_recorded_leaves_the_loss_and_nothing_else(bypass: bool) -> None:
    rollouts, evaluations = make_rollouts()
    rollouts.tokens.support_counts = torch.where(rollouts.response_mask, 2, 0)
    rollouts.tokens.support_counts[0, 1] = 0
    rollouts.tokens.support_ids = torch.zeros(4, 6, dtype=torch.int32)
    batch = run_step(rollouts, evaluations, algorithm(bypass_mode=bypass)).batch
    expected = rollouts.response_mask.clone()
    expected[0, 1] = False
    assert torch.equal(batch.loss_mask, expected)
    assert torch.equal(batch.response_mask, rollouts.response_mask)
    assert batch.advantages[0].tolist() == [0.5, 0.5, 0.5]


def test_a_token_from_a_set_that_is_not_recorded_is_compared_with_nothing() -> None:
    """Its log-probs are of two distributions: whatever the engine reported, statistics and weights stay."""
    found = []
    for log_ratio in (0.0, -4.0):
        rollouts, evaluations = make_rollouts(log_ratio_of_last_token=log_ratio)
        rollouts.tokens.support_counts = torch.where(rollouts.response_mask, 2, 0)
        rollouts.tokens.support_counts[0, 2] = 0
        rollouts.tokens.support_ids = torch.zeros(4, 6, dtype=torch.int32)
        step = run_step(rollouts, evaluations, algorithm(rollout_is="sequence"))
        assert step.correction is not None
        found.append((step.batch.rollout_is_weights, step.correction.metrics()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_sequence_weights_are_products_of_token_ratios() -> None:
    rollouts, evaluations = make_rollouts(log_ratio_of_last_token=-0.5)
    step = run_step(rollouts, evaluations, algorithm(rollout_is="sequence"))
    batch, correction = step.batch, step.correction
    assert correction is not None
    assert batch.rollout_is_weights is not None
    torch.testing.assert_close(batch.rollout_is_weights[0], torch.full((3,), 0.60653067))
    assert correction.metrics()["rollout_corr/kl"] == pytest.approx(0.5 / 9)


@pytest.mark.parametrize("baseline", ["include", "exclude"])
def test_a_batch_that_is_wholly_a_step_old_has_age_1(baseline: str) -> None:
    rollouts, evaluations = make_rollouts()
    rollouts.policy_versions = torch.where(rollouts.response_mask, 4, -1)
    rule = {
        "rollout_rs": "seq_sum_k1",
        "rollout_rs_threshold": "0.5_2.0",
        "rejected_in_group_baseline": baseline,
    }
    step = run_step(
        rollouts, evaluations, algorithm(diagnostics="full", **rule), current_version=5, by_age=True
    )
    assert step.correction is not None
    metrics = step.correction.metrics()
    assert metrics["rollout_corr/token_age_mean"] == 1.0


@pytest.mark.parametrize("bypass", [False, True])
def test_an_asynchronous_run_measures_by_age_with_any_diagnostics(bypass: bool) -> None:
    rollouts, evaluations = make_rollouts()
    rollouts.policy_versions = torch.where(rollouts.response_mask, 4, -1)
    config = algorithm(diagnostics="core", bypass_mode=bypass)
    for by_age, ages in ((False, None), (True, 1.0)):
        step = run_step(rollouts, evaluations, config, current_version=5, by_age=by_age)
        measured = step.measured
        if bypass:
            mode = corrector_of(config.rollout_correction, by_age)
            correction = mode.during_update(5, 1, OverRanks(sum=lambda x: x, maximum=lambda x: x))
            current = rollouts.rollout_log_probs
            correction.correct(step.batch, TokenScores(current, torch.zeros_like(current)))
            correction.end_mini_batch(MiniBatch([[0, 1, 2, 3]], 9, 4, 9), 0)
            measured = correction.measured()
        assert measured is not None
        statistics = measured.statistics
        assert statistics.metrics(config.rollout_correction).get("rollout_corr/token_age_mean") == ages


def test_full_diagnostics_measure_the_noise_on_the_logits() -> None:
    """One token of nine with l = -1/2, and g = 1 - 2p + 2p = 1 for each: s = 1/2 / 3."""
    rollouts, evaluations = make_rollouts(log_ratio_of_last_token=-0.5)
    evaluations.sum_pi_squared = 2 * evaluations.proximal_log_probs.exp()
    evaluations.entropies = evaluations.varentropies = torch.zeros_like(evaluations.proximal_log_probs)
    rollouts.engines = torch.arange(len(evaluations.proximal_log_probs))
    metrics = {}
    for diagnostics in ("core", "full"):
        correction = run_step(rollouts, evaluations, algorithm(diagnostics=diagnostics)).correction
        assert correction is not None
        metrics[diagnostics] = correction.metrics()
    assert metrics["full"]["rollout_corr/logit_noise"] == pytest.approx(1 / 6)
    assert {"rollout_corr/temperature_slope", "rollout_corr/surprisal_excess_bound"} <= metrics["full"].keys()
    assert not {"rollout_corr/logit_noise", "rollout_corr/missing_mass"} & metrics["core"].keys()
    assert (
        sum(
            metrics["full"].get(f"rollout_corr/engine_{n}_logit_noise", 0.0) > 0
            for n in range(len(rollouts.engines))
        )
        == 1
    )


def test_the_kl_penalty_is_taken_from_each_token_and_averaged_over_rows() -> None:
    rollouts, evaluations = make_rollouts()
    evaluations.reference_log_probs = evaluations.proximal_log_probs - torch.tensor(
        [[0.4], [0.0], [0.2], [0.0]]
    )
    config = AlgorithmConfig(
        adv_estimator="grpo",
        use_kl_in_reward=True,
        kl_ctrl=KlControlConfig(kl_coef=0.5),
        norm_adv_by_std_in_grpo=False,
    )
    step = run_step(rollouts, evaluations, config)
    assert step.rewards.tolist() == pytest.approx([3 * -0.2 + 1, 0.0, 3 * -0.1 + 1, 1.0])
    assert step.reward_kl == pytest.approx((0.4 + 0.0 + 0.2 + 0.0) / 4)
    assert float(step.batch.advantages[0, 0]) == pytest.approx((0.4 - 0.0) / 2)


def test_in_bypass_mode_nothing_is_corrected_before_the_actor() -> None:
    rollouts, evaluations = make_rollouts(log_ratio_of_last_token=-2.0)
    rule = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0", "bypass_mode": True}
    step = run_step(rollouts, evaluations, algorithm(**rule))
    assert step.correction is None
    assert torch.equal(step.batch.loss_mask, rollouts.response_mask)
    assert step.batch.rollout_is_weights is None
    assert torch.equal(step.batch.rollout_log_probs, rollouts.rollout_log_probs)


@pytest.mark.parametrize("bypass", [False, True])
def test_the_ratio_divides_by_a_policy_named_by_its_role(bypass: bool) -> None:
    """By the trainer's before the update, or in bypass mode by the engine's."""
    rollouts, evaluations = make_rollouts(log_ratio_of_last_token=-0.5)
    trainer = evaluations.proximal_log_probs
    if bypass:
        evaluations.proximal_log_probs = None
    config = algorithm(bypass_mode=bypass)
    batch = run_step(rollouts, evaluations, config).batch
    current = torch.full_like(trainer, -9.0)
    denominator = ratio_denominator(batch, current, config.rollout_correction)
    assert torch.equal(denominator, rollouts.rollout_log_probs if bypass else trainer)
    neutral = algorithm(bypass_mode=bypass, nonfinite_logprob="neutral").rollout_correction
    denominator[0, 0] = torch.nan
    assert ratio_denominator(batch, current, neutral)[0].tolist() == [-9.0, *denominator[0, 1:].tolist()]


@pytest.mark.parametrize("mode", [{}, {"bypass_mode": True}, {"proximal": "interpolate"}])
@pytest.mark.parametrize("compares", [False, True])
def test_baselines_see_the_same_policy_in_every_step(mode: dict[str, object], compares: bool) -> None:
    """Interpolated log-probs are compared with the trainer's every 50th step: not a policy for that step
    alone."""
    rollouts, evaluations = make_rollouts(log_ratio_of_last_token=-0.5)
    trainer = evaluations.proximal_log_probs
    if mode and not compares:
        evaluations.proximal_log_probs = None
    scored = ScoredBatch(rollouts, SCORES)
    batch = estimated("functions_of_a_user:log_probs_before", scored, evaluations, **mode).batch
    assert torch.equal(batch.advantages, rollouts.rollout_log_probs if mode else trainer)


def test_gae_reads_the_critics_values_and_the_critic_learns_the_returns() -> None:
    rollouts, evaluations = make_rollouts()
    evaluations.critic_values = torch.where(rollouts.response_mask, 0.25, 0.0)
    step = run_step(rollouts, evaluations, AlgorithmConfig(adv_estimator="gae"))
    rows = padded_critic_batch(step)
    assert rows.returns[0].tolist() == [1.0, 1.0, 1.0]  # gamma = lam = 1: the score of the row
    assert rows.returns[1, :2].tolist() == [0.0, 0.0]
    assert torch.equal(rows.critic_values, evaluations.critic_values)


def estimated(
    name: str, scored: ScoredBatch, evaluations: PolicyEvaluations, **correction: object
) -> StepInputs:
    config = algorithm(**correction).model_copy(update={"adv_estimator": name})
    mode = corrector_of(config.rollout_correction)
    return padded_step_of(scored, evaluations, config, mode, config.kl_ctrl.kl_coef, current_version=0)


def test_remax_subtracts_the_greedy_score() -> None:
    rollouts, evaluations = make_rollouts()
    scored = ScoredBatch(rollouts, SCORES, reward_baselines=torch.tensor([0.25, 0.25, 2.0, 2.0]))
    batch = estimated("remax", scored, evaluations).batch
    assert batch.advantages[:, 0].tolist() == [0.75, -0.25, -1.0, -1.0]


def test_gdpo_adds_up_what_is_normalised_part_by_part() -> None:
    """Two parts that differ in their size alone count the same, and opposite ones cancel."""
    parts = torch.tensor([[1.0, 100.0], [0.0, 0.0], [1.0, 0.0], [0.0, 100.0]])
    rollouts, evaluations = make_rollouts()
    batch = estimated("gdpo", ScoredBatch(rollouts, SCORES, component_scores=parts), evaluations).batch
    first, second, third, fourth = batch.advantages[:, 0].tolist()
    assert third == pytest.approx(fourth, abs=1e-5)
    assert first - third == pytest.approx(third - second, abs=1e-5)
    assert first > third > second


@pytest.mark.parametrize("opsm", [None, 0.01])
def test_the_optimal_baseline_weighs_rows_by_their_squared_importance(opsm: float | None) -> None:
    """Equal probabilities: the weights of a group's rows at the first token are their squared importance
    weights.

    The importance weight of row 0 is e^0.5 at its first token, that of row 1 is 1; returns are 1 and 0.
    """
    rollouts, evaluations = make_rollouts()
    evaluations.proximal_log_probs[0, 0] += 0.5
    evaluations.sum_pi_squared = 2 * evaluations.proximal_log_probs.exp()  # 1 - 2 pi + sum pi^2 = 1
    correction = {"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_opsm_threshold": opsm}
    scored = ScoredBatch(rollouts, SCORES)
    step = estimated("optimal_token_baseline", scored, evaluations, **correction)
    weight = math.exp(1.0)
    baseline = weight / (weight + 1)
    assert step.batch.advantages[:2, 0].tolist() == pytest.approx([1 - baseline, -baseline], rel=1e-5)
    uncorrected = estimated("optimal_token_baseline", scored, evaluations)
    assert uncorrected.batch.advantages[:2, 0].tolist() == pytest.approx([0.5, -0.5], rel=1e-5)


def test_diagnostics_of_weights_for_a_baseline_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measuring(*arguments: Any, **facts: Any) -> CorrectionResult:
        measured.append(arguments[1].diagnostics)
        return correct_rows(*arguments, **facts)

    for module in ("train_batch", "corrector"):
        monkeypatch.setattr(f"verl_rc.algorithm.ppo.{module}.correct_rows", measuring)
    rollouts, evaluations = make_rollouts()
    evaluations.sum_pi_squared = evaluations.proximal_log_probs.exp()
    estimated("optimal_token_baseline", ScoredBatch(rollouts, SCORES), evaluations, rollout_is="token")
    assert measured == ["core", "full"]


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "optimal_token_baseline"])
def test_a_log_prob_that_is_no_number_costs_its_own_row_alone(estimator: str, broken: float) -> None:
    """The row is rejected; advantages of all rows, the penalty's mean and its weight stay numbers."""
    rollouts, evaluations = make_rollouts()
    evaluations.reference_log_probs = evaluations.proximal_log_probs - 0.5
    evaluations.sum_pi_squared = evaluations.proximal_log_probs.exp()
    evaluations.proximal_log_probs = evaluations.proximal_log_probs.clone()
    evaluations.proximal_log_probs[0, 1] = broken
    penalised = estimator != "optimal_token_baseline"
    config = AlgorithmConfig(
        adv_estimator=estimator,
        use_kl_in_reward=penalised,
        kl_ctrl=KlControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=10),
    )
    step = run_step(rollouts, evaluations, config)
    assert step.batch.advantages.isfinite().all()
    assert step.batch.loss_mask[0].sum() == 0
    assert step.batch.loss_mask[1:].sum() == rollouts.response_mask[1:].sum()
    if penalised:
        assert step.reward_kl is not None
        following = Control.from_config(config).after_penalty(step.reward_kl, 4)
        assert math.isfinite(following.kl_coef)
