"""Configuration of the task: prompts and rewards."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from verl_rc.config.schema import NoneOrMore, OneOrMore, StrictModel, UserPath, follows

PixelLimits = dict[Literal["min_pixels", "max_pixels"], Annotated[int, Field(ge=1)]]


class CustomDatasetConfig(StrictModel):
    """``data.custom_cls.*``: a class of your own that reads the data."""

    path: UserPath | None = None
    """Python file of the class; null: rows come from the files themselves."""
    name: str | None = None
    """Name of the class (docs/tasks.md)."""


class DataConfig(StrictModel):
    """``data.*``: prompts for training and validation."""

    train_files: Annotated[list[UserPath], OneOrMore]
    """Files of training prompts, parquet, .jsonl or .json (a path or a list)."""
    train_weights: list[float] | None = None
    """Shares of the training files in every batch, a positive number for each; null: every row once per
    epoch."""
    val_files: Annotated[list[UserPath], NoneOrMore]
    """Files of validation prompts (likewise); null: none, which takes ``trainer.test_freq=-1`` and
    ``trainer.val_before_train=False``."""
    custom_cls: CustomDatasetConfig = CustomDatasetConfig()
    """A class of your own that reads ``train_files`` and ``val_files``."""
    prompt_key: str = "prompt"
    """Column that holds the chat messages."""
    image_key: str = "images"
    """Column that holds the pictures of a prompt (docs/tasks.md)."""
    mm_processor_kwargs: PixelLimits = {}
    """Fewest and most pixels of a resized picture; those of the model where not given."""
    train_batch_size: int = Field(1024, ge=1)
    """Prompts per training step."""
    gen_batch_size: int = follows("data.train_batch_size", ge=1)
    """Prompts sampled at once in dynamic sampling (``algorithm.filter_groups``)."""
    val_batch_size: int | None = Field(None, ge=1)
    """Prompts per validation batch; null: the whole set at once."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt, tokens after the chat template."""
    max_response_length: int = Field(512, ge=1)
    """Longest response, tokens."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch."""
    seed: int = follows("trainer.seed")
    """Seed of the order of prompts."""
    filter_overlong_prompts: bool = False
    """Drop prompts longer than ``max_prompt_length``, with the descriptions of tools."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Treatment of a longer prompt: an error, or a side that is cut off."""
    train_max_samples: int = Field(-1, ge=-1)
    """Training prompts that are used, chosen by seed (the first ones with ``shuffle=False``); -1: all."""
    val_max_samples: int = Field(-1, ge=-1)
    """The same for validation prompts."""
    dataloader_num_workers: int = Field(0, ge=0)
    """Processes of the data loader; 0: the driver loads, which is fastest for text."""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template, e.g. ``enable_thinking``."""
    trust_remote_code: bool = False
    """Run code that comes with the tokenizer."""


class CustomRewardFunctionConfig(StrictModel):
    """``reward.custom_reward_function.*``: a function of your own."""

    path: UserPath | None = None
    """Python file of the function; null: the built-in function of each row's ``data_source``."""
    name: str = "compute_score"
    """Function name: ``f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float |
    dict``."""
    reward_kwargs: dict[str, Any] = {}
    """Further keyword arguments of every call. ``reward.reward_model`` adds ``reward_model_score``."""


class RewardEngineConfig(StrictModel):
    """``reward.reward_model.rollout.*``: what serves the reward model."""

    name: Literal["vllm"] | None = None
    """``vllm``: an engine of its own; null: transformers."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    """GPUs that share the model in the engine; on a CPU processes."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of each of its GPUs for weights and KV cache; on a CPU its KV cache has 256 MiB."""


