"""Counts agree with what cuts the batches, and phases with the stages that the loop times."""

import ast
import re

import numpy as np
import pytest
import torch
from planned_runs import Given, config_of
from small_runs import ROOT

from verl_rc.algorithm.ppo.mini_batches import plan_mini_batches
from verl_rc.plan.run_plan import Phase, Plan, plan_of
from verl_rc.plan.run_plan.schedule import LongestRows, UpdateArithmetic
from verl_rc.records.microbatch import MicroBatchLimit, assign_rows
from verl_rc.records.shared_prefixes import find_prefixes

ACTOR, CRITIC, TRAINER = "actor_rollout_ref.actor", "critic", "trainer"
GAE: Given = {"algorithm.adv_estimator": "gae"}
BYPASS: Given = {"algorithm.rollout_correction.bypass_mode": True}
KEPT: Given = {
    "algorithm.rollout_correction.rollout_rs": "token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": 2.0,
    "algorithm.rollout_correction.rejection_denominator": "kept",
}
REFERENCE: Given = {f"{ACTOR}.use_kl_loss": True}


def test_counts_worked_out_by_hand() -> None:
    config = config_of(
        {
            "data.train_batch_size": 12,
            f"{ACTOR}.ppo_mini_batch_size": 4,
            f"{ACTOR}.ppo_epochs": 2,
            "actor_rollout_ref.rollout.n": 5,
            f"{TRAINER}.n_gpus_per_node": 3,
            **GAE,
            f"{CRITIC}.ppo_mini_batch_size": 6,
            f"{TRAINER}.critic_warmup": 3,
        }
    )
    assert (config.rows_per_step, config.longest_sequence) == (60, 13)
    sizes = plan_of(config).sizes
    assert (sizes.actor.mini_batches_per_epoch, sizes.actor.optimizer_steps, sizes.actor.mini_batch_rows) == (
        3,
        6,
        20,
    )
    assert sizes.actor.rows_per_group == (6, 7)
    assert sizes.critic is not None
    assert (sizes.critic.optimizer_steps, sizes.critic.mini_batch_rows, sizes.critic.rows_per_group) == (
        4,
        30,
        (10, 10),
    )
    assert sizes.critic_only_steps == 2


@pytest.mark.parametrize(
    ("prompts", "mini", "epochs", "samples"), [(10, 5, 1, 4), (12, 3, 2, 2), (6, 6, 3, 7)]
)
def test_updates_are_as_many_as_the_loop_makes(prompts: int, mini: int, epochs: int, samples: int) -> None:
    given: Given = {
        "data.train_batch_size": prompts,
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ACTOR}.ppo_epochs": epochs,
        "actor_rollout_ref.rollout.n": samples,
    }
    config = config_of(given)
    sizes = plan_of(config).sizes
    mask = torch.ones(prompts * samples, 3, dtype=torch.bool)
    batches = plan_mini_batches(
        mask.sum(-1), mask.sum(-1), rows_per_mini_batch=mini * samples, epochs=epochs, shuffle=True, seed=1
    )
    assert config.rows_per_step == len(mask)
    assert sizes.actor.optimizer_steps == len(batches)
    assert {len(batch.rows) for batch in batches} == {sizes.actor.mini_batch_rows}


PROMPT, RESPONSE = 12, 7


