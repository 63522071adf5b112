"""One worked value for each entry of the catalogue: inputs that can be read, and the number that the formula
gives by hand.

The numbers on the right are worked out from the catalogue's words. What computes them is the code that
reports the metric.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import numpy as np
import pytest
import torch
from formula_run import live, without_processes
from made_samples import sample as made_sample
from ragged_rows import ragged
from sound_run import sound_run
from table_engines import FILTER, make_run, sample

from verl_rc.algorithm.health.causes import name_causes
from verl_rc.algorithm.health.findings import Findings
from verl_rc.algorithm.health.ranges import CauseEpisode, CauseHistory, HealthHistory
from verl_rc.algorithm.losses import Aggregation, compute_policy_loss
from verl_rc.algorithm.ppo.batch_metrics import (
    batch_metrics,
    critic_metrics,
    policy_gap_metrics,
    version_metrics,
)
from verl_rc.algorithm.ppo.control import Control
from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.in_actor import Measured, OverRanks
from verl_rc.algorithm.ppo.objective import policy_objective, value_objective
from verl_rc.algorithm.ppo.train_batch import StepInputs, _rewards
from verl_rc.algorithm.rewards.sample import RewardOutput
from verl_rc.algorithm.supply.group_book import AdmissionRule, BookState, GroupBook, GroupTotals
from verl_rc.config import RolloutCorrectionConfig
from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.load import load_run_config
from verl_rc.config.models import ActorConfig
from verl_rc.config.run import AlertsConfig
from verl_rc.correction import compute_rollout_correction, measure
from verl_rc.insight.run_folder.token_metrics import metrics_of
from verl_rc.metrics import reduce_metrics
from verl_rc.metrics.catalog import CATALOG
from verl_rc.metrics.splits import STAGES
from verl_rc.records.batches import (
    CriticBatch,
    PolicyEvaluations,
    RolloutBatch,
    Timed,
    TokenBatch,
    TokenScores,
    TrainBatch,
)
from verl_rc.records.episode import Reply
from verl_rc.records.heads import head_column
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.records.parts import Sample
from verl_rc.records.ragged_column import RaggedColumn
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.records.token_records.token_rows import record_of_rows
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.rollout.engine import Interrupted
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.sampling import GenerationRequest
from verl_rc.runtime.weight_sync.manifest import Manifest, TensorSpec
from verl_rc.runtime.weight_sync.proof import GapLimit
from verl_rc.runtime.weight_sync.survival import EngineRounding
from verl_rc.runtime.workers.critic_worker import CriticWorker
from verl_rc.runtime.workers.forward import ForwardOptions
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.model_flops import ModelFlops
from verl_rc.runtime.workers.packing import PrefixSharing
from verl_rc.runtime.workers.policy_worker import PolicyWorker, memory_metrics
from verl_rc.runtime.workers.updates import ActorReport, UpdateRequest
from verl_rc.trainer.evaluate import validation_metrics
from verl_rc.trainer.guards import Guards
from verl_rc.trainer.judge import record_and_judge, record_correction
from verl_rc.trainer.scoring import FAILURE_COLUMN, extra_columns, reward_metrics
from verl_rc.trainer.stages import correct, update_actor
from verl_rc.trainer.step_record import Step, StepRecord, StepTokens, stages_with_flops
from verl_rc.trainer.supply.scored_groups import environment_call_metrics, environment_metrics
from verl_rc.trainer.supply.supply_progress import StepTotals, SupplyProgress, age_metrics
from verl_rc.trainer.weights import Publisher, pause_metrics

Example = Callable[[], tuple[Mapping[str, float], Mapping[str, float]]]
"""What the code reports, and what it must be, by name."""
EXAMPLES: list[Example] = []

LN2 = math.log(2)
APPROXIMATE = ("_p1", "_p50", "_p99", "surprisal_excess_bound")
"""Ends of names whose numbers come from a histogram, within 4 %."""


def example(function: Example) -> Example:
    """Adds a function to ``EXAMPLES``."""
    EXAMPLES.append(function)
    return function


# Three sequences of 2, 1 and 1 tokens. Probability of each token under rollout and under train, and their
# ratio:
#   1/4 -> 1/4: 1      1/2 -> 1/8: 1/4        1/8 -> 1/2: 4        1/2 -> 1/8: 1/4
# The products of the sequences are 1/4, 4 and 1/4, the log-ratios 0, -2 ln 2, 2 ln 2, -2 ln 2.
ROLLOUT = torch.tensor([[1 / 4, 1 / 2], [1 / 8, 1.0], [1 / 2, 1.0]], dtype=torch.float64).log()
TRAIN = torch.tensor([[1 / 4, 1 / 8], [1 / 2, 1.0], [1 / 8, 1.0]], dtype=torch.float64).log()
RESPONSE = torch.tensor([[True, True], [True, False], [True, False]])


def corrected(**fields: Any) -> dict[str, float]:
    facts = {
        name: fields.pop(name)
        for name in ("advantages", "group_ids", "policy_versions", "scores")
        if name in fields
    }
    return compute_rollout_correction(TRAIN, ROLLOUT, RESPONSE, fields, **facts).metrics()


def under(prefix: str, numbers: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in numbers.items()}


@example
def gap_of_tokens_and_sequences():
    return corrected(), under(
        "rollout_corr/",
        {
            "training_log_ppl": (2.5 + 1 + 3) / 3 * LN2,
            "rollout_log_ppl": (1.5 + 3 + 1) / 3 * LN2,
            "training_ppl": (2**2.5 + 2 + 8) / 3,
            "rollout_ppl": (2**1.5 + 8 + 2) / 3,
            "log_ppl_diff": (1 - 2 + 2) / 3 * LN2,
            "log_ppl_abs_diff": (1 + 2 + 2) / 3 * LN2,
            "log_ppl_diff_max": 2 * LN2,
            "log_ppl_diff_min": -2 * LN2,
            "ppl_ratio": (2 + 1 / 4 + 4) / 3,
            "kl": (0 + 2 - 2 + 2) / 4 * LN2,
            "k3_kl": (1 + 1 / 4 + 4 + 1 / 4 + 2 * LN2 - 4) / 4,
            "chi2_token": (1 + 1 / 16 + 16 + 1 / 16) / 4 - 1,
            "chi2_seq": (1 / 16 + 16 + 1 / 16) / 3 - 1,
        },
    )


@example
def token_weights_truncated_at_2():
    """The weights are 1, 1/4, 2 and 1/4; their means over the sequences 5/8, 2 and 1/4."""
    found = corrected(rollout_is="token", rollout_is_threshold=2.0, rollout_is_batch_normalize=True)
    return found, under(
        "rollout_corr/rollout_is_",
        {
            "mean": 3.5 / 4,
            "std": math.sqrt(5.125 / 4 - (3.5 / 4) ** 2),
            "min": 1 / 4,
            "max": 2,
            "eff_sample_size": 3.5**2 / (4 * 5.125),
            "ratio_fraction_high": 1 / 4,
            "ratio_fraction_low": 2 / 4,
            "seq_mean": (5 / 8 + 2 + 1 / 4) / 3,
            "seq_std": statistics.stdev([5 / 8, 2, 1 / 4]),
            "seq_max": 2,
            "seq_min": 1 / 4,
            "seq_max_deviation": 1,
            "seq_fraction_high": 1 / 3,
            "seq_fraction_low": 1 / 3,
            "batch_norm_factor": 3.5 / 4,
        },
    )


@example
def token_weights_in_a_band():
    """The weights are 1, 0, 0 and 0: what the band cuts counts as 0 in the spread, not as its bound."""
    found = corrected(rollout_is="token", rollout_is_threshold="0.5_2.0")
    return found, under(
        "rollout_corr/rollout_is_", {"oob_ratio": 3 / 4, "std": math.sqrt(1 / 4 - 1 / 16), "max": 1, "min": 0}
    )


@example
def a_rule_on_tokens():
    """Statistics 0, 2 ln 2, -2 ln 2, 2 ln 2; bounds -ln 2.5 and ln 2.5; means of the sequences ln 2, -2 ln 2,
    2 ln 2."""
    found = corrected(rollout_rs="token_k1", rollout_rs_threshold="0.4_2.5")
    rule = {
        "mean": (0 + 2 - 2 + 2) / 4 * LN2,
        "std": statistics.pstdev([0, 1, -1, 1]) * math.log(2.5),
        "max": 2 * LN2,
        "min": -2 * LN2,
        "fraction_high": 1 / 4,
        "fraction_low": 2 / 4,
        "seq_mean": (1 - 2 + 2) / 3 * LN2,
        "seq_std": statistics.stdev([1, -2, 2]) * LN2,
        "seq_max": 2 * LN2,
        "seq_min": -2 * LN2,
        "seq_max_deviation": 2 * LN2,
        "seq_fraction_high": 1 / 3,
        "seq_fraction_low": 1 / 3,
        "masked_fraction": 3 / 4,
        "seq_masked_fraction": 1,
    }
    whole = {"masked_fraction": 3 / 4, "seq_masked_fraction": 1, "seq_rejected_fraction": 2 / 3}
    return found, under("rollout_corr/rollout_rs_token_k1_", rule) | under("rollout_corr/rollout_rs_", whole)


@example
def veto():
    found = corrected(rollout_rs="token_k1", rollout_rs_threshold="0.1_9.0", rollout_token_veto_threshold=0.3)
    return found, {
        "rollout_corr/rollout_is_veto_fraction": 2 / 3,
        "rollout_corr/rollout_is_catastrophic_token_fraction": 2 / 4,
    }


@example
def log_probs_that_are_extreme_or_not_finite():
    train = torch.tensor([[-26.0, -1.0], [math.nan, -1.0]], dtype=torch.float64)
    config = {"diagnostics": "full", "nonfinite_logprob": "reject_token"}
    found = compute_rollout_correction(
        train, torch.full_like(train, -1.0), torch.ones(2, 2), config
    ).metrics()
    return found, under(
        "rollout_corr/",
        {
            "nonfinite_token_fraction": 1 / 4,
            "safety_clamped_fraction": 1 / 3,
        },
    )


@example
def full_diagnostics_of_tokens():
    """Two prompts, of two sequences and of one. The newest version is 5, so the tokens' ages are 0, 1, 2 and
    0."""
    found = corrected(
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token_k1,seq_mean_k1",
        rollout_rs_threshold="0.4_2.5,0.4_2.5",
        diagnostics="full",
        group_ids=["a", "a", "b"],
        policy_versions=torch.tensor([[5, 4], [3, 0], [5, 0]]),
        scores=torch.tensor([3.0, 0.0, 2.0]),
    )
    return found, under(
        "rollout_corr/",
        {
            "log_ratio_p1": -2 * LN2,
            "rollout_is_raw_mean": 5.5 / 4,
            "rollout_is_p99": 4,
            "rollout_is_ess_raw_token": 5.5**2 / (4 * 17.125),
            "rollout_is_ess_applied_prompt": (1.3125 + 0.25) ** 2 / (2 * (1.3125**2 + 0.25**2)),
            "kept_fraction_correct": 1 / 3,
            "kept_score_mean": 3,
            "rejected_score_mean": (0 + 2) / 2,
            "token_age_mean": (0 + 1 + 2 + 0) / 4,
            "age_0_k3_kl": (1 / 4 + 2 * LN2 - 1) / 2,
            "age_0_rejected_fraction": 1 / 2,
        },
    )


@example
def turns_with_tool_output_between():
    log_ratio = torch.tensor([[1.0, 9.0, -0.5, 0.5]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True]])
    found = compute_rollout_correction(
        log_ratio - 9, torch.full_like(log_ratio, -9.0), mask, {"diagnostics": "full"}
    ).metrics()
    return found, under(
        "rollout_corr/",
        {
            "turn_0_k3_kl": math.e - 2,
            "turn_1_k3_kl": (math.exp(-0.5) + 0.5 - 1 + math.exp(0.5) - 0.5 - 1) / 2,
        },
    )


TOKENS = TokenBatch(
    prompts=torch.ones(3, 3, dtype=torch.int64),
    prompt_lengths=torch.tensor([2, 1, 3]),
    responses=torch.ones(3, 3, dtype=torch.int64),
    response_lengths=torch.tensor([3, 2, 1]),
    batch_size=[3],
)
MASK = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])


def train_batch(**fields: Any) -> TrainBatch:
    zeros = torch.zeros(MASK.shape)
    given = dict.fromkeys(("old_log_probs", "rollout_log_probs", "advantages"), zeros)
    given |= {"policy_versions": torch.where(MASK, 0, -1), "scores": torch.zeros(3)} | fields
    return TrainBatch(tokens=TOKENS, response_mask=MASK, loss_mask=MASK, **given, batch_size=[3])


OF_ROLLOUTS = {
    "rollout_log_probs": torch.full((1, 4), -5.0),
    "policy_versions": torch.zeros(1, 4, dtype=torch.int64),
    "scores": torch.zeros(1),
}


def rollout_batch(**fields: Any) -> RolloutBatch:
    return RolloutBatch(
        **{"tokens": TOKENS, "response_mask": MASK, "rollout_log_probs": torch.zeros(MASK.shape)} | fields,
        policy_versions=torch.zeros(MASK.shape, dtype=torch.int64),
        group_ids=torch.arange(3),
        finished=torch.ones(3, dtype=torch.bool),
        batch_size=[3],
    )


def step_of(
    record: StepRecord,
    config: RolloutCorrectionConfig | None = None,
    kl_coef: float = 0.0,
    rejection_threshold: float | None = None,
) -> Step:
    control = Control(Mock(), kl_coef, rejection_threshold)
    return Step(1, control, corrector_of(config or RolloutCorrectionConfig()), record)


@example
def lengths_scores_advantages():
    batch = train_batch(
        advantages=torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0], [2.0, 0.0, 0.0]]),
    )
    returns = torch.tensor([[3.0, 2.0, 1.0], [0.0, 0.0, 9.0], [6.0, 9.0, 9.0]])
    rewards = torch.tensor([[0.0, 0.0, 0.5], [-1.0, 1.0, 0.0], [4.0, 0.0, 0.0]])
    rollouts = rollout_batch(num_turns=torch.tensor([2, 4, 6]), tool_calls=torch.tensor([0, 1, 5]))
    sizes = torch.tensor([[3, 1, 1], [0, 6, 0], [1, 0, 0]])
    rollouts.tokens = TOKENS.clone()
    rollouts.tokens.support_counts, rollouts.tokens.support_ids = sizes, torch.zeros(3, 6, dtype=torch.int32)
    rollouts.tokens.experts_counts = torch.tensor([[4, 4, 0], [4, 4, 0], [0, 0, 0]])
    scored = ScoredBatch(ragged(rollouts), torch.tensor([1.0, 0.0, 5.0]))
    evaluations = scored.rollouts.become(PolicyEvaluations)
    step = StepInputs(scored, evaluations, ragged(batch), None, rewards.sum(-1), returns[MASK], None)
    found = batch_metrics(step, 3, 3)
    spreads = {
        "critic/score": (2, 5, 0),
        "critic/rewards": (1.5, 4, 0),
        "critic/advantages": (0.5, 2, -1),
        "critic/returns": (2, 6, 0),
        "response_length": (2, 3, 1),
        "prompt_length": (2, 3, 1),
        "global_seqlen": (4, 5, 3),
        "num_turns": (4, 6, 2),
        "tool_call_counts": (2, 5, 0),
    }
    expected = {
        f"{name}/{end}": value
        for name, values in spreads.items()
        for end, value in zip(("mean", "max", "min"), values, strict=True)
    }
    shares = {"response_length/clip_ratio": 1 / 3, "prompt_length/clip_ratio": 1 / 3}
    further = {
        "perf/total_num_tokens": 12,
        "support/unrecorded_ratio": 1 / 6,
        "rollout/routed_fraction": 4 / 6,
    }
    return found, {**expected, **shares, **further}


@example
def probabilities_and_entropy_of_the_proximal_policy():
    """Probabilities 1/2, 1/4, 1/2 under the trainer and 1/4, 1/4, 1/2 under the engine."""
    mask = torch.tensor([[True, True, True], [False, False, False], [False, False, False]])
    old, rollout = torch.zeros(3, 3), torch.zeros(3, 3)
    old[0], rollout[0] = torch.tensor([1 / 2, 1 / 4, 1 / 2]).log(), torch.tensor([1 / 4, 1 / 4, 1 / 2]).log()
    entropies = torch.full((3, 3), 9.0)
    entropies[0] = torch.tensor([1.0, 2.0, 6.0])
    evaluations = PolicyEvaluations(proximal_log_probs=old, entropies=entropies, batch_size=[3])
    rollouts = ragged(rollout_batch(response_mask=mask, rollout_log_probs=rollout))
    found = policy_gap_metrics(rollouts, ragged(evaluations, lengths=rollouts.lengths))
    return found, {
        "actor/entropy": 3,
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_mean": 1 / 12,
        "training/rollout_probs_diff_max": 1 / 4,
        "training/rollout_probs_diff_std": statistics.pstdev([1 / 4, 0, 0]),
        "training/rollout_actor_probs_pearson_corr": 1 / 2,
    }


def one_row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


ROW = TokenBatch(
    prompts=torch.ones(1, 1, dtype=torch.int64),
    prompt_lengths=torch.tensor([1]),
    responses=torch.ones(1, 4, dtype=torch.int64),
    response_lengths=torch.tensor([4]),
    batch_size=[1],
)


def reported(totals: ObjectiveTotals) -> dict[str, float]:
    return reduce_metrics(totals.metrics(is_first_rank=True))


@example
def the_actors_loss():
    """Ratios 3/2, 1/2, 4, 1 and advantages 1, -1, -1, 1 give -1.2 (clipped), 0.8 (clipped), 3 (dual clip) and
    -1."""
    further = ["entropy_coeff=0.1", "use_kl_loss=True", "kl_loss_coef=0.5", "kl_loss_type=mse"]
    config = load_run_config([*sound_run(), *(f"actor_rollout_ref.actor.{setting}" for setting in further)])
    current, everything = one_row(3 / 2, 1 / 2, 4, 1).log() - 5, torch.ones(1, 4, dtype=torch.bool)
    batch = TrainBatch(
        tokens=ROW,
        response_mask=everything,
        loss_mask=everything,
        old_log_probs=one_row(-5, -5, -5, -5),
        **OF_ROLLOUTS,
        advantages=one_row(1, -1, -1, 1),
        reference_log_probs=current - one_row(1, 1, 2, 0),
        batch_size=[1],
    )
    correction = config.algorithm.rollout_correction
    objective = policy_objective(
        TokenScores(current, one_row(1, 2, 3, 4)),
        batch,
        config.actor_rollout_ref.actor,
        correction,
        Aggregation("token-mean"),
    )
    totals = ObjectiveTotals("actor")
    for norm in (1.0, 3.0, 2.0):
        totals.add(objective)
        totals.steps.append(OptimizerStep(norm))
    return reported(totals), {
        "actor/pg_loss": (-1.2 + 0.8 + 3 - 1) / 4,
        "actor/entropy_loss": 2.5,
        "actor/kl_loss": (1 / 2 + 1 / 2 + 2 + 0) / 4,
        "actor/loss": 0.4 - 0.1 * 2.5 + 0.5 * 0.75,
        "actor/pg_clipfrac": 2 / 4,
        "actor/pg_clipfrac_lower": 1 / 4,
        "actor/ppo_kl": -math.log(3 / 2 * 1 / 2 * 4) / 4,
        "actor/grad_norm": 2,
    }


@example
def a_clip_range_that_adapts():
    """Of two tokens one has A = 1 and ratio 1.5, the other A = −1 and ratio 1/2, which counts as the lower
    end: 1.2 is less than 2.5 times 0.6. The lower end goes to 0.9 then, and the upper one to its own."""
    old = torch.tensor([[-1.0, -1.0]])
    _, metrics = compute_policy_loss(
        "bapo",
        old,
        old + torch.tensor([[math.log(1.5), math.log(0.5)]]),
        torch.tensor([[1.0, -1.0]]),
        torch.ones(1, 2, dtype=torch.bool),
        config={"adv_ratio_target": 2.5},
    )
    found = {name: float(mean.value) for name, mean in metrics.items() if "ratio_" in name}
    return found, {"actor/ratio_low": 0.9, "actor/ratio_high": 3.0}


@example
def the_teachers_term():
    """Log-ratios to the teacher of 1, -1/2, -2 and 0 give advantages of -1, 1/2, 3/2 (clamped) and 0; with
    ratios of 3/2, 1/2, 4, 1 losses of 1.5, -0.25, -1.8 (clipped) and 0."""
    teacher = "distillation.distillation_loss"
    settings = [
        f"{teacher}.loss_mode=k1",
        f"{teacher}.use_policy_gradient=True",
        f"{teacher}.loss_max_clamp=1.5",
    ]
    path = "distillation.teacher_models.teacher_model.model_path=org/teacher"
    config = load_run_config([*sound_run(), "distillation.enabled=True", path, *settings])
    current, everything = one_row(3 / 2, 1 / 2, 4, 1).log() - 5, torch.ones(1, 4, dtype=torch.bool)
    batch = TrainBatch(
        tokens=ROW,
        response_mask=everything,
        loss_mask=everything,
        old_log_probs=one_row(-5, -5, -5, -5),
        **OF_ROLLOUTS,
        advantages=one_row(0, 0, 0, 0),
        teacher_log_probs=current - one_row(1, -1 / 2, -2, 0),
        batch_size=[1],
    )
    objective = policy_objective(
        TokenScores(current, None),
        batch,
        config.actor_rollout_ref.actor,
        config.algorithm.rollout_correction,
        Aggregation("token-mean"),
        distillation=config.distillation.loss,
    )
    found = {name: float(term) for name, term in objective.terms.items()}
    found |= {name: float(mean.value) for name, mean in objective.averages.items()}
    return {name: value for name, value in found.items() if name.startswith("distillation/")}, {
        "distillation/loss": (1.5 - 0.25 - 1.8 + 0) / 4,
        "distillation/reverse_kl": (1 - 1 / 2 - 2 + 0) / 4,
        "distillation/abs_loss": (1 + 1 / 2 + 2 + 0) / 4,
        "distillation/clamped_fraction": 1 / 4,
        "distillation/pg_clipfrac": 1 / 4,
        "distillation/pg_clipfrac_lower": 0,
        "distillation/ppo_kl": -math.log(3 / 2 * 1 / 2 * 4) / 4,
        "distillation/ppo_kl_clamped_fraction": 0,
    }


@example
def the_words_that_the_teacher_finds_most_likely():
    """Two words of a teacher at 1/2 and 1/4, which the policy gives 1/4 and 1/4 in all four places: 1/2 log 2
    each."""
    teacher = "distillation.distillation_loss"
    path = "distillation.teacher_models.teacher_model.model_path=org/teacher"
    settings = [f"{teacher}.loss_mode=forward_kl_topk", f"{teacher}.topk=2"]
    config = load_run_config([*sound_run(), "distillation.enabled=True", path, *settings])
    sampled, everything = one_row(-5, -5, -5, -5), torch.ones(1, 4, dtype=torch.bool)
    batch = TrainBatch(
        tokens=ROW,
        response_mask=everything,
        loss_mask=everything,
        old_log_probs=sampled,
        **OF_ROLLOUTS,
        advantages=one_row(0, 0, 0, 0),
        teacher_log_probs=sampled,
        teacher_top_ids=torch.tensor([3, 1], dtype=torch.int32).expand(1, 4, 2),
        teacher_top_log_probs=torch.tensor([1 / 2, 1 / 4]).log().expand(1, 4, 2),
        batch_size=[1],
    )
    objective = policy_objective(
        TokenScores(sampled, None, candidate_log_probs=torch.full((1, 4, 2), math.log(1 / 4))),
        batch,
        config.actor_rollout_ref.actor,
        config.algorithm.rollout_correction,
        Aggregation("token-mean"),
        distillation=config.distillation.loss,
    )
    found = {name: float(objective.averages[name].value) for name in objective.averages}
    masses = {name: value for name, value in found.items() if name.endswith("_mass")}
    assert float(objective.terms["distillation/loss"]) == pytest.approx(math.log(2) / 2)
    return masses, {"distillation/student_mass": 1 / 2, "distillation/teacher_mass": 3 / 4}


@example
def a_loss_that_is_centered():
    """The engine gives 1/2 to token 3 and 1/4 to token 1, the policy 1/4 to each; the rest is of one other.
    With an advantage of 2 the term is 2 Σ q log p of the three."""
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    reinforce = "algorithm.rollout_correction.loss_type=reinforce"
    centered = "algorithm.rollout_correction.score_centering.enabled=True"
    config = load_run_config([*sound_run(), bypass, reinforce, centered])
    one = torch.tensor([[True, False, False, False]])
    column = head_column(np.array([[3, 1]]), np.log([[1 / 2, 1 / 4]]))
    tokens = ROW.clone()
    tokens.head_counts = torch.tensor([[4, 0, 0, 0]])
    tokens.head_ids = torch.from_numpy(column.values)[None]
    batch = TrainBatch(
        tokens=tokens,
        response_mask=one,
        loss_mask=one,
        old_log_probs=one_row(-5, 0, 0, 0),
        **OF_ROLLOUTS,
        advantages=one_row(2, 0, 0, 0),
        batch_size=[1],
    )
    current = TokenScores(one_row(-5, 0, 0, 0), None, candidate_log_probs=torch.full((1, 4, 2), -2 * LN2))
    correction = config.algorithm.rollout_correction
    objective = policy_objective(
        current, batch, config.actor_rollout_ref.actor, correction, Aggregation("token-mean", num_tokens=1)
    )
    found = {name: float(one.value) for name, one in objective.averages.items()}
    found["actor/pg_loss"] = float(objective.terms["actor/pg_loss"])
    expected = {
        "rollout_corr/centering_head_mass": 3 / 4,
        "rollout_corr/drift_norm": math.sqrt(1 / 16 + 1 / 16),
        "actor/pg_loss": 2 * 5 + 2 * (1 / 2 * -2 * LN2 + 1 / 4 * -2 * LN2 + 1 / 4 * -LN2),
    }
    return {name: found[name] for name in expected}, expected


@example
def the_entropy_of_the_policy_that_is_updated():
    """In bypass mode nothing knows the entropy before the update. One of three tokens would take other
    experts."""
    config = load_run_config([*sound_run(), "algorithm.rollout_correction.bypass_mode=True"])
    correction = config.algorithm.rollout_correction
    mask = torch.tensor([[True, True, True, False]])
    batch = TrainBatch(
        tokens=ROW,
        response_mask=mask,
        loss_mask=mask,
        old_log_probs=torch.zeros(1, 4),
        **OF_ROLLOUTS,
        advantages=torch.zeros(1, 4),
        batch_size=[1],
    )
    current = TokenScores(
        torch.zeros(1, 4),
        torch.tensor([[1.0, 2.0, 6.0, 50.0]]),
        torch.ones(1, 4),
        flipped_experts=one_row(1, 0, 0, 1),
    )
    ranks = OverRanks(sum=lambda tensor: tensor, maximum=lambda tensor: tensor)
    part, averages = corrector_of(correction).during_update(0, 1, ranks).correct(batch, current)
    objective = policy_objective(
        current, part, config.actor_rollout_ref.actor, correction, Aggregation("token-mean")
    )
    found = {**averages, **objective.averages}
    names = ("actor/update_entropy", "actor/flipped_experts")
    return {name: float(found[name].value) for name in names}, {
        "actor/update_entropy": 3,
        "actor/flipped_experts": 1 / 3,
    }


@example
def a_log_ratio_beyond_the_bound():
    mask = torch.ones(1, 2, dtype=torch.bool)
    _, metrics = compute_policy_loss(
        "vanilla", torch.tensor([[-1.0, -30.0]]), torch.full((1, 2), -1.0), torch.ones(1, 2), mask
    )
    found = {name: float(metric.value) for name, metric in metrics.items()}
    return found, {"actor/ppo_kl_clamped_fraction": 1 / 2, "actor/ppo_kl": -20 / 2}


@example
def the_critics_loss():
    """Values 1 and 1 after 0 and 1, returns 1 and 3, clip range 1/2: errors 0 or 1/4 (clipped), and 4."""
    config = load_run_config([*sound_run("gae"), "critic.cliprange_value=0.5", "critic.model.path=m"]).critic
    mask = torch.tensor([[True, True, False, False]])
    batch = CriticBatch(
        tokens=ROW,
        response_mask=mask,
        critic_values=one_row(0, 1, 9, 9),
        returns=one_row(1, 3, 9, 9),
        batch_size=[1],
    )
    totals = ObjectiveTotals("critic")
    totals.add(value_objective(one_row(1, 1, 7, 7), batch, config, Aggregation("token-mean")))
    totals.steps.append(OptimizerStep(2.5))
    expected = {
        "critic/vf_loss": (1 / 4 + 4) / 2 / 2,
        "critic/vf_clipfrac": 1 / 2,
        "critic/vpred_mean": 1,
        "critic/grad_norm": 2.5,
        "critic/vf_explained_var": 1 - (1 / 2) / (2 + 1e-5),
        "critic/values/mean": 1 / 2,
        "critic/values/max": 1,
        "critic/values/min": 0,
    }
    return {**reported(totals), **critic_metrics(ragged(batch))}, expected


@example
def gradients_that_are_not_finite():
    found = {}
    for role in ("actor", "critic"):
        totals = ObjectiveTotals(role)
        for norm in (1.0, math.nan, math.inf):
            totals.steps.append(OptimizerStep(norm))
        found |= reported(totals)
    return found, {"actor/nonfinite_gradients": 2, "critic/nonfinite_gradients": 2}


@example
def float16_overflows():
    """Scales 4 and 2 were too large, at 1 the gradient itself is infinite; an overflow has no norm."""
    found = {}
    for role in ("actor", "critic"):
        totals = ObjectiveTotals(role)
        for norm, scale in ((math.inf, 4.0), (math.nan, 2.0), (math.inf, 1.0), (3.0, 1.0)):
            totals.steps.append(OptimizerStep(norm, scale))
        found |= reported(totals)
    values = {"loss_scale": 1, "overflowed_updates": 2, "nonfinite_gradients": 1, "grad_norm": math.inf}
    return found, {f"{role}/{name}": value for role in ("actor", "critic") for name, value in values.items()}


@example
def rewards_that_fail_and_columns():
    outputs = [
        RewardOutput(1.0, {"acc": 1.0}),
        RewardOutput(0.0, {"acc": 0.0}),
        RewardOutput(0.0, {FAILURE_COLUMN: "x"}),
    ]
    outputs.append(RewardOutput(2.0, {"acc": 0.5}))
    found = reduce_metrics(reward_metrics(extra_columns(outputs), len(outputs)))
    expected = {
        "reward/failed_fraction": 1 / 4,
        "reward/acc/mean": 1 / 2,
        "reward/acc/max": 1,
        "reward/acc/min": 0,
    }
    return found, expected


@example
def numbers_of_an_environment():
    columns = {"env/guesses": [1.0, None, 4.0], "env/none": [None] * 3, "acc": [1.0, 0.0, 0.0]}
    expected = {"env/guesses/mean": 5 / 2, "env/guesses/max": 4, "env/guesses/min": 1}
    return environment_metrics(columns), expected


@example
def environments_that_fail_and_are_waited_for():
    """Two episodes wait 1 + 2 and 0.5 seconds; one call is made twice. In a step one of two groups fails to
    open once, and two hosts are lost."""
    episodes = [
        [Reply(done=True, waited=1.0, asked_again=1), Reply(done=True, waited=2.0)],
        [Reply(done=True, waited=0.5)],
    ]
    waiting = {"wait_s/mean": 3.5 / 2, "wait_s/max": 3, "wait_s/min": 0.5, "calls_again": 1}
    environment = "actor_rollout_ref.rollout.environment"
    run, failed = make_run(f"{environment}.name=a:B", f"{environment}.hosts=2"), iter([EpisodeFailedError()])
    run.openings = SimpleNamespace(
        open=lambda rows: [next(failed, row) for row, _ in rows], hosts=SimpleNamespace(count_lost=lambda: 2)
    )
    _, found = sample(run)
    return {**found, **environment_call_metrics(episodes)}, under(
        "env/", {**waiting, "failures": 1, "hosts_lost": 2}
    )


@example
def validation_by_two_samples_of_a_prompt():
    """One prompt: accuracies 0 and 1, answers a and b. Of two drawn with replacement the better is 1 in three
    of four cases."""
    rows, scores = [SimpleNamespace(data_source="d", row_index=0)] * 2, torch.tensor([0.0, 2.0])
    found = validation_metrics(
        SimpleNamespace(rows=rows, scores=scores, extras={"acc": [0.0, 1.0], "pred": ["a", "b"]}), 2
    )
    found |= {
        name.replace("/d/", "/e/"): value
        for name, value in validation_metrics(
            SimpleNamespace(rows=rows, scores=scores, extras={"pred": ["a", "b"]}), 2
        ).items()
    }
    std = math.sqrt(3 / 4 * 1 / 4)
    return found, {
        "val-core/d/acc/mean@2": 1 / 2,
        "val-core/d/acc/best@2/mean": 3 / 4,
        "val-core/d/acc/maj@2/mean": 1 / 2,
        "val-core/e/reward/mean@2": 1,
        "val-core/e/reward/best@2/mean": 3 / 2,
        "val-core/e/reward/maj@2/mean": 1,
        "val-aux/d/reward/mean@2": 1,
        "val-aux/d/acc/std@2": math.sqrt(1 / 2),
        "val-aux/d/reward/best@2/mean": 3 / 2,
        "val-aux/d/acc/best@2/std": std,
        "val-aux/d/acc/worst@2/mean": 1 / 4,
        "val-aux/d/acc/worst@2/std": std,
        "val-aux/d/reward/maj@2/mean": 1,
        "val-aux/d/acc/maj@2/std": 1 / 2,
    }


@example
def engine_against_trainer():
    services = MagicMock(gap_limit=GapLimit.for_precision("float32", fixed=0.5))
    services.config.algorithm.rollout_correction = config = RolloutCorrectionConfig()
    mask = torch.tensor([[True, True, False]])
    statistics = measure(torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -1.75, 9.0]]), mask, config)
    record = StepRecord()
    record_and_judge(
        services, Findings(None, HealthHistory()), Measured(statistics, statistics), step_of(record, config)
    )
    expected = {"sync/rollout_gap_mean": 0.375, "sync/rollout_gap_max": 0.5, "sync/gap_limit": 0.5}
    return {name: record.metrics()[name] for name in expected}, expected


@example
def a_batch_that_was_sampled_ahead():
    versions, mask = (
        torch.tensor([[4, 4, -1], [3, 3, 3]]),
        torch.tensor([[True, True, False], [True, True, True]]),
    )
    rollouts = SimpleNamespace(policy_versions=versions, response_mask=mask)
    return age_metrics(rollouts, ages=[1, 2], current=5, bound=2), {
        "async/group_age/max": 2,
        "async/group_age/bound": 2,
        "async/token_age/mean": (1 + 1 + 2 + 2 + 2) / 5,
    }


@example
def groups_that_left_untrained():
    ended = {"failed": GroupTotals(1, 0), "stale": GroupTotals(2, 12)}
    found = StepTotals({}, waited_for_oldest=1.5).lead_metrics(ended)
    return found, {"async/failed_groups": 1, "async/dropped_tokens": 12, "async/wait_for_oldest_s": 1.5}


@example
def an_update_under_running_responses():
    """Of two engines, one was held up for half a second."""
    found = pause_metrics([Interrupted([], 0.5), Interrupted([], 0.25)])
    return found, under("async/", {"pause_seconds/mean": 0.375, "pause_seconds/max": 0.5})


@example
def responses_of_several_versions():
    """The trainer holds version 5. Parts of versions 3, 3, 5 in one response, of version 4 in another."""
    found = version_metrics([[3, 3, 5], [4]], current=5)
    spread = {
        "spans": {"mean": (3 + 1) / 2, "max": 3, "min": 1},
        "staleness": {"mean": (0 + 1) / 2, "max": 1, "min": 0},
        "staleness_worst": {"mean": (2 + 1) / 2, "max": 2, "min": 1},
    }
    expected = under(
        "fully_async/partial/", {"total_partial_num": 1, "partial_ratio": 1 / 2, "max_partial_span": 2}
    )
    for name, numbers in spread.items():
        expected |= under(f"training/off_policy/trajectory_{name}/", numbers)
    return found, expected


@example
def a_mismatch_above_its_limit():
    guards = Guards(AlertsConfig(mismatch_limit=0.1), Mock(), Mock())
    record, found = StepRecord(), Findings(None, HealthHistory(), k3_kl=0.25)
    assert guards.act(found, step_of(record))
    return record.metrics(), {"alerts/mismatch": 1}


@example
def an_unusual_gap() -> tuple[Mapping[str, float], Mapping[str, float]]:
    """0.3 nats where 0.2 is usual."""
    guards = Guards(AlertsConfig(mismatch_limit=None), Mock(), Mock())
    record = StepRecord()
    found = Findings(None, HealthHistory(), k3_kl=0.0, mean_gap=0.3, gap_limit=0.2)
    assert guards.act(found, step_of(record))
    return record.metrics(), {"alerts/gap": 1}


@example
def a_reward_that_has_collapsed():
    guards = Guards(AlertsConfig(reward_window=1, reward_collapse="skip"), Mock(), Mock())
    record, batch = StepRecord(), ragged(train_batch())
    record.ledger.add_sampled(6)
    rewards = SimpleNamespace(collapse=lambda window: "from 1 to 0")
    with patch("verl_rc.trainer.guards.require_sampled_tokens"):
        inputs, found = SimpleNamespace(scored=Mock(), batch=batch), Findings(None, HealthHistory())
        assert not guards.decide_update(rewards, inputs, found, step_of(record))
    return record.metrics(), {"alerts/reward_collapse": 1, "alerts/withheld_updates": 1}


@example
def the_histogram_and_a_threshold_that_follows():
    """Two of the log-ratios are -2 ln 2."""
    fields = {"diagnostics": "full", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 1.5}
    config = RolloutCorrectionConfig.model_validate({**fields, "rollout_rs_target_acceptance": 0.9})
    statistics_of_step = compute_rollout_correction(TRAIN, ROLLOUT, RESPONSE, config).statistics
    record, tracker = StepRecord(), Mock()
    record_correction(step_of(record, config, rejection_threshold=1.25), statistics_of_step)
    record.log(tracker, step=1)
    name, edges, counts, _ = tracker.log_histogram.call_args.args
    inside = sum(
        count for count, low, high in zip(counts, edges, edges[1:], strict=False) if low <= -2 * LN2 <= high
    )
    return {**record.metrics(), name: inside}, {
        "rollout_corr/log_ratio": 2,
        "rollout_corr/rollout_rs_adaptive_threshold": 1.25,
    }


@example
def a_step_that_samples():
    """Samples of prompts 0 and 1 have 1 and 2 tokens and score 1, 1, 0, 1; see ``table_engines``."""
    ticks = count(step=0.125)  # the step begins, the engines are waited for, all samples arrive
    clock = SimpleNamespace(perf_counter=lambda: next(ticks), monotonic=lambda: 0.0)
    with patch("verl_rc.trainer.supply.supply.time", clock):
        _, found = sample(make_run())
    expected = {"perf/rollout_tokens_per_second": (1 + 2 + 1 + 2) / (2 * 0.125)}
    _, gdpo = sample(make_run("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[length,score]"))
    return {**gdpo, **found}, {**expected, "gdpo/length/std": statistics.pstdev([1, 2, 1, 2])}


@example
def prompts_that_tell_nothing():
    """Of prompts 0 to 3 two are kept, 1 and 3; all eight samples score 1, 1, 0, 1, 0, 0, 1, 0."""
    _, found = sample(make_run(FILTER))
    expected = {
        "evicted_samples": 4,
        "discarded_surplus_samples": 0,
        "informative_ratio": 2 / 4,
        "sampled_score_mean": 4 / 8,
    }
    return found, under("training/filter_groups/", expected)


@example
def memory_in_gib():
    gib = 1 << 30
    device = SimpleNamespace(type="cuda")
    with (
        patch(
            "verl_rc.runtime.workers.policy_worker.host_memory",
            return_value={"MemTotal": 8 * gib, "MemAvailable": 3 * gib},
        ),
        patch("torch.cuda.max_memory_allocated", return_value=6 * gib),
        patch("torch.cuda.max_memory_reserved", return_value=7 * gib),
    ):
        found = reduce_metrics(memory_metrics(device))
    names = ("cpu_memory_used", "max_memory_allocated", "max_memory_reserved")
    return found, {f"perf/{name}_gb": value for name, value in zip(names, (5, 6, 7), strict=True)}


@example
def every_account_of_the_ledger():
    tokens = {
        "trained": 1,
        "rejected": 2,
        "nonfinite": 3,
        "withheld": 4,
        "overflow": 8,
        "filtered": 5,
        "surplus": 6,
        "baseline": 7,
    }
    prompts = {"in_batch": 3, "filtered": 2, "surplus": 1}
    record = StepRecord()
    record.ledger.add_sampled(36, prompts=6)
    record.ledger.book(tokens)
    record.ledger.book_prompts(prompts)
    expected = {f"ledger/{account}_tokens": count for account, count in tokens.items()}
    expected |= {f"ledger/prompts_{account}": count for account, count in prompts.items()}
    return record.ledger.balanced_metrics(), {
        **expected,
        "ledger/sampled_tokens": 36,
        "ledger/prompts_sampled": 6,
    }


@example
def seconds_speeds_and_replacements():
    """Stage number n takes n seconds, its slowest worker computes for n / 4 of them, and the step 100 in
    all."""
    stages = list(STAGES)
    busy = ["gen", "old_log_prob", "ref", "teacher", "values", "update_critic", "update_actor"]
    with patch("verl_rc.trainer.step_record.time.perf_counter", return_value=0.0) as clock:
        record = StepRecord()
        record.engines_replaced = 2
        record.requests_reissued = 3
        record.wait_stage = "gen"
        record.tokens = StepTokens(50, torch.tensor([150, 50]), 4, {})
        record.ledger.book({"trained": 40})
        for number, stage in enumerate(stages, start=1):
            with record.stage(stage):
                clock.return_value += number
            if stage in busy:
                record.add_busy(stage, number / 4)
        clock.return_value = 200.0
        found = record.metrics()
    seconds = {stage: float(number) for number, stage in enumerate(stages, start=1)}
    computed = sum(seconds[stage] / 4 for stage in busy)
    work = computed + seconds["reward"] + seconds["testing"] + seconds["save_checkpoint"]
    per_token = ["gen", "ref", "teacher", "values", "adv", "update_critic", "update_actor"]
    return found, {
        **under("timing_s/", seconds),
        **under("timing_busy_s/", {stage: seconds[stage] / 4 for stage in busy}),
        **under(
            "timing_per_token_ms/",
            {stage: 1000 * seconds[stage] / (50 if stage == "gen" else 200) for stage in per_token},
        ),
        "timing_s/step": 200,
        "perf/time_per_step": 200,
        "perf/throughput": 200 / (200 * 4),
        "perf/useful_tokens_per_second": 40 / 200,
        "perf/overhead_fraction": 1 - work / 200,
        "trainer/idle_ratio": seconds["gen"] / 200,
        "recovery/engines_replaced": 2,
        "recovery/requests_reissued": 3,
    }


@example
def flops_of_two_sequences():
    """Of 1 and 3 tokens, so 1 + 6 pairs, of which a window of 2 leaves 1 + 5: 40 + 7 + 2 x 6 FLOPs in a
    forward pass; on two ranks, each of which could do 10 in a second. Half of the tokens are shared."""
    flops = ModelFlops(per_token=10.0, per_pair={None: 1, 2: 2}, peak=10.0)
    config = load_run_config([*sound_run(), "trainer.n_gpus_per_node=2"])
    seconds = {"update_actor": 59.0, "old_log_prob": 5.9, "update_critic": 29.5, "gen": 1.0}
    stages = stages_with_flops(config, {"actor": flops, "critic": flops})
    tokens = StepTokens(2, torch.tensor([1, 3]), 2, stages)
    found = tokens.utilisation(seconds, shared_fraction=1 / 2)
    return found, under("perf/mfu/", {"actor": 3 / 40, "actor_infer": 10 / 40, "critic": 6 / 40})


@example
def signs_of_misalignment():
    """Ratios 1, 1/4, 4, 1/4: the mean is 11/8."""
    deviation = statistics.pstdev([1, 1 / 4, 4, 1 / 4])
    return corrected(diagnostics="full"), {
        "rollout_corr/misalignment_z": (11 / 8 - 1) / (deviation / math.sqrt(4)),
    }


@example
def signatures_of_causes():
    """Log-probs -2, -3 | -1 | -3 and entropies 3, 2 | 2 | 3 in ln 2, so u = 1, -1 | 1 | 0; sums of squared
    probabilities 1/2; varentropies 2, 1 | 1 | 0 in ln 2 squared, which add up to more than u squared does.

    With l = 0, -2 | 2 | -2, l u is 0, 2 | 2 | 0. 1 - rho is 0, 3/4 | -3 | 3/4, and g = 1 - 2p + Q is 1, 5/4 |
    1/2 | 5/4. Standard errors: the root of the rows' squared (sum of a - quotient times sum of b), over the
    sum of b.
    """
    facts = {
        "entropies": LN2 * torch.tensor([[3, 2], [2, 0], [3, 0]]),
        "sum_pi_squared": torch.full((3, 2), 0.5),
        "varentropies": LN2**2 * torch.tensor([[2, 1], [1, 0], [0, 0]]),
    }
    found = compute_rollout_correction(TRAIN, ROLLOUT, RESPONSE, {"diagnostics": "full"}, **facts).metrics()
    mass = math.hypot(3 / 4 + 2 * 3 / 8, -3 + 3 / 8, 3 / 4 + 3 / 8) / 4
    slope = math.hypot(2 - 4 / 3 * 2, 2 - 4 / 3, 0) / 3
    distance, deviation = math.sqrt((1 + 4 + 1 / 4 + 4) / 4 - 1), LN2 * math.sqrt((2 + 1 + 1) / 4)
    chance = LN2 * math.sqrt(2 + 1 + 1) / 4
    return found, under(
        "rollout_corr/",
        {
            "missing_mass": -3 / 8,
            "missing_mass_z": -3 / 8 / mass,
            "concentration": 0.01 * 4 * 4 / 12,
            "temperature_slope": 4 / 3,
            "temperature_r2": 4**2 / (3 * 12),
            "temperature_z": 4 / 3 / slope,
            "surprisal_excess": -LN2 / 4,
            "surprisal_excess_bound": distance * deviation + 6 * chance,
            "logit_noise": LN2 * math.sqrt(12 / 4),
            "position_0_logit_noise": LN2 * math.sqrt(12 / 4),
        },
    )


@example
def two_engines():
    """The log-probs of ``signatures_of_causes``; engine 0 sampled the outer rows: l^2 is 4 | 4 in ln 2
    squared, g 9/4 | 5/4, and of engine 1 4 and 1/2. So 16/7, whose rows are 8/7 from it on both sides, and 8,
    of one row and without an error."""
    facts = {
        "entropies": torch.zeros(3, 2),
        "sum_pi_squared": torch.full((3, 2), 0.5),
        "engines": torch.tensor([0, 1, 0]),
    }
    found = compute_rollout_correction(TRAIN, ROLLOUT, RESPONSE, {"diagnostics": "full"}, **facts).metrics()
    error = 8 / 7 * math.sqrt(2) / (7 / 2)
    return found, under(
        "rollout_corr/",
        {
            "engine_0_logit_noise": LN2 * math.sqrt(16 / 7),
            "engine_1_logit_noise": LN2 * math.sqrt(8),
            "noisiest_engine": 1,
            "noisiest_engine_ratio": math.sqrt(7 / 2),
            "noisiest_engine_z": (8 - 4 * 16 / 7) / (4 * error),
        },
    )


@example
def a_token_whose_sum_of_squares_is_not_known():
    """p is 1/2, and two tokens share the rest: h = ln 2, and g is between 1/4 (1 + 1/2) and 1/4 (1 + 1)."""
    row = {
        "response_mask": [1],
        "old_log_prob": [-LN2],
        "rollout_log_prob": [-2 * LN2],
        "entropy": [LN2 + LN2 / 2],
    }
    expected = {"logit_noise_least": LN2 / math.sqrt(1 / 2), "logit_noise_most": LN2 / math.sqrt(3 / 8)}
    return metrics_of(record_of_rows({}, 1, [row])), under("rollout_corr/", expected)


@example
def two_prompts_with_sixty_eight_samples_each():
    """log p is -1 or -3 with l of 0.3 ± 0.1 and -0.1 behind the first prompt, slope 0.2; behind the second
    one l is 0."""
    pairs = [(0, -1.0, 0.4), (0, -1.0, 0.2), (0, -3.0, -0.1), (0, -3.0, -0.1)]
    pairs += [(1, log_prob, 0.0) for _, log_prob, _ in pairs]
    rows = [
        {
            "prompt_ids": [prompt],
            "response_ids": [round(-log_prob)],
            "response_mask": [1],
            "old_log_prob": [log_prob],
            "rollout_log_prob": [log_prob - difference],
        }
        for prompt, log_prob, difference in pairs * 17
    ]
    spread, square = 0.2**2 + 0.1**2 / 2, (0.4**2 + 0.2**2 + 2 * 0.1**2) / 4
    expected = {"prefix_slope": 0.1, "prefix_r2": 0.2**2 / (2 * spread), "prefix_z": 2**0.5}
    expected |= {"prefix_spread": (136 * spread / (136 - 2)) / square}
    return metrics_of(record_of_rows({}, 1, rows)), under("rollout_corr/", expected)


@example
def the_third_step_of_an_engine_at_another_temperature():
    """Logit noise was 0.02 and 0.04 in the first two steps, and the second was at the temperature, too."""
    signs = {
        "missing_mass": 0,
        "temperature_slope": -0.1,
        "temperature_r2": 0.9,
        "temperature_z": -99,
        "logit_noise": 0.2,
    }
    cooler = under("rollout_corr/", signs)
    history = CauseHistory({"temperature": CauseEpisode(2, 2)}, (0.02, 0.04))
    return name_causes(cooler, 3, history, temperature=1.0).metrics, {
        "alerts/cause": 1,
        "rollout_corr/logit_noise_floor": 0.03,
    }


@example
def log_probs_of_the_token_before():
    """The engine's -1, -1/3, -2, -1/2 stand one position late in 16 bits, but for the third; 0 counts as
    neither."""
    train = torch.tensor([[-1.0, -1 / 3, -2.0, -0.5, -3.0]])
    rollout = torch.tensor([[0.0, -1.0, -1 / 3, -2.0, -0.5]])
    found = compute_rollout_correction(train, rollout, torch.ones(1, 5), {"diagnostics": "full"}).metrics()
    return found, {"rollout_corr/lag": 1, "rollout_corr/rounded_fraction": 3 / 4}


@example
def interpolated_against_recomputed_log_probs():
    """Gaps of 1/4, 1/2 and 0; the last token is the tool's."""
    batch = TrainBatch(
        tokens=ROW,
        response_mask=torch.tensor([[True, True, True, False]]),
        loss_mask=torch.tensor([[True, True, True, False]]),
        old_log_probs=one_row(-1.25, -1.5, -3, -9),
        **OF_ROLLOUTS,
        advantages=one_row(0, 0, 0, 0),
        batch_size=[1],
    )
    mode = corrector_of(RolloutCorrectionConfig(proximal="interpolate", diagnostics="core"))
    ranks = OverRanks(sum=lambda tensor: tensor, maximum=lambda tensor: tensor)
    current = TokenScores(one_row(-1, -2, -3, -4), one_row(0, 0, 0, 0))
    _, averages = mode.during_update(49, 1, ranks).correct(batch, current)
    name = "actor/proximal_interpolation_gap"
    return {name: float(averages[name].value)}, {name: (1 / 4 + 1 / 2) / 3}


