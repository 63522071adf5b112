"""Where prompts come from and how long they may be."""

from typing import Any, Literal

from pydantic import Field, field_validator

from verl_rc.config.schema import StrictModel, UserPath


class CustomDatasetConfig(StrictModel):
    """``data.custom_cls.*``: a class of your own that reads the data."""

    path: UserPath | None = None
    """Python file that holds it; null: rows come from the files themselves."""
    name: str | None = None
    """Its name. Called with ``data_files``, ``tokenizer``, ``processor`` (None) and ``config``, it has ``__len__`` and a
    ``__getitem__`` that returns a row in verl's format."""


class DataConfig(StrictModel):
    """``data.*``: prompts for training and validation."""

    train_files: list[UserPath]
    """Files of training prompts, parquet, .jsonl or .json (one path, or a list)."""
    train_weights: list[float] | None = None
    """Shares of the training files in every batch, one positive number per file, in any unit; null: files follow each other
    and every row comes once per epoch. An epoch serves as many prompts either way."""
    val_files: list[UserPath]
    """Files of validation prompts, parquet, .jsonl or .json (one path, or a list)."""
    custom_cls: CustomDatasetConfig = CustomDatasetConfig()
    """A class of your own that reads ``train_files`` and ``val_files``."""
    prompt_key: str = "prompt"
    """Column that holds the chat messages."""
    train_batch_size: int = Field(1024, ge=1)
    """Prompts per training step."""
    gen_batch_size: int | None = Field(None, ge=1)
    """Prompts drawn and sampled at once in dynamic sampling (``algorithm.filter_groups``); null: ``train_batch_size``."""
    val_batch_size: int | None = Field(None, ge=1)
    """Prompts per validation batch; null: the whole set at once."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt, tokens after the chat template."""
    max_response_length: int = Field(512, ge=1)
    """Longest response, tokens; also the constant of ``seq-mean-token-sum-norm``."""
    shuffle: bool = True
    """Draw a new order of prompts in every epoch."""
    seed: int | None = None
    """Seed of that order; null: ``trainer.seed``."""
    filter_overlong_prompts: bool = False
    """Leave prompts out that are longer than ``max_prompt_length``."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a longer prompt that is not filtered out; ``left`` cuts its beginning off."""
    train_max_samples: int = Field(-1, ge=-1)
    """Use this many training prompts, chosen by seed (the first ones with ``shuffle=False``); -1: all."""
    val_max_samples: int = Field(-1, ge=-1)
    """Use this many validation prompts, chosen by seed (the first ones with ``shuffle=False``); -1: all."""
    dataloader_num_workers: int = Field(0, ge=0)
    """Loader processes; 0 loads in the driver, which is fastest for text."""
    apply_chat_template_kwargs: dict[str, Any] = {}
    """Further arguments of the chat template, e.g. ``enable_thinking``."""
    trust_remote_code: bool = False
    """Allow code that comes with a hub tokenizer."""

    @property
    def prompts_per_draw(self) -> int:
        """Prompts that are drawn and sampled at once."""
        return self.gen_batch_size or self.train_batch_size

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value
