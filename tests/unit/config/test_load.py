"""From overrides and YAML files to a configuration: forms that are accepted, and mistakes that are named."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_config, load_run_config, run_with_config, save_resolved_config
from verl_rc.config.run import RunConfig

ROOT = Path(__file__).parents[3]
CORRECTION = "algorithm.rollout_correction"
VALID = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=32",
    "actor_rollout_ref.model.path=model",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.n=8",
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=1",
]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("data.shuffle=False", "data.shuffle", False),
        ("+data.shuffle=False", "data.shuffle", False),
        ("++data.shuffle=False", "data.shuffle", False),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr", 1e-6),
        ("trainer.total_training_steps=null", "trainer.total_training_steps", None),
        ("trainer.logger=['console','wandb']", "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=[console]", "trainer.logger", ["console"]),
        ("data.train_files=['a.parquet','b.parquet']", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_files=\"['a.parquet','b.parquet']\"", "data.train_files", ["a.parquet", "b.parquet"]),
        (
            "data.train_files=['~/a.parquet', 'b.parquet']",
            "data.train_files",
            [f"{Path.home()}/a.parquet", "b.parquet"],
        ),
        ('trainer.logger=\'["console","wandb"]\'', "trainer.logger", ["console", "wandb"]),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("trainer.project_name='a b, c'", "trainer.project_name", "a b, c"),
        ("data.truncation='left'", "data.truncation", "left"),
        ("trainer.val_before_train=false", "trainer.val_before_train", False),
        (
            "+data.apply_chat_template_kwargs.enable_thinking=False",
            "data.apply_chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ("data.train_files=~/data/a.parquet", "data.train_files", [str(Path.home() / "data" / "a.parquet")]),
        (
            "actor_rollout_ref.rollout.engine_kwargs.vllm.x=32",
            "actor_rollout_ref.rollout.engine_kwargs.vllm",
            {"x": 32},
        ),
        (
            "reward.custom_reward_function.reward_kwargs={scale: 2}",
            "reward.custom_reward_function.reward_kwargs",
            {"scale": 2},
        ),
        ("data.val_batch_size=${data.train_batch_size}", "data.val_batch_size", 32),
        ("data.val_batch_size=${data.max_prompt_length}", "data.val_batch_size", 512),
        (f"{CORRECTION}.preset=decoupled_seq_is", f"{CORRECTION}.rollout_is", "sequence"),
        (f"{CORRECTION}.preset=null", f"{CORRECTION}.rollout_is", None),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio_low", 0.3),
    ],
)
def test_forms_users_write(override: str, key: str, value: object) -> None:
    found: object = load_run_config([*VALID, override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_an_underscore_in_a_threshold_is_never_lost() -> None:
    config = load_run_config(
        [*VALID, f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5_5"]
    )
    bounds = config.algorithm.rollout_correction.weight_threshold()
    assert (bounds.lower, bounds.upper) == (0.5, 5.0)


def test_a_comma_list_of_rules_is_no_sweep() -> None:
    rules = f"{CORRECTION}.rollout_rs=token_k1,seq_mean_k3"
    config = load_run_config([*VALID, rules, f"{CORRECTION}.rollout_rs_threshold=0.5_2.0,0.01"])
    assert len(config.algorithm.rollout_correction.rejection_bounds()) == 2


def test_given_leaves_win_over_the_preset() -> None:
    preset = [f"{CORRECTION}.rollout_is_threshold=3.0", f"{CORRECTION}.preset=decoupled_token_is"]
    correction = load_run_config([*VALID, *preset]).algorithm.rollout_correction
    assert (correction.rollout_is, correction.weight_threshold().upper) == ("token", 3.0)


MISTAKES = [
    (
        "data.train_bach_size=8",
        "data.train_bach_size is not a known key; the nearest is data.train_batch_size",
    ),
    (
        "trainer.lr=1",
        "trainer.lr is not a known key; the nearest is critic.optim.lr or actor_rollout_ref.actor.optim.lr",
    ),
    ("data.shuffle.now=1", "data.shuffle.now is not a known key"),
    ("data.train_batch_size=many", "data.train_batch_size must be a valid integer; got 'many'"),
    ("data.train_batch_size=0", "data.train_batch_size must be greater than or equal to 1"),
    ("data.truncation=top", "data.truncation must be 'error', 'left', 'right' or 'middle'"),
    ("data.train_files=null", "data.train_files"),
    (
        "data.train_batch_size=30",
        "data.train_batch_size must be a multiple of actor_rollout_ref.actor.ppo_mini_batch_size",
    ),
    (
        "actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=opo",
        "needs actor_rollout_ref.rollout.n >= 2, got 1",
    ),
    ("actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=rloo_vectorized", "every advantage would be 0"),
    ("actor_rollout_ref.rollout.temperature=0", "actor_rollout_ref.rollout.temperature"),
    ("actor_rollout_ref.rollout.top_p=0.9", "may leave the whole vocabulary at a token"),
    ("actor_rollout_ref.rollout.min_p=0.1", "may leave the whole vocabulary at a token"),
    ("actor_rollout_ref.rollout.max_support=9", "has no effect without a filter"),
    (
        "actor_rollout_ref.rollout.top_k=50 actor_rollout_ref.rollout.max_support=20",
        "must be at least top_k=50",
    ),
    (
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True "
        "actor_rollout_ref.rollout.enable_prefix_caching=False",
        "needs actor_rollout_ref.rollout.enable_prefix_caching=True",
    ),
    (
        "actor_rollout_ref.rollout.sync_proof.survival_freq=5 actor_rollout_ref.rollout.quantization=fp8 "
        "trainer.device=cuda",
        "needs actor_rollout_ref.rollout.quantization=null or fp8_per_channel",
    ),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.enable_return_routed_experts=True", "the run sets it"),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=5", "the run sets it"),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.min_p=0.1", "changes the sampled distribution"),
    (
        "actor_rollout_ref.rollout.engine_kwargs.vllm.logits_processors=[a:b]",
        "changes the sampled distribution",
    ),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.dtype=float32", "write actor_rollout_ref.rollout.dtype."),
    (
        "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=9",
        "write actor_rollout_ref.rollout.kv_cache_mega",
    ),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm.logprobs_mode=raw_logprobs", "the run sets it; drop it"),
    (
        "actor_rollout_ref.rollout.calculate_log_probs=False",
        "calculate_log_probs=False is refused: it must be True",
    ),
    ("actor_rollout_ref.rollout.name=sglang", "the engine sglang is not supported; write vllm"),
    ("actor_rollout_ref.rollout.max_model_len=100", "max_model_len must be at least"),
    (
        "actor_rollout_ref.rollout.response_length=9999",
        "it always equals data.max_response_length",
    ),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "must be a multiple of"),
    ("actor_rollout_ref.rollout.val_kwargs.n=4", "greedy samples would all be equal"),
    ("actor_rollout_ref.rollout.dtype=int8", "actor_rollout_ref.rollout.dtype"),
    ("actor_rollout_ref.rollout.multi_turn.enable=True", "needs a tool"),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100", "must hold the longest sequence"),
    ("actor_rollout_ref.actor.use_dynamic_bsz=False", "a micro-batch needs a limit"),
    (
        "actor_rollout_ref.actor.grad_clip=0.5 actor_rollout_ref.actor.optim.clip_grad=1",
        "actor_rollout_ref.actor.grad_clip=0.5 and actor_rollout_ref.actor.optim.clip_grad=1 are one option",
    ),
    ("actor_rollout_ref.actor.clip_ratio_c=0.5", "actor_rollout_ref.actor.clip_ratio_c"),
    ("actor_rollout_ref.actor.loss_agg_mode=mean", "actor_rollout_ref.actor.loss_agg_mode"),
    ("actor_rollout_ref.actor.optim.betas=[0.9]", "actor_rollout_ref.actor.optim.betas"),
    ("actor_rollout_ref.actor.optim.lr_scheduler_type=step", "lr_scheduler_type"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=nonsense", "loss_mode"),
    ("actor_rollout_ref.actor.megatron.x=1", "Megatron is not supported"),
    ("reward_model.enable=True", "it moved; write reward.reward_model.enable"),
    ("custom_reward_function.path=x.py", "write reward.custom_reward_function.path"),
    ("algorithm.adv_estimator=rlooo", "algorithm.adv_estimator must be one of gae, grpo, grpo_passk, rloo"),
    ("actor_rollout_ref.actor.policy_loss.loss_mode=dro", "dro_beta belongs to loss_mode=dro"),
    ("actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0", "clip_cov_ratio"),
    (
        "algorithm.adv_estimator=gdpo",
        "gdpo_reward_keys belongs to algorithm.adv_estimator=gdpo, which needs it",
    ),
    ("algorithm.gdpo_reward_keys=[acc]", "gdpo_reward_keys belongs to algorithm.adv_estimator=gdpo"),
    (
        "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[acc,score] "
        "algorithm.gdpo_reward_weights=[1]",
        "must hold one weight for each",
    ),
    (
        "algorithm.adv_estimator=optimal_token_baseline algorithm.rollout_correction.bypass_mode=True",
        "needs the proximal policy's probabilities",
    ),
    (
        f"trainer.alerts.cause=skip {CORRECTION}.diagnostics=core",
        "trainer.alerts.cause=skip needs signatures",
    ),
    (
        f"trainer.alerts.cause=skip {CORRECTION}.diagnostics=full {CORRECTION}.bypass_mode=True",
        "trainer.alerts.cause=skip needs a cause that is known before the update",
    ),
    (
        "async_training.staleness_threshold=1 actor_rollout_ref.hybrid_engine=False "
        f"{CORRECTION}.diagnostics=full {CORRECTION}.rollout_is=token {CORRECTION}.proximal=interpolate "
        "trainer.alerts.cause=skip",
        "trainer.alerts.cause=skip needs a cause that is known before the update",
    ),
    (
        "trainer.alerts.mismatch=save_and_stop trainer.alerts.mismatch_limit=null",
        "trainer.alerts.mismatch=save_and_stop needs a limit above which it acts, got "
        "trainer.alerts.mismatch_limit=null",
    ),
    ("trainer.alerts.reward_drop=null", "it is fixed at 0.5; drop it"),
    ("trainer.resume_from_path=/x", "has no effect with trainer.resume_mode=auto"),
    (
        "actor_rollout_ref.actor.optim=3 actor_rollout_ref.actor.grad_clip=1",  # which moved below optim
        "actor_rollout_ref.actor.optim must be a section; got 3",
    ),
    ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
    ("trainer.resume_mode=yes", "trainer.resume_mode"),
    ("critic.enable=False algorithm.adv_estimator=gae", "gae needs a critic"),
    (
        "critic.enable=True critic.ppo_max_token_len_per_gpu=8",
        "critic.ppo_max_token_len_per_gpu must hold the longest",
    ),
    ("critic.enable=True critic.ppo_mini_batch_size=7", "multiple of critic.ppo_mini_batch_size"),
    ("actor_rollout_ref.rollout.n_gpus_per_node=2", "engines share the trainer's 1 devices"),
    (
        "actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.checkpoint_engine.backend=ipc",
        "backend=ipc needs engines on the trainer's devices",
    ),
    (
        f"algorithm.adv_estimator=reinforce_plus_plus {CORRECTION}.preset=decoupled_geo_rs "
        f"{CORRECTION}.rejected_in_group_baseline=exclude",
        "needs an estimator that compares samples",
    ),
    ("algorithm.gamma=1.5", "algorithm.gamma"),
    ("algorithm.filter_groups.max_inflight_gen_batches=3", "write max_num_gen_batches"),
    ("data.gen_batch_size=8", "has no effect without algorithm.filter_groups.enable=True"),
    ("algorithm.max_refills=2", r"got rollout_rs=None in decoupled mode; pass a rule"),
    (f"algorithm.max_refills=2 {CORRECTION}.rollout_opsm_threshold=0.1", "got rollout_rs=None"),
    (
        f"algorithm.max_refills=2 {CORRECTION}.rollout_rs=seq_mean_k1 {CORRECTION}.rollout_rs_threshold=1.1 "
        f"{CORRECTION}.rollout_rs_target_acceptance=0.9",
        "whose threshold would fall in every step; drop one of them",
    ),
    (
        f"algorithm.max_refills=2 {CORRECTION}.rollout_rs=seq_mean_k1 {CORRECTION}.rollout_rs_threshold=1.1 "
        "algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=3",
        "max_num_gen_batches=3 limits for one batch; pass 0",
    ),
    (
        "algorithm.max_refills=2 algorithm.rollout_correction.preset=bypass_pg_geo_rs "
        "algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1",
        r"in bypass mode; pass a rule and algorithm.rollout_correction.bypass_mode=False",
    ),
    (
        "algorithm.filter_groups.enable=True actor_rollout_ref.rollout.n=1 algorithm.adv_estimator=remax",
        "compares the samples of one prompt",
    ),
    (
        "algorithm.filter_groups.enable=True data.gen_batch_size=1 "
        "algorithm.filter_groups.max_num_gen_batches=1",
        "can never give data.train_batch_size=",
    ),
    (
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=seq_final_reward "
        "algorithm.use_kl_in_reward=True",
        "pass metric=reward",
    ),
    (
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
        "reward.reward_model.enable=True reward.reward_model.model_path=org/judge",
        "gives only its score; pass metric=reward",
    ),
    ("reward.reward_kwargs.overlong_buffer_cfg.enable=True", "overlong_buffer_cfg.len must be given"),
    (
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True "
        "reward.reward_kwargs.overlong_buffer_cfg.len=100000",
        "be at most data.max_response_length",
    ),
    (
        "ray_kwargs.ray_init.address=auto ray_kwargs.ray_init.num_cpus=4",
        "joins a running cluster, which was started with settings of its own, but num_cpus=4 was given",
    ),
    (
        "ray_kwargs.ray_init.loopback_only=False",
        "a local Ray listens on 127.0.0.1 alone",
    ),
    ("trainer.logger=[console,fax]", "trainer.logger.1 must be"),
    ("trainer.device=tpu", "trainer.device"),
    ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node"),
    ("transfer_queue.enable=True", "there is no separate data plane here"),
    (f"{CORRECTION}.preset=decoupled_sq_is", "decoupled_seq_is"),
    (f"{CORRECTION}.rollout_is=tokens", f"{CORRECTION}.rollout_is"),
    (f"{CORRECTION}.rollout_rs=token_k1", "rollout_rs_threshold"),
    ("data.train_batch_size", "must have the form key=value"),
    ("trainer.logger=[console", "the overrides cannot be read"),
    ("--wrong", "options are --config-name"),
    ("trainer.seed=1,2", "write --multirun for a run each, or trainer.seed=[…] for a list"),
    ("~data.shuffle", "~key takes back what a run file or a group gave"),
    ("~data.shufle", "the nearest is data.shuffle"),
    ("hydra.run.dir=/x", "a run's files go to trainer.default_local_dir"),
    ("--config-name=ppo_megatron_trainer.yaml", "megatron is not supported"),
]


@pytest.mark.parametrize(("override", "message"), MISTAKES, ids=[override for override, _ in MISTAKES])
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config([*VALID, *override.split()])
    assert message in str(caught.value)


@pytest.mark.parametrize("missing", ["data.train_files", "data.val_files", "actor_rollout_ref.model.path"])
def test_what_must_be_given_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{missing} must be given: write {missing}=<value>.")):
        load_run_config([override for override in VALID if not override.startswith(missing)])


def write_run_file(folder: Path, text: str) -> list[str]:
    (folder / "run.yaml").write_text(text)
    return ["--config-dir", str(folder), "--config-name=run", *VALID]


def test_a_run_file_and_overrides_that_win(tmp_path: Path) -> None:
    arguments = write_run_file(tmp_path, "data:\n  shuffle: false\n  max_prompt_length: 99\n")
    config = load_run_config([*arguments, "data.max_prompt_length=98"])
    assert (config.data.shuffle, config.data.max_prompt_length) == (False, 98)


def test_a_preset_in_a_run_file_gives_way_to_its_neighbours(tmp_path: Path) -> None:
    text = "algorithm:\n  rollout_correction:\n    preset: decoupled_seq_is\n    rollout_is_threshold: 7\n"
    correction = load_run_config(write_run_file(tmp_path, text)).algorithm.rollout_correction
    assert (correction.rollout_is, correction.weight_threshold().upper) == ("sequence", 7.0)


VERLS_OWN_START = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 99
  return_raw_chat: True
actor_rollout_ref:
  rollout:
    name: vllm
    mode: async
  actor:
    grad_clip: 0.5
"""


