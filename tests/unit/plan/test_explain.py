"""The words name what the plan found, and the plan is written where a run keeps its files."""

import re
from pathlib import Path

import pytest
from planned_runs import Given, config_of

from verl_rc.cli import USER_ERROR, main
from verl_rc.config.algorithms import AGGREGATIONS, LOSS_MODES
from verl_rc.plan.explain import plan_text, policy_formula, teacher_formula, total_formula, write_plan
from verl_rc.plan.run_plan import plan_of

ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
BYPASS: Given = {f"{CORRECTION}.bypass_mode": True}
TOKEN_WEIGHTS: Given = {f"{CORRECTION}.rollout_is": "token"}
AHEAD: Given = {
    "async_training.staleness_threshold": 2,
    "async_training.partial_rollout": False,
    "actor_rollout_ref.hybrid_engine": False,
}
REJECTION: Given = {f"{CORRECTION}.rollout_rs": "token_k1", f"{CORRECTION}.rollout_rs_threshold": "0.5_3.0"}

ENVIRONMENT = "actor_rollout_ref.rollout.environment"
SAID: list[tuple[Given, list[str], list[str]]] = [
    (
        {
            f"{ENVIRONMENT}.name": "games:Guess",
            f"{ENVIRONMENT}.choices": {"chess": {"name": "games:Chess"}},
            f"{ENVIRONMENT}.max_turns": 4,
        },
        [
            "Who answers whom",
            "answers games:Guess",
            "rows whose agent_name is chess: games:Chess",
            "runs in each engine's process",
            "at most 4 turns, 7 tokens of turns and replies together; 60 s a call",
            "reward of each turn, at its last token",
            "by episode: all of its tokens are credited with its score",
        ],
        ["outcome score at the last response token"],
    ),
    (
        {
            f"{ENVIRONMENT}.name": "verl_rc.runtime.rollout.environments.agent:Agent",
            f"{ENVIRONMENT}.arguments": {"command": ["python", "agent.py"]},
            f"{ENVIRONMENT}.hosts": 4,
            f"{ENVIRONMENT}.reward": "function",
            "algorithm.turn_credit": "turn",
        },
        [
            "an agent from outside, python agent.py: it asks the policy by a chat endpoint",
            "4 process(es) of its own",
            "reward the reward function's score of the whole response, at its last token",
            "by turn: each is credited with the rewards from it on",
        ],
        [],
    ),
    (
        {f"{ENVIRONMENT}.name": "games:Guess", "algorithm.adv_estimator": "reinforce_plus_plus"},
        ["by token: each is credited with the rewards that follow it", "any number of turns"],
        [],
    ),
    (
        {f"{ENVIRONMENT}.name": "games:Guess", "algorithm.adv_estimator": "remax"},
        ["reward the sum of the turns' rewards, at the last token", "by episode"],
        [],
    ),
    (
        {
            "actor_rollout_ref.rollout.multi_turn.enable": True,
            "actor_rollout_ref.rollout.multi_turn.tools": ["calculator"],
        },
        ["one without a call of calculator is its last", "tools answer up to 1 call(s) of a turn"],
        ["credit"],
    ),
    (
        {
            "trainer.n_gpus_per_node": 4,
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2,
            f"{ACTOR}.use_dynamic_bsz": True,
            f"{ACTOR}.ppo_max_token_len_per_gpu": 20,
        },
        [
            "on each of 2 group(s) of 2 ranks that share each row's tokens and attention heads",
            "micro-batches of at most 40 tokens (4 of the longest rows); rows of one prompt compute it once",
        ],
        ["4 rank(s)"],
    ),
    (
        {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 27},
        ["of at most 27 tokens (3 of the longest rows); the 4 rows of a prompt lie in several, each of"],
        [],
    ),
    (
        TOKEN_WEIGHTS,
        [
            "recomputed by old_log_prob",
            "w the token's own ratio π_old / π_roll, at most 2",
            "old_log_prob actor forward, 40 rows",
        ],
        ["bypass", "Critic", "π_ref", "Generation ahead of training"],
    ),
    (
        {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 2, f"{ACTOR}.fsdp_config.fsdp_size": 2},
        ["actor: 2 copies of weights and moments, each shared by 2 rank(s)"],
        [],
    ),
    ({"trainer.n_gpus_per_node": 2, f"{ACTOR}.fsdp_config.fsdp_size": 8}, [], ["copies of weights"]),
    ({f"{ACTOR}.fsdp_config.dtype": "fp16"}, ["actor: float16, its loss times a dynamic scale"], []),
    ({f"{ACTOR}.fsdp_config.dtype": "bf16"}, [], ["dynamic scale", "logits: products in float32"]),
    ({"actor_rollout_ref.model.head_dtype": "float32"}, ["logits: products in float32, in actor"], []),
    (
        {"actor_rollout_ref.rollout.top_p": 0.95, "actor_rollout_ref.rollout.top_k": 20},
        ["given the engine's support (top_p=0.95, top_k=20, min_p=0.0)", "Where more than 36 are left"],
        [],
    ),
    ({}, [], ["engine's support"]),
    (
        {"actor_rollout_ref.exact": True, f"{ACTOR}.fsdp_config.dtype": "bfloat16"},
        ["exact mode: engine, actor and reference compute the same bits"],
        ["on a GPU it was never run"],
    ),
    ({"actor_rollout_ref.exact": True, "trainer.device": "cuda"}, ["on a GPU it was never run"], []),
    (
        {**AHEAD, **TOKEN_WEIGHTS},
        [
            "is 0 to 2 step(s) old when it is trained on",
            "at most 30 prompts, 4 samples each",
            "that in which prompts were admitted",
            "after every step; engines finish what they have first",
            "the gap of canary tokens alone is limited",
            "tokens get older, steps no shorter",
        ],
        [],
    ),
    (
        {
            **AHEAD,
            "async_training.staleness_threshold": 1,
            "async_training.order": "ready",
            "async_training.trigger_parameter_sync_step": 2,
            "async_training.max_token_age": 2,
            "async_training.group_timeout_seconds": 60,
            "trainer.save_freq": 3,
            **TOKEN_WEIGHTS,
        },
        [
            "is 0 to 3 step(s) old",
            "of completion, the oldest version first",
            "at most 40 prompts",
            "tokens older than 2 step(s) leave the loss",
            "take longer than 60 s is sampled once more",
            "after every 2 steps and the last one",
            "only a step that publishes is validated and saved: trainer.save_freq=3 is rounded up to 4",
            "max_off_policy_threshold, async_training.max_off_policy_strategy: with "
            "async_training.partial_rollout=False, where all responses end before the next publication",
        ],
        ["drop throws sampled tokens away"],
    ),
    (
        {
            **AHEAD,
            **TOKEN_WEIGHTS,
            f"{CORRECTION}.proximal": "interpolate",
            "async_training.partial_rollout": True,
            "async_training.max_concurrent_rollouts": 9,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
            "actor_rollout_ref.rollout.checkpoint_engine.stage_updates": True,
        },
        [
            "log π_old = (1 - a) log π_roll + a log π",
            "interpolated proximal over rollout policy",
            "every 50 steps, to compare interpolated log-probs with",
            "an engine works on at most 9 samples",
            "pause only to load them",
            "sampled beside the next batch and judged with it",
        ],
        ["recomputed by old_log_prob", "bypass"],
    ),
    (
        {
            **AHEAD,
            **TOKEN_WEIGHTS,
            "async_training.staleness_threshold": 2,
            "async_training.partial_rollout": False,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
            "actor_rollout_ref.rollout.checkpoint_engine.stage_updates": True,
        },
        [
            "engines finish what they have first",
            "pause only to load them",
            "at one that canaries prove, and where it saves",
        ],
        ["as long as the slower of both sides", "tokens get older, steps no shorter"],
    ),
    (
        {"async_training.trigger_parameter_sync_step": 2, **TOKEN_WEIGHTS},
        [
            "engines share the trainer's devices: all that a version admits is sampled before its first step "
            "is trained",
            "a response has one version of the weights",
            "without a lead (async_training.staleness_threshold=0): all that is admitted is trained on",
        ],
        [],
    ),
    ({}, ["async_training.partial_rollout", "in a synchronous run"], []),
    (
        {
            **AHEAD,
            f"{CORRECTION}.rollout_rs": "seq_mean_k1",
            f"{CORRECTION}.rollout_rs_threshold": "0.99_1.01",
        },
        [
            "rollout_rs=seq_mean_k1 rejects whole rows outside a band that is made for two implementations "
            "of one policy"
        ],
        [],
    ),
    ({**AHEAD, **REJECTION}, [], ["rejects whole rows outside a band", "corrects nothing"]),
    (
        {**AHEAD, f"{CORRECTION}.rollout_is": None},
        ["rollout_correction corrects nothing, and samples are 2 or more steps old"],
        [],
    ),
    ({**AHEAD, **BYPASS}, [], ["corrects nothing"]),
    (
        {
            "async_training.trigger_parameter_sync_step": 2,
            "algorithm.adv_estimator": "reinforce_plus_plus",
            **TOKEN_WEIGHTS,
        },
        [
            "whitens over the batch, which is that of one step: 10 prompts, not those of all 2 steps of a "
            "publication"
        ],
        [],
    ),
    (
        {**BYPASS, f"{CORRECTION}.loss_type": "reinforce", **TOKEN_WEIGHTS},
        [
            "π / π_roll, with π detached",
            "no ratio, no clip: the rollout policy enters through w alone",
            "bypass: in the actor, mini-batch by mini-batch; current over rollout policy",
            "updates per step without a clip",
        ],
        ["old_log_prob actor", "ε_low"],
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "gpg"},
        ["no ratio, no clip: the proximal policy does not enter the loss gpg"],
        [],
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "gpg", **TOKEN_WEIGHTS, **REJECTION},
        ["no ratio, no clip: the proximal policy enters through w and m alone"],
        ["does not enter"],
    ),
    (
        {**BYPASS, **TOKEN_WEIGHTS},
        [
            "r π(y) / π_roll(y)",
            "weights reported only",
            "only reported: in bypass mode the ratio of the loss is itself current/rollout",
        ],
        ["w the token's own ratio"],
    ),
    (
        {**REJECTION, f"{CORRECTION}.rejection_denominator": "kept"},
        [
            "N = kept tokens of the mini-batch, over all ranks",
            "rejection token_k1 within 0.5_3.0",
            "loss_mask",
        ],
        ["kept or not"],
    ),
    (REJECTION, ["N = response tokens (kept or not) of the mini-batch, over all ranks"], ["N = kept tokens"]),
    (
        {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 5},
        [
            "Critic",
            "c = 0.5",
            "baseline the critic's values",
            "the first 4 do not update the actor",
            "from step 5",
        ],
        ["samples of one prompt"],
    ),
    (
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.entropy_coeff": 0.01},
        ["low_var_kl(π, π_ref)", "reference policy: unused, frozen (ref_log_prob); constant", "H(π) entropy"],
        [],
    ),
    (
        {"algorithm.lam": 0.9, "critic.optim.lr": 1e-4},
        [
            "Set, and without effect here algorithm.lam: the estimator grpo does not read it critic.*: no "
            "critic"
        ],
        [],
    ),
    (
        {f"{ACTOR}.policy_loss.loss_mode": "gspo"},
        ["s exp(mean over the row of log π(y) / π_old(y))", "a row's ratio is made of all of response_mask"],
        [],
    ),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "topr"},
        [
            "r π(y) / π_roll(y) of the sampled token; a constant, the gradient goes through log π",
            "a row's ratio is made of all of response_mask",
            "the ratio of the loss itself, to the rollout policy, corrects the gap",
            f"loss_mode: {CORRECTION}.loss_type=topr is the policy loss",
        ],
        ["nothing is corrected"],
    ),
    (
        {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.loss_type": "reinforce"},
        ["the gap is measured (rollout_corr/*), and nothing is corrected"],
        ["corrects the gap"],
    ),
    ({f"{ACTOR}.policy_loss.loss_mode": "mine:loss"}, ["the function mine:loss", "the function decides"], []),
    (
        {"algorithm.use_kl_in_reward": True},
        ["minus 0.001 (fixed) x kl(proximal, π_ref) of each token", "ref reference forward, 40 rows"],
        [],
    ),
    (
        {},
        [
            "the gap is measured (rollout_corr/*), and nothing is corrected",
            "10 prompts x 4 samples = 40 rows a step",
        ],
        [],
    ),
]