@example
def weights_on_their_way():
    """Two tensors of 2 and 3 float32 numbers."""
    manifest = Manifest((TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,))))
    transport = SimpleNamespace(deliver=lambda version: (None, None), manifest=manifest)
    rollout = SimpleNamespace(sync_proof=SimpleNamespace(canary_freq=0))
    asynchrony = SimpleNamespace(trigger_parameter_sync_step=1)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), async_training=asynchrony)
    services, record = (
        SimpleNamespace(config=config, engines=Mock(), transport=transport),
        StepRecord(),
    )
    with patch("verl_rc.trainer.weights.check_receipts"):
        Publisher(services, SimpleNamespace(canary_gap_limit=None)).publish(1, record)
    return record.metrics(), {"sync/bytes": 4 * (2 + 3)}


def judged_canaries(
    actor: Any,
    *answers: list[list[Sample]],
    overrides: tuple[str, ...] = (),
    limit: GapLimit | None = None,
) -> dict[str, float]:
    """The metrics of a step in which engines generate these, one publication after the other."""
    left = list(answers)
    services = SimpleNamespace(
        config=load_run_config([*sound_run(), *overrides]),
        stop_token_ids=(),
        engines=SimpleNamespace(generate_on_each=lambda *_: left.pop(0)),
        actor=actor,
        tokenizer=SimpleNamespace(pad_token_id=0),
        gap_limit=limit or GapLimit.for_precision("float32", fixed=0.75),
        guards=Mock(),
    )
    record = StepRecord()
    with patch("verl_rc.trainer.weights.Publisher._canary_requests", [GenerationRequest([1], 0)]):
        publisher = Publisher(services, SimpleNamespace(canary_gap_limit=None))
        for _ in answers:
            publisher._check_canary(1, record)
    return record.metrics()


