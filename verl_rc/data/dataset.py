"""Prompts in verl's data format: read, chosen, tokenised, and served by a loader that resumes exactly."""

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_rc.config.data import DataConfig
from verl_rc.data.epoch_batches import EpochBatches
from verl_rc.data.records import RecordFile, check_messages
from verl_rc.data.tokenize import encode_prompt


@dataclass(frozen=True)
class PromptRow:
    """One prompt of the data set."""

    row_index: int
    """Place among all rows of the files, before any choice or filter: part of the seed of the row's samples."""
    prompt_token_ids: list[int]
    """The prompt under the chat template, ending where the answer begins."""
    messages: list[dict[str, Any]]
    """The prompt as chat messages ``{role, content}``."""
    data_source: str
    """Which scorer judges a response, and under which name validation reports it."""
    ground_truth: Any
    """What the scorer compares a response with."""
    extra_info: dict[str, Any]
    """Further fields, handed to reward functions."""


@dataclass(frozen=True)
class PromptOptions:
    """How rows become prompts."""

    max_prompt_length: int
    """Tokens."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """The side a longer prompt is cut on; ``error`` refuses it."""
    filter_overlong: bool = False
    """Leave longer prompts out."""
    prompt_key: str = "prompt"
    """Column with the chat messages."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""

    @classmethod
    def from_config(cls, config: DataConfig) -> "PromptOptions":
        """The options that the ``data`` section means."""
        return cls(
            config.max_prompt_length,
            config.truncation,
            config.filter_overlong_prompts,
            config.prompt_key,
            config.apply_chat_template_kwargs,
        )


class PromptDataset(Dataset[PromptRow]):
    """The prompts of some files, tokenised when they are asked for."""

    def __init__(self, files: Sequence[str], tokenizer: Any, options: PromptOptions) -> None:
        """Read ``files`` and filter. Raises ``ValueError`` naming the file, column or row that is wrong."""
        columns = (options.prompt_key, "data_source", "reward_model")
        self._files = [RecordFile(path, columns, ["extra_info"]) for path in files]
        self._ends = list(itertools.accumulate(len(file) for file in self._files))
        self._tokenizer = tokenizer
        self._options = options
        self._row_indices: Sequence[int] = range(self._ends[-1] if self._ends else 0)
        self._row(0)

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._row_indices)

    def __getitem__(self, index: int) -> PromptRow:
        """The prompt at ``index``, cut to the longest length. Raises ``ValueError`` when it is too long or malformed."""
        row = self._row(self._row_indices[index])
        return replace(row, prompt_token_ids=self._fitted(row))
