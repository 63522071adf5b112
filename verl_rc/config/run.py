"""The whole configuration of a run, resolved and frozen; its length, devices and output."""

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from verl_rc.config.algorithm import AlgorithmConfig
from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.config.distillation import DistillationConfig
from verl_rc.config.models import (
    ActorConfig,
    CriticConfig,
    FrozenPolicy,
    FsdpConfig,
    ModelConfig,
    ReferenceConfig,
)
from verl_rc.config.profiler import ProfilerConfig
from verl_rc.config.rollout import RolloutConfig
from verl_rc.config.schema import (
    OneOrMore,
    StrictModel,
    UserPath,
    default_at,
    fields_of,
    followed_key,
    set_value,
    value_at,
)
from verl_rc.config.task import DataConfig, RewardConfig

AlertAction = Literal["warn", "skip", "save_and_stop"]
EXPERIMENTS = ("wandb", "mlflow", "swanlab", "trackio")
"""Loggers that keep a run of their own, with project and name."""
Logger = Literal["console", "file", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"]


class AlertsConfig(StrictModel):
    """``trainer.alerts.*``: actions when training goes wrong.

    ``warn`` sends an alert to W&B and the console. ``skip`` also skips the step's updates; the next
    publication sends the same weights again and empties the engines' caches. ``save_and_stop`` skips the
    updates, writes a checkpoint and ends the run. Where the actor corrects (bypass mode,
    ``proximal=interpolate``), mismatch and cause are known only after the update, which therefore cannot be
    skipped.
    """

    mismatch: AlertAction = "warn"
    """Action when ``rollout_corr/k3_kl`` is above ``mismatch_limit``; not ``skip`` where the actor corrects.
    """
    mismatch_limit: float | None = Field(0.5, gt=0)
    """Nats per token; null: never."""
    gap: AlertAction = "warn"
    """Action when the mean gap of canary tokens, or in synchronous runs of a step's rollouts, is above
    ``sync/gap_limit`` (docs/glossary.md says when the run ends); not ``skip`` where the actor corrects."""
    cause: AlertAction = "warn"
    """Action while signatures name a cause of the gap that no correction repairs (docs/see_why.md); other
    than ``warn`` it needs ``diagnostics=full``; not ``skip`` where the actor corrects."""
    reward_collapse: AlertAction = "warn"
    """Action when the mean score of the last ``reward_window`` steps has fallen by more than half of the best
    such mean, and four standard errors."""
    reward_window: int = Field(5, ge=1)
    """Steps of the mean score."""


class TokenRecordsConfig(StrictModel):
    """``trainer.token_records.*``: what was computed for each token of a few rows, as parquet files in the
    run's folder.

    They hold prompts and responses, never leave the folder, and only the user can read them. ``verl-rc
    report`` shows them.
    """

    enable: bool = True
    """Write records at steps 1 and 2, every ``freq`` steps, after each checkpoint and alert."""
    rows_per_step: int = Field(16, ge=2)
    """Rows of a record: half at random, half those with the largest differences of log-probs."""
    freq: int = Field(10, ge=1)
    """Steps between records."""
    full_freq: int = Field(0, ge=0)
    """Steps between records of the whole batch; 0: never."""
    max_megabytes: int = Field(200, ge=1)
    """Maximum size of all records, MiB; above it every second one is removed, those of alerts last."""
    contents: Literal["full", "no_prompts", "numbers_only"] = "full"
    """``no_prompts``: responses only; ``numbers_only``: no text, only numbers and the kind of each token."""


class TrainerConfig(StrictModel):
    """``trainer.*``."""

    project_name: str = "verl_rc"
    """Project in W&B and other trackers."""
    experiment_name: str = "default"
    """Run name in W&B and other trackers."""
    logger: Annotated[list[Logger], OneOrMore] = ["console", "wandb"]
    """Sinks of metrics besides metrics.jsonl (a name or a list): console, wandb, mlflow, swanlab, trackio,
    tensorboard; file is metrics.jsonl itself."""
    default_local_dir: UserPath | None = None
    """The run's folder; null: checkpoints/<project_name>/<experiment_name>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: GPUs when the cluster has any."""
    nnodes: int = Field(1, ge=1)
    """Nodes with trainer ranks."""
    n_gpus_per_node: int = Field(8, ge=1)
    """Trainer ranks per node; on a CPU each needs a core."""
    seed: int = 1
    """Seed of the order of prompts and mini-batches, of samples, dropout and adapters."""
    balance_batch: bool = True
    """Give each rank equally many tokens of a mini-batch; False: equally many rows, in their order. Results
    differ by rounding only."""
    total_epochs: int = Field(30, ge=1)
    """Passes over the training prompts."""
    total_training_steps: int | None = Field(None, ge=1)
    """Total steps, at most as many as the epochs have; null: all steps of the epochs."""
    val_before_train: bool = True
    """Validate before the first step of a run that is not resumed."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: int = -1
    """Steps between validations, the last of which follows the last step; <= 0: never."""
    save_freq: int = -1
    """Steps between checkpoints, the last of which follows the last step; <= 0: never."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """``auto``: resume from the newest checkpoint in ``default_local_dir``, if any; ``disable``: start from
    scratch; ``resume_path``: resume from ``resume_from_path``."""
    resume_from_path: UserPath | None = None
    """Checkpoint folder (``.../global_step_N``) for ``resume_mode=resume_path``."""
    max_actor_ckpt_to_keep: int | None = Field(None, ge=1)
    """Number of newest checkpoints that are kept; null: all."""
    critic_warmup: int = Field(0, ge=0)
    """Steps before this one train the critic only."""
    log_val_generations: int = Field(0, ge=0)
    """Validation samples shown in a table."""
    rollout_data_dir: UserPath | None = None
    """Folder for every step's samples as JSON lines; null: none."""
    validation_data_dir: UserPath | None = None
    """Folder for validation samples as JSON lines; null: none."""
    ready_timeout_seconds: float = Field(1800.0, gt=0)
    """Time limit for a process to become ready, seconds."""
    alerts: AlertsConfig = AlertsConfig()
    """Actions when mismatch or reward go wrong."""
    token_records: TokenRecordsConfig = TokenRecordsConfig()
    """Records of single tokens."""
    report: Literal["at_end", "never"] = "at_end"
    """``at_end``: the run writes ``report.html`` into its folder when it ends or fails."""
    wandb_text: bool = False
    """Show prompts, responses and tokens in the report's page in W&B and other trackers."""
    hang_timeout_seconds: float = Field(3600.0, gt=0)
    """Time limit for any other answer of a process, seconds. An engine that exceeds it is killed and
    replaced; for another process, stacks are written to the run's folder and the run ends."""

    @property
    def validates(self) -> bool:
        """Whether the run validates at any time."""
        return self.val_only or self.val_before_train or self.test_freq > 0


class RayInitConfig(StrictModel):
    """``ray_kwargs.ray_init.*``."""

    address: str | None = None
    """A running cluster, e.g. ``auto`` or ``ray://host:10001``; null: start Ray on this machine, where it
    listens on 127.0.0.1 alone."""
    num_cpus: int | None = Field(None, ge=1)
    """Logical CPUs of a local Ray; null: enough for this run."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs of a local Ray; null: those that it finds."""
    object_store_memory: int | None = Field(None, ge=80_000_000)
    """Shared memory of a local Ray, bytes; null: a tenth of the memory, between 512 MiB and half of /dev/shm.
    """
    runtime_env: dict[str, Any] | None = None
    """Ray's runtime environment, e.g. ``py_executable`` or ``env_vars`` (numbers become text, booleans ``1``
    and ``0``)."""

    @field_validator("runtime_env")
    @classmethod
    def _environment_is_text(cls, runtime_env: dict[str, Any] | None) -> dict[str, Any] | None:
        """Variables as text: Hydra and YAML read ``NCCL_IB_DISABLE: 1`` as a number."""
        variables = (runtime_env or {}).get("env_vars")
        if runtime_env is None or variables is None:
            return runtime_env
        if not isinstance(variables, Mapping):
            raise ValueError(f"env_vars must be a mapping of names to values, got {variables!r}.")
        for name, value in variables.items():
            if value is not None and not isinstance(value, (str, int, float)):
                raise ValueError(f"env_vars.{name} must be text, a number or a boolean, got {value!r}.")
        return {**runtime_env, "env_vars": {str(name): _as_text(value) for name, value in variables.items()}}


def _as_text(value: str | float | None) -> str | None:
    """A variable's value; None stays None."""
    if isinstance(value, bool):
        return str(int(value))
    return None if value is None else str(value)


class RayKwargsConfig(StrictModel):
    """``ray_kwargs.*``."""

    ray_init: RayInitConfig = RayInitConfig()
    """Arguments of ``ray.init``."""


_LEARNERS = {"actor": "actor_rollout_ref.actor.fsdp_config", "critic": "critic.fsdp_config"}


def fsdp_section(role: str) -> str:
    """The section of sharding and precision of a trainer role."""
    return _LEARNERS.get(role, "actor_rollout_ref.ref.fsdp_config")


class ActorRolloutRefConfig(StrictModel):
    """``actor_rollout_ref.*``: the policy, how it is trained and how it is sampled."""

    model: ModelConfig
    """The model."""
    actor: ActorConfig
    """Its update."""
    rollout: RolloutConfig = RolloutConfig()
    """Its rollouts."""
    ref: ReferenceConfig = ReferenceConfig()
    """The reference policy of the KL penalty."""
    hybrid_engine: bool = True
    """Engines share the trainer's devices; False: they use separate devices."""
    exact: bool = False
    """Engine, actor and reference compute the same bits (docs/exact.md); a log-prob that differs ends the
    run. Never run on a GPU."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether tokens that rows have in common may be computed once."""
        return self.model.share_prefixes is not False and self.model.use_remove_padding and not self.exact


class RunConfig(StrictModel):
    """A whole run."""

    data: DataConfig
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig
    """The policy."""
    critic: CriticConfig = CriticConfig()
    """The critic."""
    reward: RewardConfig = RewardConfig()
    """Rewards."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and rollout correction."""
    distillation: DistillationConfig = DistillationConfig()
    """Teachers."""
    async_training: AsyncTrainingConfig = AsyncTrainingConfig()
    """Rollouts beside updates."""
    trainer: TrainerConfig = TrainerConfig()
    """Length, devices, output."""
    global_profiler: ProfilerConfig = ProfilerConfig()
    """Traces of single steps."""
    ray_kwargs: RayKwargsConfig = RayKwargsConfig()
    """Ray."""

    @model_validator(mode="before")
    @classmethod
    def _follow_fallbacks(cls, source: Any) -> Any:
        """Fill every key that is null and takes the value of another key."""
        if not isinstance(source, Mapping):
            return source
        tree: dict[str, Any] = copy.deepcopy(dict(source))
        _size_of_a_step(tree)
        for key, followed in FOLLOWED_KEYS.items():
            if (
                _given_or_default(tree, key) is None
                and (value := _given_or_default(tree, followed)) is not None
            ):
                set_value(tree, key, value)
        if _given_or_default(tree, "trainer.default_local_dir") is None:
            names = (
                _given_or_default(tree, "trainer.project_name"),
                _given_or_default(tree, "trainer.experiment_name"),
            )
            set_value(tree, "trainer.default_local_dir", "checkpoints/{}/{}".format(*names))
        return tree

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained: ``critic.enable``, or where that is null, whether the estimator needs
        values."""
        return self.algorithm.estimator_reads("values") if self.critic.enable is None else self.critic.enable

    @property
    def needs_reference(self) -> bool:
        """Whether a KL penalty or KL loss uses the reference policy."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the entropy is in the actor's loss, in some steps at least."""
        has_target = self.algorithm.adaptive_entropy.target_entropy is not None
        return has_target or self.actor_rollout_ref.actor.entropy_coeff != 0

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference policy has its own model: with LoRA it is the actor without its
        adapters."""
        return self.needs_reference and self.actor_rollout_ref.model.lora_rank == 0

    @property
    def refreshes_reference(self) -> bool:
        """Whether the reference policy becomes the actor from time to time."""
        return self.has_reference_model and self.actor_rollout_ref.ref.sync_freq > 0

    @property
    def frozen_policies(self) -> dict[str, FrozenPolicy]:
        """The policies that only score, with models of their own, by role."""
        policies: dict[str, FrozenPolicy] = {}
        reference = self.actor_rollout_ref.ref
        if self.has_reference_model:
            key = "actor_rollout_ref.ref.model_path"
            policies["reference"] = FrozenPolicy(key, reference.model_path, reference)
        for name, teacher in self.distillation.teachers.items():
            key = f"distillation.teacher_models.{name}.model_path"
            policies[self.distillation.role(name)] = FrozenPolicy(key, teacher.model_path, reference)
        return policies

    @property
    def rows_per_step(self) -> int:
        """Samples that a step trains on."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and response together."""
        return self.data.max_prompt_length + self.data.max_response_length

    @property
    def max_model_length(self) -> int:
        """Tokens of prompt and response that an engine must hold."""
        return self.actor_rollout_ref.rollout.max_model_len or self.longest_sequence

    @property
    def num_ranks(self) -> int:
        """Trainer ranks over all nodes."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def fsdp_configs(self) -> dict[str, FsdpConfig]:
        """Sharding and precision of every role of a trainer rank that has a model of its own: the actor, the
        critic and frozen policies if there are any."""
        policy = self.actor_rollout_ref
        configs: dict[str, FsdpConfig] = {"actor": policy.actor.fsdp_config}
        if self.needs_critic:
            configs["critic"] = self.critic.fsdp_config
        return configs | {role: frozen.config.fsdp_config for role, frozen in self.frozen_policies.items()}

    @property
    def sequence_parallel_sizes(self) -> dict[str, int]:
        """Ranks that share a micro-batch, of every such role."""
        return {role: fsdp.ulysses_sequence_parallel_size for role, fsdp in self.fsdp_configs.items()}

    @property
    def models(self) -> dict[str, tuple[str, bool]]:
        """The path of every model of the run by its key, and whether code that comes with it may run."""
        model, critic, judge = self.actor_rollout_ref.model, self.critic.model, self.reward.reward_model
        models = {"actor_rollout_ref.model.path": (model.path, model.trust_remote_code)}
        if self.needs_critic:
            models["critic.model.path"] = (critic.path, critic.trust_remote_code)
        for frozen in self.frozen_policies.values():
            models[frozen.path_key] = (frozen.model_path, model.trust_remote_code)
        if judge.enable:
            models["reward.reward_model.model_path"] = (str(judge.model_path), judge.trust_remote_code)
        return models

    @property
    def overlaps(self) -> bool:
        """Whether engines sample while the trainer trains: an asynchronous run whose engines have devices of
        their own."""
        return not (self.async_training.is_synchronous or self.actor_rollout_ref.hybrid_engine)

    @property
    def num_processes(self) -> int:
        """Processes of a run beside the driver: one per rank, and one per node of each engine."""
        return self.num_ranks + self.num_engines * self.actor_rollout_ref.rollout.nodes_per_engine

    @property
    def num_engine_devices(self) -> int:
        """Devices of all engines together."""
        rollout = self.actor_rollout_ref.rollout
        return rollout.nnodes * rollout.n_gpus_per_node

    @property
    def num_devices(self) -> int:
        """Devices of all pools: engines that share the trainer's count once."""
        return (
            self.num_ranks
            if self.actor_rollout_ref.hybrid_engine
            else self.num_ranks + self.num_engine_devices
        )

    @property
    def num_engines(self) -> int:
        """Rollout engines over all nodes."""
        return self.num_engine_devices // self.actor_rollout_ref.rollout.tensor_model_parallel_size


FOLLOWED_KEYS = {
    key: followed for key, field in fields_of(RunConfig).items() if (followed := followed_key(field))
}
"""For each key that takes the value of another key where it is null, this other key."""


def _size_of_a_step(tree: dict[str, Any]) -> None:
    """``data.train_batch_size`` as ``require_batches`` mini-batches, unless it is given; verl's recipes give
    it as 0."""
    count = _given_or_default(tree, "async_training.require_batches")
    mini = _given_or_default(tree, "actor_rollout_ref.actor.ppo_mini_batch_size")
    size = value_at(tree, "data.train_batch_size")
    if isinstance(count, int) and isinstance(mini, int) and size in (None, 0):
        set_value(tree, "data.train_batch_size", count * mini)


def _given_or_default(tree: Mapping[str, Any], key: str) -> Any:
    value = value_at(tree, key)
    return default_at(RunConfig, key) if value is None else value


def remote_code_keys(config: RunConfig) -> dict[str, str]:
    """Each ``trust_remote_code`` key that is True, with the model whose code then runs with the user's
    rights."""
    model, critic, judge = config.actor_rollout_ref.model, config.critic.model, config.reward.reward_model
    switches = {
        "data.trust_remote_code": (config.data.trust_remote_code, model.path),
        "actor_rollout_ref.model.trust_remote_code": (model.trust_remote_code, model.path),
        "critic.model.trust_remote_code": (config.needs_critic and critic.trust_remote_code, critic.path),
        "reward.reward_model.trust_remote_code": (judge.enable and judge.trust_remote_code, judge.model_path),
    }
    return {key: str(path) for key, (is_on, path) in switches.items() if is_on}