@pytest.mark.parametrize(("given", "said", "unsaid"), SAID, ids=[str(sorted(given)) for given, _, _ in SAID])
def test_what_is_said(given: Given, said: list[str], unsaid: list[str]) -> None:
    text = plan_text(config_of(given))
    words = " ".join(text.split())
    assert [phrase for phrase in said if phrase not in words] == []
    assert [phrase for phrase in unsaid if phrase in words] == []
    assert max(map(len, text.splitlines())) <= 130


def test_the_plan_is_kept(tmp_path: Path) -> None:
    config = config_of({})
    path = write_plan(config, tmp_path)
    assert path == tmp_path / "plan.txt"
    assert path.read_text(encoding="utf-8") == plan_text(config)


def overrides() -> list[str]:
    return [
        "data.train_files=nowhere.parquet",
        "data.val_files=nowhere.parquet",
        "data.train_batch_size=8",
        "actor_rollout_ref.model.path=./nowhere",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "+algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
    ]


def test_the_command_needs_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *overrides()]) == 0
    assert "8 prompts x 4 samples = 32 rows a step" in capsys.readouterr().out


ONE_STEP_OFF = ["async=one_step_off", "algorithm.rollout_correction.preset=decoupled_token_is"]


def test_the_command_predicts_a_step_from_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """T26."""
    given = [*overrides(), *ONE_STEP_OFF]
    assert main(["explain", *given, "--sampling-seconds=12", "--training-seconds=10"]) == 0
    assert "a step takes 12 s, in turns 22 s" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", *given]) == 0
    assert "predicted" not in capsys.readouterr().out
    assert main(["explain", *given, "--sampling-seconds=95", "--training-seconds=5"]) == 0
    assert "no staleness_threshold helps: sampling takes 95% of a step" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("seconds", "problem"),
    [
        (["--sampling-seconds=12"], "must be given together"),
        (["--sampling-seconds=x", "--training-seconds=1"], "invalid float value: 'x'"),
        (["--sampling-seconds=0", "--training-seconds=1"], "must take more than 0 seconds"),
    ],
)
def test_seconds_that_are_missing_or_cannot_be(
    seconds: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *overrides(), *seconds])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_other_subcommands_take_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plot", "run", "trainer.seed=2"])
    assert ended.value.code == 2
    assert "unrecognized arguments: trainer.seed=2" in capsys.readouterr().err