@pytest.mark.filterwarnings("ignore:provider=hydra.searchpath")
def test_a_run_file_of_verl(tmp_path: Path) -> None:
    config = load_run_config(write_run_file(tmp_path, VERLS_OWN_START))
    assert (config.data.max_prompt_length, config.actor_rollout_ref.actor.optim.clip_grad) == (99, 0.5)


@pytest.mark.parametrize(
    "option", [["--config-name=ppo_trainer"], ["--config-name", "ppo_trainer.yaml"], ["-cn", "ppo_trainer"]]
)
def test_verls_own_file_is_what_the_defaults_are(option: list[str]) -> None:
    assert load_run_config([*option, *VALID]) == load_run_config(VALID)


@pytest.mark.parametrize("option", ["--config-path", "--config-dir", "-cp", "-cd"])
def test_options_of_hydra_for_the_folder(option: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  max_prompt_length: 99\n")
    assert load_run_config([f"{option}={tmp_path}", "-cn=run", *VALID]).data.max_prompt_length == 99


def test_a_tilde_takes_back_what_a_run_file_gave(tmp_path: Path) -> None:
    arguments = write_run_file(tmp_path, "data:\n  shuffle: false\n  max_prompt_length: 99\n")
    assert load_run_config([*arguments, "~data.max_prompt_length"]).data.max_prompt_length == 512


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that VALID names."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    return tmp_path


def runs_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[RunConfig]:
    """The configurations that a command line runs."""
    monkeypatch.setattr(sys, "argv", ["verl_rc.main_ppo", *arguments])
    runs: list[RunConfig] = []
    run_with_config(RunConfig, runs.append, "verl_rc.main_ppo")
    return runs


def test_a_sweep_runs_once_for_each_value(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = f"{CORRECTION}.rollout_rs=token_k1,seq_mean_k3"
    sweep = [
        "--multirun",
        *VALID,
        "+trainer.seed=1,2",
        rules,
        f"{CORRECTION}.rollout_rs_threshold=0.5_2.0,0.01",
    ]
    runs = runs_of(monkeypatch, *sweep)
    assert [(run.trainer.seed, len(run.algorithm.rollout_correction.rejection_bounds())) for run in runs] == [
        (1, 2),
        (2, 2),
    ]
    assert sorted(path.name for path in files.iterdir()) == ["model", "train.parquet", "val.parquet"]


def test_a_sweep_over_groups_presets_and_thresholds(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def corrections(*arguments: str) -> list[tuple[object, object]]:
        runs = [run.algorithm.rollout_correction for run in runs_of(monkeypatch, *VALID, *arguments)]
        return [(run.rollout_is, run.rollout_is_threshold) for run in runs]

    presets = "decoupled_token_is,decoupled_seq_is"
    expected = [("token", 2.0), ("sequence", 2.0)]
    assert corrections("-m", f"correction={presets}") == expected
    assert corrections("-m", f"{CORRECTION}.preset={presets}") == expected
    bounds = f"{CORRECTION}.rollout_is_threshold=choice('0.5_5',3)"
    assert corrections("-m", "correction=decoupled_token_is", bounds) == [
        ("token", "0.5_5.0"),
        ("token", 3.0),
    ]
    assert corrections("-m", "correction=glob(decoupled_token_*)") == [("token", "0.5_5.0"), ("token", 2.0)]


def test_runs_of_a_sweep_write_to_folders_of_their_own(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folders(*arguments: str) -> list[str | None]:
        return [
            run.trainer.default_local_dir
            for run in runs_of(monkeypatch, "-m", *VALID, "trainer.seed=4,5", *arguments)
        ]

    assert folders("trainer.default_local_dir=a") == ["a/0", "a/1"]
    assert folders("trainer.default_local_dir='a/${trainer.seed}'") == ["a/4", "a/5"]


def test_no_run_of_a_sweep_starts_when_one_cannot(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    started: list[RunConfig] = []
    monkeypatch.setattr(sys, "argv", ["verl_rc.main_ppo", "-m", *VALID, "trainer.nnodes=1,0"])
    with pytest.raises(SystemExit) as raised:
        run_with_config(RunConfig, started.append, "verl_rc.main_ppo")
    assert (raised.value.code, started) == (2, [])
    assert "trainer.nnodes must be greater than or equal to 1; got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  shufle: false\n", "data.shufle is not a known key"),
        ("algorithm:\n  rollout_correction:\n    rollout_is_threshold: 0.5_5\n", "must be quoted"),
    ],
)
def test_mistakes_in_a_run_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(write_run_file(tmp_path, text))


def test_a_quoted_band_in_a_run_file(tmp_path: Path) -> None:
    text = 'algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: "0.5_5"\n'
    assert (
        load_run_config(write_run_file(tmp_path, text)).algorithm.rollout_correction.weight_threshold().lower
        == 0.5
    )


def test_the_resolved_configuration_loads_back(tmp_path: Path) -> None:
    config = load_run_config([*VALID, f"{CORRECTION}.preset=decoupled_token_icepop"])
    path = save_resolved_config(config, tmp_path)
    assert load_config(RunConfig, ["--config-dir", str(tmp_path), "--config-name", path.stem]) == config


@pytest.mark.parametrize(
    "arguments",
    [
        "harware=cpu",
        "hardware=gpu",
        "task=digits task=math",
        "--config-dir=nowhere",
        "--config-dir=.",
        "--cfg=none",
        "-m hardware=cpu,gpu task=digits",
        "--info --cfg=job",
        "task=digits hardware=cpu data.train_batch_size=7",
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        runs_of(monkeypatch, *arguments.split())
    printed = capsys.readouterr()
    assert (raised.value.code, printed.out) == (2, "")
    assert re.fullmatch(r"configuration error:\n[^\n]+[.?]\n", printed.err), printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.train_bach_size=8"], "the nearest is data.train_batch_size"),
        (VALID, "must name existing files"),
    ],
)
def test_the_process_exits_with_2_and_one_message(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "verl_rc.main_ppo", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
