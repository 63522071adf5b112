"""Where scores come from."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from verl_rc.config.schema import StrictModel, UserPath


class CustomRewardFunctionConfig(StrictModel):
    """``reward.custom_reward_function.*``: a function of your own."""

    path: UserPath | None = None
    """Python file that holds it; null: the built-in function of each row's ``data_source``."""
    name: str = "compute_score"
    """Its name: ``f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float | dict``."""
    reward_kwargs: dict[str, Any] = {}
    """Further keyword arguments of every call. With ``reward.reward_model.enable`` the function also gets
    ``reward_model_score``, the model's score of the response."""


class RewardModelConfig(StrictModel):
    """``reward.reward_model.*``: a classifier with one output that judges prompt and response as one conversation."""

    enable: bool = False
    """Score every response with the model. Its score is the reward, unless a function of your own makes one of it."""
    model_path: UserPath | None = None
    """Folder or hub id of a sequence-classification model with a tokenizer and a chat template; needed with ``enable``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision it computes in."""
    micro_batch_size_per_gpu: int = Field(8, ge=1)
    """Conversations it judges at once."""
    max_length: int | None = Field(None, ge=1)
    """Longest conversation, tokens; a longer one is a failure (``reward.on_failure``). null: what the model's positions
    allow."""
    n_gpus_per_node: int = Field(0, ge=0, le=1)
    """GPUs of its own beside those of trainer and engines; 0: it computes on the CPU."""
    trust_remote_code: bool = False
    """Allow code that comes with a hub model."""


class OverlongBufferConfig(StrictModel):
    """``reward.reward_kwargs.overlong_buffer_cfg.*``: less score for responses that come near the limit (DAPO,
    arXiv:2503.14476)."""

    enable: bool = False
    """Take the penalty off every training score; validation scores stay as they are."""
    len: int | None = Field(None, ge=1)
    """Tokens before ``max_resp_len`` over which the penalty grows from 0 to ``penalty_factor``; needed with ``enable``."""
    penalty_factor: float = Field(1.0, ge=0)
    """The penalty of a response of ``max_resp_len`` tokens, in units of reward."""
    log: bool = False
    """Write columns ``overlong_reward`` and ``overlong`` beside each sample's score in ``trainer.rollout_data_dir``."""


class RewardKwargsConfig(StrictModel):
    """``reward.reward_kwargs.*``."""

    max_resp_len: int | None = Field(None, ge=1)
    """Length at which the overlong penalty is full, tokens; null: ``data.max_response_length``."""
    overlong_buffer_cfg: OverlongBufferConfig = OverlongBufferConfig()
    """Overlong penalty."""


class RewardConfig(StrictModel):
    """``reward.*``."""

    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    """A function of your own."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A model that judges responses."""
    reward_kwargs: RewardKwargsConfig = RewardKwargsConfig()
    """What changes a score after the reward function."""
    num_workers: int | None = Field(None, ge=1)
    """Processes that call a function of your own, or compare built-in mathematics; null: one per core, at most 8."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Longest time of one call, in seconds; then its process is killed and replaced, and the sample has failed."""
    memory_limit_megabytes: int | None = Field(None, ge=256)
    """Address space of one such process, MiB; a call that needs more has failed. null: no limit."""
    on_failure: Literal["stop", "score"] = "stop"
    """What happens when a response cannot be scored: a call that raises, hangs, kills its process or returns no number.
    ``stop``: the run stops with a message that names the sample; ``score``: the sample gets ``failure_score`` and
    counts as not right where there is an accuracy. Built-in mathematics that finds no end, or cannot read the row's ground
    truth, is a wrong answer either way, and one such row is named a step. ``reward/failed_fraction`` counts all of these."""
    failure_score: float | None = Field(None, allow_inf_nan=False)
    """The score of a failed sample with ``on_failure=score``, which needs it; refused otherwise."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if (self.on_failure == "score") != (self.failure_score is not None):
            raise ValueError(
                "reward.failure_score belongs to reward.on_failure=score, which needs it; got "
                f"on_failure={self.on_failure} and failure_score={self.failure_score}"
            )
        if self.reward_model.enable != (self.reward_model.model_path is not None):
            raise ValueError(
                "reward.reward_model.model_path belongs to reward.reward_model.enable=True, which needs it; got "
                f"enable={self.reward_model.enable} and model_path={self.reward_model.model_path}"
            )
        return self