def test_the_command_takes_yaml_as_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("actor_rollout_ref:\n  rollout:\n    n: 6\n")
    given = [text for text in overrides() if "rollout.n=" not in text]
    assert main(["explain", "--config-dir", str(tmp_path), *given, "--config-name=mine"]) == 0
    assert "8 prompts x 6 samples = 48 rows a step" in capsys.readouterr().out


def test_the_command_takes_groups_as_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["explain", "task=digits", "hardware=cpu", "correction=bypass_pg_is", "data.train_batch_size=16"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "16 prompts x 8 samples = 128 rows a step" in printed
    assert "bypass" in printed
    assert "Set, and without effect" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["task=ghost"], "task must be one of "),
        (["--cfg=job"], "--cfg belongs to python -m verl_rc.main_ppo; drop it here"),
        (["algorithm.adv_estimatr=grpo"], "the nearest is algorithm.adv_estimator"),
        (["algorithm.rollout_correction.loss_type=reinforce"], "reinforce is a loss of bypass mode"),
        (["data.train_batch_size=7"], "must be a multiple of"),
    ],
)
def test_contradictions_are_errors(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *overrides(), *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["a=1", "-h"]])
@pytest.mark.parametrize("subcommand", ["explain", "doctor"])
def test_usage(subcommand: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if arguments:
        with pytest.raises(SystemExit) as ended:
            main([subcommand, *arguments])
        assert ended.value.code == 0
    else:
        assert main([subcommand]) == USER_ERROR
    assert (
        f"usage: verl-rc {subcommand} [RECIPE.sh] [GROUP=CHOICE ...] [KEY=VALUE ...]"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_every_letter_of_an_average_is_explained(mode: str) -> None:
    average = AGGREGATIONS[mode].average_of("l")
    assert "m l" in average
    for letter in re.findall(r"[NSFn]", average.replace("rows", "")):
        assert f"{letter} = " in AGGREGATIONS[mode].divisors


@pytest.mark.parametrize("loss", LOSS_MODES)
def test_a_ratio_in_the_formula_is_a_ratio_in_the_plan(loss: str) -> None:
    given = {f"{ACTOR}.policy_loss.loss_mode": loss}
    if loss == "dro":
        given[f"{ACTOR}.policy_loss.dro_beta"] = 0.3
    config = config_of(given)
    plan = plan_of(config).policy
    formula = policy_formula(plan)
    assert plan.spec is not None
    assert bool(re.search(r"π_old|\b[rs]\b", formula)) == plan.spec.reads_old_log_probs
    detached = "sg[" in formula
    assert not detached or plan.spec.gradient_through == "log_prob"
    options = [option.in_words(config.actor_rollout_ref.actor) for option in plan.spec.options]
    assert all(option in " ".join(plan_text(config).split()) for option in options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "L = L_policy"),
        ({f"{ACTOR}.entropy_coeff": 0.01}, "L = L_policy − 0.01 · 1/N · Σ m H(π)"),
        ({f"{ACTOR}.entropy_coeff": -0.01}, "L = L_policy + 0.01 · 1/N · Σ m H(π)"),
        ({f"{ACTOR}.use_kl_loss": True}, "L = L_policy + 0.001 · 1/N · Σ m low_var_kl(π, π_ref)"),
        ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.0}, "L = L_policy"),
    ],
)
def test_terms_of_the_loss(given: Given, expected: str) -> None:
    config = config_of(given)
    assert total_formula(plan_of(config).policy, config.actor_rollout_ref.actor.kl_loss_type) == expected