@example
def canary_tokens_of_two_engines():
    """Gaps of 1/2 and 1/4 and one NaN in one engine, of 1, 0 and 1/2 in the other, whose mean of 1/2 is the
    larger one; then, in the same step, those of the first in both."""
    actor = SimpleNamespace(
        compute_log_probs=lambda tokens, _: Timed(
            tokens.become(TokenScores, log_probs=torch.full(tokens.responses.shape, -1.0)), 0.0
        )
    )
    answers = [[[made_sample(0, [5, 6, 7], 1, log_probs)] for log_probs in CANARIES]]
    answers.append([answers[0][0]] * 2)
    return judged_canaries(actor, *answers), {
        "sync/canary_mean_gap": 1 / 2,
        "sync/canary_nonfinite_tokens": 3,
    }


@example
def canary_tokens_in_bfloat16():
    """Gaps of 1/2 and 1/4; rounding moves the first of the two tokens by 1/8, and the second by 3/8. Only
    the first publication asks for it."""
    actor = SimpleNamespace(
        compute_log_probs=lambda tokens, _: Timed(
            tokens.become(TokenScores, log_probs=torch.full(tokens.responses.shape, -1.0)), 0.0
        ),
        estimate_rounding=Mock(side_effect=[torch.tensor([1 / 8, 3 / 8])]),
    )
    answers = [[[made_sample(0, [5, 6], 1, [-1.5, -1.25])]]] * 2
    return judged_canaries(
        actor, *answers, limit=replace(GapLimit.for_precision("bfloat16"), plausible=1.0)
    ), {
        "sync/canary_mean_gap": 3 / 8,
        "sync/canary_nonfinite_tokens": 0,
        "sync/canary_rounding": 1 / 4,
    }


