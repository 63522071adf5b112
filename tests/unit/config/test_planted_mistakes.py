"""Sixty mistakes that people make: each gives one message with the key, what must hold, what was given and
what to write."""

from pathlib import Path

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.paths import check_files

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
REF, CORRECTION = "actor_rollout_ref.ref", "algorithm.rollout_correction"
SOUND = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.train_batch_size=32",
    f"{MODEL}.path=org/model",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.n=8",
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=1",
]

# Overrides that hold the mistake; then the key, what must hold, what was given, and what to write, as the
# message says it.
Mistake = tuple[str, str, str, str, str]

TYPOS: list[Mistake] = [
    (
        "data.train_bach_size=8",
        "data.train_bach_size",
        "is not a known key",
        "train_bach_size",
        "data.train_batch_size",
    ),
    (
        f"{ACTOR}.ppo_minibatch_size=8",
        "ppo_minibatch_size",
        "is not a known key",
        "ppo_minibatch",
        f"{ACTOR}.ppo_mini_batch_size",
    ),
    (
        f"{ROLLOUT}.gpu_memory_utilisation=0.5",
        "utilisation",
        "is not a known key",
        "utilisation",
        "gpu_memory_utilization",
    ),
    ("trainer.lr=1e-6", "trainer.lr", "is not a known key", "trainer.lr", f"{ACTOR}.optim.lr"),
    ("actor.optim.lr=1e-6", "actor.optim.lr", "is not a known key", "actor.optim.lr", f"{ACTOR}.optim.lr"),
    (
        f"{CORRECTION}.rollout_is_treshold=2",
        "rollout_is_treshold",
        "is not a known key",
        "treshold",
        "rollout_is_threshold",
    ),
    (
        f"{CORRECTION}.preset=decoupled_sq_is",
        f"{CORRECTION}.preset",
        "decoupled_sq_is",
        "decoupled_sq_is",
        "decoupled_seq_is",
    ),
    ("data.shuffle.now=True", "data.shuffle.now", "is not a known key", "data.shuffle.now", "data.shuffle"),
    ("trainer.totl_epochs=3", "trainer.totl_epochs", "is not a known key", "totl", "trainer.total_epochs"),
]

STEPS = "trainer.total_training_steps"

TYPES: list[Mistake] = [
    (
        "data.train_batch_size=many",
        "data.train_batch_size",
        "must be a valid integer",
        "'many'",
        "or drop it for 1024",
    ),
    (f"{STEPS}=None", STEPS, "must be a valid integer", "'None'", f"write {STEPS}=null for none"),
    ("data.val_max_samples=None", "data.val_max_samples", "valid integer", "'None'", "or drop it for -1"),
    ("trainer.resume_from_path=None", "resume_from_path", "not be None", "'None'", "write null for none"),
    (
        "trainer.experiment_name=123",
        "_name must",
        "valid string",
        "got 123",
        """'trainer.experiment_name="123"'""",
    ),
    ("trainer.experiment_name=True", "trainer.experiment_name", "valid string", "got True", "in quotes"),
    ("data.train_files=[]", "data.train_files", "at least one file", "an empty list", "name at least"),
    ("data.val_files=null", "data.val_files", "got none", "Name them", "trainer.val_before_train=False"),
    ("data.train_batch_size=1.5", "data.train_batch_size", "must be a valid integer", "1.5", "write that"),
    ("data.train_batch_size=0", "data.train_batch_size", "greater than or equal to 1", "got 0", "write that"),
    ("data.shuffle=perhaps", "data.shuffle", "must be a valid boolean", "'perhaps'", "or drop it for True"),
    (
        f"{ACTOR}.optim.lr=fast",
        f"{ACTOR}.optim.lr",
        "must be a valid number",
        "'fast'",
        "or drop it for 1e-06",
    ),
    (f"{ACTOR}.optim.lr=-1e-6", f"{ACTOR}.optim.lr", "greater than or equal to 0", "-1e-06", "write that"),
    (
        f"{ROLLOUT}.gpu_memory_utilization=80",
        "gpu_memory_utilization",
        "less than or equal to 1",
        "got 80",
        "drop it for 0.5",
    ),
    (
        "trainer.n_gpus_per_node=0",
        "trainer.n_gpus_per_node",
        "greater than or equal to 1",
        "got 0",
        "write that",
    ),
    (
        f"{ACTOR}.clip_ratio_c=0.5",
        f"{ACTOR}.clip_ratio_c",
        "must be greater than 1",
        "got 0.5",
        "drop it for 3.0",
    ),
    ("algorithm.gamma=1.5", "algorithm.gamma", "less than or equal to 1", "got 1.5", "drop it for 1.0"),
    (
        "data.train_files=null",
        "data.train_files",
        "must be a valid list",
        "got None",
        "write data.train_files=<a valid list>",
    ),
]