@pytest.mark.parametrize(
    ("given", "total", "teachers"),
    [
        ({"use_task_rewards": False}, "L = L_teacher", "1/N · Σ m k3(π, π_T), differentiated through π"),
        (
            {"distillation_loss_coef": 0.5, "loss_max_clamp": 2.0, "loss_mode": "k2"},
            "L = L_policy + 0.5 · L_teacher",
            "1/N · Σ m clamp(k2(π, π_T), ±2), differentiated through π",
        ),
        (
            {"loss_mode": "forward_kl_topk", "topk": 8, "log_prob_min_clamp": -10.0},
            "L = L_policy + 1 · L_teacher",
            "1/N · Σ m max(0, Σ π_T(v) (log π_T(v) − log π(v))) over the 8 tokens v that π_T finds "
            "most likely at y, log-probs at least -10, differentiated through π",
        ),
        (
            {"use_policy_gradient": True, "loss_mode": "k1", "clip_ratio": 0.3},
            "L = L_policy + 1 · L_teacher",
            "where A = −k1(π, π_T), constant, ε_low = 0.3, ε_high = 0.3, c = 3",
        ),
    ],
)
def test_the_teachers_term(given: Given, total: str, teachers: str) -> None:
    keys = {f"distillation.distillation_loss.{key}": value for key, value in given.items()}
    path = "distillation.teacher_models.teacher_model.model_path"
    config = config_of({"distillation.enabled": True, path: "org/teacher", **keys})
    plan = plan_of(config).policy
    assert plan.distillation is not None
    assert total_formula(plan, "kl") == total
    assert teacher_formula(plan, plan.distillation).endswith(teachers)
    text = plan_text(config)
    assert "teacher: org/teacher, frozen" in text
    assert ("advantage (advantages)" in text) == ("L_policy" in total)


def test_weights_appear_where_they_are_applied() -> None:
    correction = "algorithm.rollout_correction"
    weighted: Given = {f"{correction}.rollout_is": "token"}
    assert " w · [" in policy_formula(plan_of(config_of(weighted)).policy)
    assert " w · [" not in policy_formula(plan_of(config_of({})).policy)
    assert " w · [" not in policy_formula(
        plan_of(config_of({**weighted, f"{correction}.bypass_mode": True})).policy
    )