@example
def canary_tokens_whose_experts_are_recorded():
    """Log-probs of -1 with the experts of the engine, of -2 with the trainer's own."""
    actor = SimpleNamespace(
        compute_log_probs=lambda tokens, _: Timed(
            tokens.become(
                TokenScores,
                log_probs=torch.full(tokens.responses.shape, -2.0 if tokens.experts_counts is None else -1.0),
            ),
            0.0,
        )
    )
    column = RaggedColumn.from_counts(np.array([2, 1, 1]), np.zeros(4, dtype=np.uint8))
    plain = made_sample(0, [5, 6, 7], 1, [-1.5, -1.25, -1.0])
    recorded = replace(plain, parts=[replace(plain.parts[0], columns={"experts": column})])
    replay = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    return judged_canaries(actor, [[recorded]], overrides=(replay,)), {
        "sync/canary_mean_gap": 1 / 4,
        "sync/canary_nonfinite_tokens": 0,
        "sync/canary_own_experts_gap": 3 / 4,
    }


CANARIES = [[-1.5, -1.25, math.nan], [-2.0, -1.0, -1.5]]


@example
def updates_of_which_none_had_anything_to_learn_from():
    """Two mini-batches without a token in the loss, at a learning rate that has fallen to 3/4 of its peak of
    1/8."""
    shares = [SimpleNamespace(num_loss_tokens=0)] * 2
    model = MagicMock()
    model.advance_schedule.return_value = 3 / 4 / 8
    rank = SimpleNamespace(rank=0)
    policy = SimpleNamespace(
        _ranks=None,
        _actor=ActorConfig(use_dynamic_bsz=True),
        _address=rank,
        _device=SimpleNamespace(type="cpu"),
        _forward=ForwardOptions(prefixes=PrefixSharing()),
        model=model,
    )
    policy._forward.prefixes.count(96, 256)
    request = UpdateRequest(corrector_of(RolloutCorrectionConfig()), 0)
    records = PolicyWorker.update(policy, None, shares, request).metrics
    records += CriticWorker.update(SimpleNamespace(model=model, _address=rank), None, shares).metrics
    return reduce_metrics(records), {
        "rollout_corr/skipped_updates": 2,
        "actor/lr": 3 / 32,
        "critic/lr": 3 / 32,
        "perf/shared_tokens_fraction": 3 / 8,
    }