VARIANTS: list[Mistake] = [
    (
        "data.truncation=top",
        "data.truncation",
        "must be 'error', 'left', 'right' or 'middle'",
        "'top'",
        "or drop it for 'error'",
    ),
    (
        f"{ACTOR}.loss_agg_mode=mean",
        "loss_agg_mode",
        "must be 'token-mean', 'token-sum'",
        "'mean'",
        "drop it for 'token-mean'",
    ),
    (
        f"{ACTOR}.kl_loss_type=k4",
        f"{ACTOR}.kl_loss_type",
        "must be 'kl', 'k1'",
        "'k4'",
        "drop it for 'low_var_kl'",
    ),
    (
        "algorithm.adv_estimator=rlooo",
        "algorithm.adv_estimator",
        "must be one of gae",
        "'rlooo'",
        "module:function",
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=ppo",
        "policy_loss.loss_mode",
        "must be one of vanilla",
        "'ppo'",
        "module:function",
    ),
    (
        f"{ACTOR}.optim.lr_scheduler_type=step",
        "lr_scheduler_type",
        "must be 'constant', 'linear' or 'cosine'",
        "'step'",
        "'constant'",
    ),
    (
        "trainer.resume_mode=yes",
        "trainer.resume_mode",
        "'auto', 'disable' or 'resume_path'",
        "yes",
        "drop it for 'auto'",
    ),
    ("trainer.logger=[console,fax]", "trainer.logger.1", "must be", "'fax'", "'tensorboard'"),
    (
        "trainer.device=tpu",
        "trainer.device",
        "must be 'auto', 'cpu' or 'cuda'",
        "'tpu'",
        "drop it for 'auto'",
    ),
    (
        f"{ROLLOUT}.dtype=int8",
        f"{ROLLOUT}.dtype",
        "must be 'bfloat16', 'float16' or 'float32'",
        "'int8'",
        "'bfloat16'",
    ),
    *(
        (
            f"{ACTOR}.fsdp_config.model_dtype={given}",
            f"{ACTOR}.fsdp_config.model_dtype",
            "must be float32 or bfloat16",
            given,
            "Pass float32",
        )
        for given in ("fp16", "float16")
    ),
    (
        f"+{ROLLOUT}.engine_kwargs.vllm.hf_overrides.head_dtype=float32",
        f"{ROLLOUT}.engine_kwargs.vllm.hf_overrides.head_dtype",
        "on one side alone widens the gap",
        "=float32",
        "pass actor_rollout_ref.model.head_dtype=float32",
    ),
    (
        f"{CORRECTION}.rollout_is=tokens",
        f"{CORRECTION}.rollout_is",
        "must be one of token, prefix, turn, sequence",
        "'tokens'",
        "did you mean token",
    ),
    (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.name", "sglang is not supported", "=sglang", "write vllm"),
    (
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.strategy",
        "Megatron, VeOmni, TorchTitan and the like are not supported",
        "=megatron",
        "write fsdp2",
    ),
    ("trainer.device=npu", "trainer.device", "NPUs are not supported", "=npu", "write cuda, cpu or auto"),
]

CONTRADICTIONS: list[Mistake] = [
    (
        f"{ACTOR}.use_dynamic_bsz=False",
        "ppo_micro_batch_size_per_gpu",
        "needs a limit",
        "neither was given",
        "use_dynamic_bsz=True",
    ),
    (
        f"{ROLLOUT}.n=1 algorithm.adv_estimator=opo",
        f"{ROLLOUT}.n",
        "compares samples of one prompt",
        "got 1",
        ">= 2",
    ),
    (
        f"{ROLLOUT}.top_p=0.9",
        f"{ROLLOUT}.top_p",
        "may leave the whole vocabulary at a token",
        "0.9",
        "top_k=20",
    ),
    (
        f"{ROLLOUT}.calculate_log_probs=False",
        "calculate_log_probs",
        "must be True",
        "calculate_log_probs=False",
        "drop the override",
    ),
    (f"{ROLLOUT}.val_kwargs.n=4", "val_kwargs.n", "would all be equal", "n=4", "val_kwargs.temperature > 0"),
    (
        f"{ROLLOUT}.val_kwargs.do_sample=True",
        "do_sample",
        "needs a temperature above 0",
        "do_sample=True",
        "temperature=<above 0>",
    ),
    (
        "critic.enable=False algorithm.adv_estimator=gae",
        "critic.enable",
        "needs a critic",
        "=False was given",
        "adv_estimator=grpo",
    ),
    (
        "trainer.resume_mode=resume_path",
        "trainer.resume_mode",
        "needs trainer.resume_from_path",
        "was not given",
        "global_step_N",
    ),
    (
        "trainer.resume_from_path=/x",
        "trainer.resume_from_path",
        "has no effect",
        "=/x",
        "trainer.resume_mode=resume_path",
    ),
    (
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys",
        "which needs it",
        "Got None",
        "the columns of the reward",
    ),
    (
        f"{CORRECTION}.rollout_rs=token_k1",
        "rollout_rs_threshold",
        "token_k1",
        "token_k1",
        "rollout_rs_threshold",
    ),
    (
        f"{ACTOR}.policy_loss.loss_mode=dro",
        "policy_loss.dro_beta",
        "loss_mode=dro, which needs it",
        "dro_beta=None",
        "dro_beta",
    ),
    (
        f"{ACTOR}.grad_clip=1 {ACTOR}.optim.clip_grad=2",
        f"{ACTOR}.grad_clip",
        "are one option",
        "=1 and",
        "give it once",
    ),
    (
        "data.gen_batch_size=8",
        "data.gen_batch_size",
        "has no effect",
        "=8",
        "algorithm.filter_groups.enable=True",
    ),
    (
        f"{ROLLOUT}.prompt_length=7",
        f"{ROLLOUT}.prompt_length",
        "always equals",
        "=7",
        "data.max_prompt_length",
    ),
]

BATCHES: list[Mistake] = [
    (
        "data.train_batch_size=30",
        "data.train_batch_size",
        "must be a multiple of",
        "got 30 and 16",
        "ppo_mini_batch_size=2",
    ),
    (
        f"{ACTOR}.ppo_max_token_len_per_gpu=100",
        "ppo_max_token_len_per_gpu",
        "must hold the longest",
        "got 100",
        "= 1024",
    ),
    (
        f"{ROLLOUT}.max_model_len=100",
        f"{ROLLOUT}.max_model_len",
        "must be at least",
        "got 100",
        "max_response_length = 1024",
    ),
    (
        f"{ROLLOUT}.response_length=9999",
        f"{ROLLOUT}.response_length",
        "always equals",
        "=9999",
        "data.max_response_length; write that",
    ),
]

DEVICES: list[Mistake] = [
    (
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        "tensor_model_parallel_size",
        "must be a multiple of",
        "got 2",
        "parallel_size=1",
    ),
    (
        f"{ROLLOUT}.n_gpus_per_node=2",
        f"{ROLLOUT}.n_gpus_per_node",
        "share the trainer's 1 devices",
        "= 2",
        "hybrid_engine=False",
    ),
    (
        f"trainer.nnodes=64 {ROLLOUT}.n=2",
        f"{ACTOR}.ppo_mini_batch_size",
        "at least one row",
        "= 32 rows",
        "trainer.nnodes",
    ),
    (
        f"{ACTOR}.fsdp_config.fsdp_size=3 trainer.nnodes=4",
        "fsdp_size",
        "must divide the 4 trainer ranks",
        "got 3",
        "Pass 2",
    ),
    (f"{ACTOR}.fsdp_config.fsdp_size=0", "fsdp_size", "must divide the 1 trainer ranks", "got 0", "Pass 1"),
    (
        f"{ACTOR}.ulysses_sequence_parallel_size=4",
        "ulysses_sequence_parallel_size",
        "divide the 1 trainer ranks",
        "=4",
        "Pass 1",
    ),
]

LEGACY: list[Mistake] = [
    (
        "custom_reward_function.path=x.py",
        "custom_reward_function.path",
        "it moved",
        "x.py",
        "write reward.custom_reward_function.path",
    ),
    (
        "reward_model.enable=True",
        "reward_model.enable",
        "it moved",
        "=True",
        "write reward.reward_model.enable",
    ),
    (
        f"{ACTOR}.tis_imp_ratio_cap=2",
        "tis_imp_ratio_cap",
        "earlier verl release",
        "=2",
        f"{CORRECTION}.rollout_is=token",
    ),
    (
        f"{ACTOR}.ppo_micro_batch_size=64",
        "ppo_micro_batch_size",
        "rows of all ranks",
        "=64",
        "write actor_rollout_ref",
    ),
    (f"{MODEL}.use_liger=True", f"{MODEL}.use_liger", "are not built", "=True", "drop it"),
    (
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.trainer_mode",
        "take turns",
        "=colocate_async",
        "write sync, or separate_async",
    ),
    ("global_profiler.tool=nsys", "global_profiler.tool", "are not supported", "=nsys", "write torch"),
]

FORMS: list[Mistake] = [
    (
        "data.train_batch_size",
        "data.train_batch_size",
        "must have the form",
        "got 'data.train_batch_size'",
        "key=value",
    ),
    ("--wrong", "--wrong", "options are", "'--wrong'", "--config-name"),
    (
        "~data.shuffle",
        "data.shuffle",
        "takes back what a run file or a group gave",
        "none gave this",
        "drop it",
    ),
]

_TEACHER = "distillation.teacher_models.teacher_model.model_path=org/teacher"
_LOSS = "distillation.distillation_loss"
_ALONE = f"distillation.enabled=True {_TEACHER} {_LOSS}.use_task_rewards=False"
TEACHERS: list[Mistake] = [
    (
        "distillation.enabled=True",
        "distillation.enabled",
        "needs a teacher",
        "got none",
        "pass a model folder",
    ),
    (
        f"distillation.enabled=True {_TEACHER} {_LOSS}.loss_mode=k1",
        f"{_LOSS}.use_policy_gradient",
        "does not depend on the teacher",
        "loss_mode=k1",
        "use_policy_gradient=True",
    ),
    (
        f"{_ALONE} {ACTOR}.policy_loss.loss_mode=gspo",
        "policy_loss.loss_mode",
        "trains on the task's rewards",
        "gspo",
        "drop it",
    ),
    (
        f"{_ALONE} algorithm.adv_estimator=gae",
        "algorithm.adv_estimator",
        "values of the task's rewards",
        "gae",
        "pass grpo",
    ),
    (
        f"{_ALONE} algorithm.rollout_correction.rollout_opsm_threshold=0.1",
        "rollout_opsm_threshold",
        "the task's advantages",
        "use_task_rewards=False",
        "drop it",
    ),
    (
        f"distillation.enabled=True {_TEACHER} {_LOSS}.loss_mode=forward_kl_topk_tail",
        f"{_LOSS}.loss_mode",
        "is not built",
        "forward_kl_topk_tail",
        "write forward_kl_topk",
    ),
    (
        f"distillation.enabled=True {_TEACHER} {_LOSS}.loss_mode=forward_kl_topk "
        f"{_LOSS}.use_policy_gradient=True",
        f"{_LOSS}.loss_mode",
        "no advantage of the sampled one",
        "use_policy_gradient=True",
        "pass False",
    ),
    (
        f"distillation.enabled=True {_TEACHER} distillation.nnodes=1",
        "distillation.nnodes",
        "sharded over the trainer's ranks",
        "=1",
        "drop it",
    ),
]

MISTAKES = [*TEACHERS, *TYPOS, *TYPES, *VARIANTS, *CONTRADICTIONS, *BATCHES, *DEVICES, *LEGACY, *FORMS]


def test_the_list_is_long_enough_and_what_it_starts_from_is_sound() -> None:
    assert len(MISTAKES) + len(FILES) >= 60
    load_run_config(SOUND)


@pytest.mark.parametrize(
    ("overrides", "key", "must", "given", "write"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES]
)
def test_a_mistake_gives_one_message(overrides: str, key: str, must: str, given: str, write: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config([*SOUND, *overrides.split()])
    assert_complete(str(caught.value), key, must, given, write)


def assert_complete(message: str, *parts: str) -> None:
    """All parts are said, in one message for the one mistake; a translation's command stands on a line of its
    own."""
    missing = [part for part in parts if part not in message]
    assert not missing, message
    problems = [line for line in message.splitlines() if not line.startswith(("  ", "("))]
    assert len(problems) == 1, message


FILES = [
    ("data.train_files=nowhere.parquet", "data.train_files"),
    ("data.val_files=['here.parquet','nowhere.parquet']", "data.val_files"),
    (f"{MODEL}.path=/nowhere", f"{MODEL}.path"),
    ("critic.model.path=/nowhere algorithm.adv_estimator=gae", "critic.model.path"),
    (f"{REF}.model_path=./nowhere {ACTOR}.use_kl_loss=True", f"{REF}.model_path"),
    ("reward.custom_reward_function.path=nowhere.py", "reward.custom_reward_function.path"),
    ("data.custom_cls.path=nowhere.py data.custom_cls.name=Own", "data.custom_cls.path"),
]


@pytest.mark.parametrize(("overrides", "key"), FILES, ids=[overrides for overrides, _ in FILES])
def test_a_missing_file_gives_one_message(
    overrides: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "val.parquet", "here.parquet"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        check_files(load_run_config([*SOUND, *overrides.split()]))
    assert_complete(str(caught.value), key, "must", "nowhere")


def test_master_weights_of_a_critic_in_float16_are_refused_and_those_of_a_frozen_reference_are_not():
    gae = ["algorithm.adv_estimator=gae", "critic.model.path=model", "critic.fsdp_config.dtype=fp16"]
    with pytest.raises(
        ConfigError, match=r"critic\.fsdp_config\.model_dtype must be float32 or bfloat16, got fp16"
    ):
        load_run_config([*SOUND, *gae, "critic.fsdp_config.model_dtype=fp16"])
    frozen = [f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.fsdp_config.model_dtype=fp16"]
    assert load_run_config([*SOUND, *gae, *frozen]).actor_rollout_ref.ref.fsdp_config.model_dtype == "fp16"
