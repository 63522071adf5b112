"""How long a run lasts, on what, and what it writes."""

from typing import Any, Literal

from pydantic import Field, field_validator

from verl_rc.config.schema import StrictModel, UserPath

AlertAction = Literal["warn", "skip", "save_and_stop"]


class AlertsConfig(StrictModel):
    """``trainer.alerts.*``: what happens when training goes wrong.

    ``warn`` tells W&B and the console. ``skip`` also leaves the step's updates out; as after every step, the engines then get the
    weights anew and forget what they cached. ``save_and_stop`` leaves them out, writes a checkpoint and ends the run. In bypass
    mode the mismatch is known after the update only, so that it can be saved but not left out.
    """

    mismatch: AlertAction = "warn"
    """When ``rollout_corr/k3_kl`` is above ``mismatch_limit``; not ``skip`` in bypass mode."""
    mismatch_limit: float | None = Field(0.5, gt=0)
    """Nats per token; null: never."""
    reward_collapse: AlertAction = "warn"
    """When the mean score of the last ``reward_window`` steps has fallen by more than ``reward_drop``."""
    reward_drop: float | None = Field(0.5, gt=0)
    """Share of the best such mean so far, in size; a fall within four standard errors does not count. null: never."""
    reward_window: int = Field(5, ge=1)
    """Steps that are averaged."""


class TrainerConfig(StrictModel):
    """``trainer.*``."""

    project_name: str = "verl_rc"
    """Project in W&B."""
    experiment_name: str = "default"
    """Run name in W&B."""
    logger: list[str] = ["console", "wandb"]
    """Where metrics go besides metrics.jsonl: console, wandb, tensorboard (one name, or a list)."""
    default_local_dir: UserPath | None = None
    """The run's folder; null: checkpoints/<project_name>/<experiment_name>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto``: GPUs when the cluster has any."""
    nnodes: int = Field(1, ge=1)
    """Nodes with trainer ranks."""
    n_gpus_per_node: int = Field(8, ge=1)
    """Trainer ranks per node; on a CPU each needs a core."""
    seed: int = 1
    """Seed of the run: order of prompts, seeds of all samples, order of mini-batches."""
    total_epochs: int = Field(30, ge=1)
    """Passes over the training prompts."""
    total_training_steps: int | None = Field(None, ge=1)
    """Steps in all, at most as many as the epochs have; null: as many."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate and stop."""
    test_freq: int = -1
    """Steps between validations; <= 0: never. The last step always validates when it is > 0."""
    save_freq: int = -1
    """Steps between checkpoints; <= 0: never. The last step always saves when it is > 0."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """``auto``: go on from the newest checkpoint in ``default_local_dir``, if there is one; ``disable``: start anew;
    ``resume_path``: go on from ``resume_from_path``."""
    resume_from_path: UserPath | None = None
    """Checkpoint folder (``.../global_step_N``) for ``resume_mode=resume_path``."""
    max_actor_ckpt_to_keep: int | None = Field(None, ge=1)
    """Checkpoints kept, the newest ones; null: all."""
    max_nonfinite_updates: int = Field(3, ge=1)
    """Optimizer steps in a row whose gradient is NaN or infinite, after which the run stops; each of them is left out."""
    critic_warmup: int = Field(0, ge=0)
    """Steps before this one train the critic only."""
    balance_batch: Literal[True] = True
    """Rows are always shared out to ranks by token count; the key is accepted for verl's recipes."""
    log_val_generations: int = Field(0, ge=0)
    """Validation samples shown in a table."""
    rollout_data_dir: UserPath | None = None
    """Folder for every step's samples as JSON lines; null: none."""
    validation_data_dir: UserPath | None = None
    """Folder for validation samples as JSON lines; null: none."""
    ready_timeout_seconds: float = Field(300.0, gt=0)
    """How long to wait for a process to become ready."""
    alerts: AlertsConfig = AlertsConfig()
    """What happens when mismatch or reward go wrong."""
    hang_timeout_seconds: float = Field(1800.0, gt=0)
    """How long to wait for any other answer of a process. Then the stacks of those that are silent are written to the run's
    folder, all processes are killed and the run ends."""

    @field_validator("logger", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


class RayInitConfig(StrictModel):
    """``ray_kwargs.ray_init.*``."""

    address: str | None = None
    """A running cluster, e.g. ``auto`` or ``ray://host:10001``; null: start Ray on this machine."""
    num_cpus: int | None = Field(None, ge=1)
    """Logical CPUs of a local Ray; null: enough for this run."""
    num_gpus: int | None = Field(None, ge=0)
    """GPUs of a local Ray; null: those that it finds."""
    object_store_memory: int | None = Field(None, ge=80_000_000)
    """Shared memory of a local Ray, bytes; null: 512 MiB."""
    loopback_only: bool = True
    """A local Ray listens on 127.0.0.1 alone; False: on every interface, where whoever reaches it can run code as you."""
    runtime_env: dict[str, Any] | None = None
    """Ray's runtime environment, e.g. ``py_executable`` or ``env_vars``."""


class RayKwargsConfig(StrictModel):
    """``ray_kwargs.*``."""

    ray_init: RayInitConfig = RayInitConfig()
    """Arguments of ``ray.init``."""