@example
def an_update_that_the_engine_rounds():
    """Next to 1 numbers of bfloat16 are 1/128 apart: an update of 3/512 goes to the next one, one of 1/512 is
    lost."""
    ones = torch.ones(2)
    states = iter((ones, ones + torch.tensor([3 / 512, 1 / 512])))
    policy = SimpleNamespace(
        _ranks=None,
        _actor=ActorConfig(use_dynamic_bsz=True),
        _address=SimpleNamespace(rank=1),
        _device=SimpleNamespace(type="cpu"),
        _weights=SimpleNamespace(trained=lambda: [("weight", next(states))]),
        _rounding=EngineRounding(torch.bfloat16, None, frozenset()),
        _forward=ForwardOptions(),
        model=MagicMock(),
    )
    request = UpdateRequest(corrector_of(RolloutCorrectionConfig()), 0, measures_survival=True)
    records = PolicyWorker.update(policy, None, [], request).metrics
    return reduce_metrics([one for one in records if one.name.startswith("sync/")]), {
        "sync/update_survival": 4 * 3 / (3**2 + 1**2),
        "sync/changed_weights": 1 / 2,
    }


@example
def penalties_of_the_divergence():
    """k1 of 1 and 3 in a row of two tokens, of 1/2 in a row of one: means 2 and 1/2. The loss has a
    coefficient of 1/4, and, at an entropy below its target, one of 1/8 for the entropy."""
    mask = torch.tensor([[True, True], [True, False]])
    evaluations = SimpleNamespace(
        reference_log_probs=torch.tensor([[-2.0, -4.0], [-1.5, 0.0]]),
    )
    algorithm = SimpleNamespace(estimator=None, use_kl_in_reward=True, kl_penalty="kl", shaped_kl=None)
    algorithm.rollout_correction = RolloutCorrectionConfig()
    rollouts = SimpleNamespace(turn_rewards=None, pad=lambda values, rows: values)
    _, divergences = _rewards(
        SimpleNamespace(rollouts=rollouts, scores=torch.zeros(2)),
        evaluations,
        torch.tensor([[-1.0, -1.0], [-1.0, 0.0]]),
        algorithm,
        0.1,
        [0, 1],
        mask,
    )
    divergence = float(divergences.mean())
    record = StepRecord()
    in_the_loss = [
        f"actor_rollout_ref.actor.{setting}" for setting in ("use_kl_loss=True", "kl_loss_coef=0.25")
    ]
    config = load_run_config([*sound_run(), *in_the_loss])
    services = Mock(config=config)
    services.actor.update.return_value = Timed(ActorReport([], [], []), 0.0)
    inputs = SimpleNamespace(reward_kl=divergence, correction=None)
    stages, step = "verl_rc.trainer.stages", step_of(record, kl_coef=0.1)
    with (
        patch(f"{stages}.batch_metrics", return_value={}),
        patch(f"{stages}.build_train_batch", return_value=inputs),
    ):
        correct(services, Mock(), evaluations, step)
    batch = ragged(train_batch())
    record.ledger.add_sampled(int(batch.response_mask.sum()))
    with patch("verl_rc.trainer.stages.plan_mini_batches", return_value=[]):
        target = AlgorithmConfig.model_validate({"adaptive_entropy": {"target_entropy": 0.75}})
        step = replace(step, control=replace(step.control, algorithm=target, entropy_coeff=1 / 8))
        update_actor(services, None, SimpleNamespace(batch=batch, correction=None, mean_entropy=0.5), step)
    expected = {
        "actor/entropy_coeff": 1 / 8,
        "actor/reward_kl_penalty": (2 + 1 / 2) / 2,
        "actor/reward_kl_penalty_coeff": 0.1,
        "actor/kl_coef": 0.25,
    }
    return record.metrics(), expected