def longest_batches(
    rows: int, siblings: int, ranks: int, limit: MicroBatchLimit
) -> tuple[list[list[int]], list[int]]:
    """Micro-batches of rows of the greatest lengths by the real assignment, and the tokens of each."""
    tokens = [np.array([row // siblings] * PROMPT + [100 + row] * RESPONSE) for row in range(rows)]
    prefixes, length = find_prefixes(tokens), PROMPT + RESPONSE
    shares = assign_rows([length] * rows, ranks, limit, prefixes)
    parts = [part for share in shares for part in share]
    return parts, [length * len(part) - prefixes.of(part).saved_tokens for part in parts]


@pytest.mark.parametrize("siblings", [1, 4])
@pytest.mark.parametrize(
    ("rows", "ranks", "max_tokens", "max_rows", "sharing"),
    [
        (20, 2, 40, None, 1),
        (20, 1, 95, None, 1),
        (20, 2, None, 3, 1),
        (20, 4, 20, None, 2),
        (20, 4, None, 3, 2),
        (21, 3, 95, None, 1),
    ],
)
def test_longest_rows_fit_as_promised(
    rows: int, ranks: int, max_tokens: int | None, max_rows: int | None, sharing: int, siblings: int
) -> None:
    longest = LongestRows(PROMPT, RESPONSE, siblings)
    update = UpdateArithmetic(rows, rows, 1, 1, ranks, max_tokens, max_rows, sharing)
    limit = MicroBatchLimit(max_rows, max_tokens).shared_by(sharing)
    parts, _ = longest_batches(rows, siblings, ranks // sharing, limit)
    assert max(map(len, parts)) == update.rows_per_micro_batch(longest)


@pytest.mark.parametrize("siblings", [1, 3, 4])
@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8])
def test_no_micro_batch_has_more_tokens_than_estimated(siblings: int, max_rows: int) -> None:
    """Also where its rows are of more groups than they could be of."""
    longest = LongestRows(PROMPT, RESPONSE, siblings)
    _, tokens = longest_batches(24, siblings, 1, MicroBatchLimit(max_rows))
    assert max(tokens) == longest.tokens(max_rows)


def test_rows_with_replayed_experts_share_no_prompt_in_the_actor() -> None:
    config = config_of({"actor_rollout_ref.rollout.enable_rollout_routing_replay": True})
    samples = config.actor_rollout_ref.rollout.n
    assert [LongestRows.of(config, role).siblings for role in ("actor", "critic")] == [1, samples]
    assert LongestRows.of(config_of({}), "actor").siblings == samples


def named(plan: Plan) -> dict[str, Phase]:
    return {phase.name: phase for phase in plan.phases}


def stages_of_the_driver() -> set[str]:
    """Names that the loop times, read from its source."""
    found = set()
    for path in (ROOT / "verl_rc/trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("stage", "timed")
            ):
                found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


ONE_STEP_OFF: Given = {
    "async_training.staleness_threshold": 1,
    "async_training.partial_rollout": False,
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "algorithm.rollout_correction.rollout_is": "token",
}

EVERYTHING: list[Given] = [
    {
        **GAE,
        **REFERENCE,
        f"{TRAINER}.test_freq": 5,
        f"{TRAINER}.save_freq": 5,
        f"{TRAINER}.rollout_data_dir": "x",
    },
    {"algorithm.adv_estimator": "remax"},
    {
        "distillation.enabled": True,
        "distillation.teacher_models.teacher_model.model_path": "org/teacher",
    },
    ONE_STEP_OFF,
    {
        "algorithm.max_refills": 2,
        "algorithm.rollout_correction.rollout_rs": "seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold": 1.1,
    },
]


def test_every_stage_of_the_loop_is_planned_by_some_run() -> None:
    planned = {name for given in EVERYTHING for name in named(plan_of(config_of(given)))}
    assert planned == stages_of_the_driver()
    worker = (ROOT / "verl_rc/runtime/workers/policy_worker.py").read_text()
    assert re.search(r'"timing_s/correction_statistics"', worker)


MINIMAL = [
    "gen",
    "reward",
    "old_log_prob",
    "adv",
    "update_actor",
    "update_weights",
    "sync_canary",
    "token_records",
]


@pytest.mark.parametrize(
    ("given", "more", "fewer"),
    [
        ({}, set(), set()),
        (GAE, {"values", "update_critic"}, set()),
        (REFERENCE, {"ref"}, set()),
        ({"algorithm.use_kl_in_reward": True}, {"ref"}, set()),
        (BYPASS, set(), {"old_log_prob"}),
        ({**BYPASS, **KEPT}, {"correction_statistics"}, {"old_log_prob"}),
        (KEPT, set(), set()),
        ({f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}, {"correction_statistics"}, set()),
        ({f"{TRAINER}.test_freq": 2}, {"testing"}, set()),
        ({f"{TRAINER}.token_records.enable": False}, set(), {"token_records"}),
        ({f"{TRAINER}.save_freq": 2}, {"save_checkpoint"}, set()),
    ],
)
def test_phases_follow_the_configuration(given: Given, more: set[str], fewer: set[str]) -> None:
    plan = plan_of(config_of(given))
    assert set(named(plan)) == (set(MINIMAL) | more) - fewer
    order = [phase.name for phase in plan.phases if phase.name in MINIMAL]
    assert order == [name for name in MINIMAL if name not in fewer]


def test_rows_of_forward_passes() -> None:
    given: Given = {
        **GAE,
        **REFERENCE,
        **BYPASS,
        **KEPT,
        f"{ACTOR}.policy_loss.loss_mode": "clip_cov",
        f"{ACTOR}.ppo_epochs": 3,
        f"{CRITIC}.ppo_epochs": 2,
    }
    phases = named(plan_of(config_of(given)))
    assert {name: phase.forward_rows for name, phase in phases.items() if phase.forward_rows} == {
        "ref": 40,
        "values": 40,
        "correction_statistics": 40 * 3 * 2,  # once for what is kept, once for covariances
    }
    assert {name: phase.trained_rows for name, phase in phases.items() if phase.trained_rows} == {
        "update_critic": 80,
        "update_actor": 120,
    }


def test_adapters_need_no_reference_of_their_own() -> None:
    assert named(plan_of(config_of(REFERENCE)))["ref"].role == "reference"
    adapters: Given = {**REFERENCE, "actor_rollout_ref.model.lora_rank": 4}
    assert named(plan_of(config_of(adapters)))["ref"].role == "actor without its adapters"


def test_a_warm_up_is_in_the_plan() -> None:
    phases = named(plan_of(config_of({**GAE, f"{TRAINER}.critic_warmup": 5})))
    assert phases["update_actor"].schedule == "from step 5"
    assert phases["update_critic"].schedule == ""