class RewardModelConfig(StrictModel):
    """``reward.reward_model.*``: a classifier with one output that judges prompt and response as one
    conversation."""

    enable: bool = False
    """Score every response with the model. The score is the reward unless a function of your own computes one
    from it."""
    model_path: UserPath | None = None
    """Folder or hub id of a sequence-classification model with tokenizer and chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of its computation."""
    micro_batch_size_per_gpu: int = Field(8, ge=1)
    """Conversations per forward pass of transformers; vLLM takes as many as fit."""
    max_length: int | None = Field(None, ge=1)
    """Maximum tokens of a conversation; a longer one fails (``reward.failure_score``). null: the model's
    maximum positions. vLLM's KV cache must hold one such conversation."""
    n_gpus_per_node: int = Field(0, ge=0)
    """GPUs of the reward model, besides those of trainer and engines: 0 or 1, where 0 means the CPU. vLLM
    computes where the trainer does: ``rollout.tensor_model_parallel_size`` on GPUs, 0 on a CPU."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    rollout: RewardEngineConfig = RewardEngineConfig()
    """What serves it."""

    @model_validator(mode="after")
    def _check_gpus(self) -> Self:
        gpus = self.rollout.tensor_model_parallel_size if self.rollout.name else 1
        if self.n_gpus_per_node not in (0, gpus):
            raise ValueError(
                f"reward.reward_model.n_gpus_per_node must be 0 or {gpus}, got {self.n_gpus_per_node}: vLLM "
                "takes rollout.tensor_model_parallel_size GPUs, transformers one"
            )
        return self


class OverlongBufferConfig(StrictModel):
    """``reward.reward_kwargs.overlong_buffer_cfg.*``: a length penalty on responses near the limit (DAPO,
    arXiv:2503.14476)."""

    enable: bool = False
    """Subtract the penalty from training scores, not from validation scores."""
    len: int | None = Field(None, ge=1)
    """Tokens before ``data.max_response_length`` over which the penalty grows from 0 to ``penalty_factor``;
    needed with ``enable``."""
    penalty_factor: float = Field(1.0, ge=0)
    """The penalty of a response of ``data.max_response_length`` tokens, in units of reward."""
    log: bool = False
    """Write columns ``overlong_reward`` and ``overlong`` into ``trainer.rollout_data_dir``."""


class RewardKwargsConfig(StrictModel):
    """``reward.reward_kwargs.*``."""

    overlong_buffer_cfg: OverlongBufferConfig = OverlongBufferConfig()
    """Overlong penalty."""


class RewardConfig(StrictModel):
    """``reward.*``."""

    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    """A function of your own."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """A model that judges responses."""
    reward_kwargs: RewardKwargsConfig = RewardKwargsConfig()
    """Changes of a score after the reward function."""
    num_workers: int | None = Field(None, ge=1)
    """Processes that call your function or a built-in math scorer; null: one per core, at most 8."""
    max_concurrent: int = Field(1, ge=1)
    """Concurrent calls in one process; above 1 the function must be ``async def``."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Time limit of one call, seconds; a sample that exceeds it counts as failed."""
    pass_env: Annotated[list[str], OneOrMore] = []
    """Environment variables that your function gets although their names or values look like secrets, such as
    ``JUDGE_API_KEY``."""
    failure_score: float | None = Field(None, allow_inf_nan=False)
    """Score of a sample whose call raises, hangs, kills its process or returns no number; its accuracy is 0.
    null: the run stops and names the sample (an asynchronous run replaces one of 100). A built-in math scorer
    that fails gives a wrong answer in both cases."""

    @property
    def uses_built_in_scorers(self) -> bool:
        """Whether the built-in scorer of its data source scores each row."""
        return self.custom_reward_function.path is None and not self.reward_model.enable

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.reward_model.enable != (self.reward_model.model_path is not None):
            raise ValueError(
                "reward.reward_model.model_path belongs to reward.reward_model.enable=True, which needs it; "
                f"got enable={self.reward_model.enable} and model_path={self.reward_model.model_path}"
            )
        if self.pass_env and self.custom_reward_function.path is None:
            raise ValueError(
                "reward.pass_env must be empty without reward.custom_reward_function.path, whose function "
                f"gets these variables; got {self.pass_env}"
            )
        if self.max_concurrent > 1 and self.custom_reward_function.path is None:
            raise ValueError(
                "reward.max_concurrent must be 1 without reward.custom_reward_function.path, whose "
                f"`async def` it is for; got {self.max_concurrent}"
            )
        return self