@example
def the_seventh_step_of_twelve_prompts_two_by_two():
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        without_processes(monkeypatch)
        live(Path(folder), RunState(), steps=7)
        last = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])
    return last, {"training/global_step": 7, "training/epoch": 1}


@example
def groups_under_way():
    """Two groups of 6 tokens were trained on; of those under way one is whole and has 3, the others are being
    sampled."""
    groups = [
        SimpleNamespace(number=2 + place, num_sampled=tokens, is_whole=tokens == 3)
        for place, tokens in enumerate((3, 1, 0))
    ]
    state = BookState(admitted=5, ended={"trained": GroupTotals(2, 2 * 6)})
    progress = SupplyProgress(GroupBook(AdmissionRule(2, 5), state, groups))
    return {"async/length_ratio": progress.length_ratio}, {"async/length_ratio": 6 / ((2 * 6 + 3) / 3)}


@pytest.mark.parametrize("worked", EXAMPLES, ids=lambda function: function.__name__)
def test_the_code_reports_what_the_formula_gives(worked: Example) -> None:
    found, expected = worked()
    assert {name: found.get(name) for name in expected} == {
        name: pytest.approx(value, rel=0.04 if name.endswith(APPROXIMATE) else 1e-6, abs=1e-6)
        for name, value in expected.items()
    }


def test_every_entry_has_a_worked_value() -> None:
    worked = {name for function in EXAMPLES for name in function()[1]}
    assert [spec.name for spec in CATALOG if not any(spec is CATALOG.find(name) for name in worked)] == []
