"""Prompts in verl's data format: read, chosen, tokenised, and served by a loader that resumes exactly."""

import bisect
import itertools
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_rc.config.data import DataConfig
from verl_rc.data.custom_dataset import CustomRecords
from verl_rc.data.epoch_batches import EpochBatches
from verl_rc.data.mixture import MixedBatches
from verl_rc.data.prompt_lengths import describe_lengths, evenly_spread
from verl_rc.data.records import Record, RecordFile, check_messages
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


@dataclass(frozen=True)
class RowChoice:
    """Which rows of the files are used."""

    max_samples: int = -1
    """How many; -1: all."""
    seed: int | None = None
    """Chosen at random with this seed; None: the first rows."""

    def row_indices(self, num_rows: int) -> Sequence[int]:
        """The rows used out of ``num_rows``, in ascending order."""
        if not 0 <= self.max_samples < num_rows:
            return range(num_rows)
        if self.seed is None:
            return range(self.max_samples)
        return sorted(random.Random(self.seed).sample(range(num_rows), self.max_samples))


class PromptDataset(Dataset[PromptRow]):
    """The prompts of some files, tokenised when they are asked for."""

    def __init__(self, files: Sequence[str | CustomRecords], tokenizer: Any, options: PromptOptions, choice: RowChoice) -> None:
        """Read ``files``, choose rows, filter. Raises ``ValueError`` naming the file, column or row that is wrong."""
        if not files:
            raise ValueError("data.train_files and data.val_files must name at least one file each, got an empty list.")
        columns = (options.prompt_key, "data_source", "reward_model")
        self._files: list[RecordFile | CustomRecords] = [
            RecordFile(file, columns, ["extra_info"]) if isinstance(file, str) else file for file in files
        ]
        for file in self._files:
            if isinstance(file, RecordFile):
                file.check_messages(options.prompt_key)
                file.check_given("data_source")
                file.check_given("reward_model")
        self._ends = list(itertools.accumulate(len(file) for file in self._files))
        self._tokenizer = tokenizer
        self._options = options
        self._row_indices = choice.row_indices(self._ends[-1])
        if options.filter_overlong:
            limit = options.max_prompt_length
            self._row_indices = [row for row in self._row_indices if len(self._encode(*self._record(row))[1]) <= limit]
        if not self._row_indices:
            raise ValueError(
                f"data.max_prompt_length={options.max_prompt_length} must leave at least one prompt of "
                f"{[file.path for file in self._files]}, but data.filter_overlong_prompts leaves none. Raise the limit."
            )
        self[0]  # a file in the wrong format is refused now, not in the first step

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._row_indices)

    def file_sizes(self) -> list[int]:
        """Prompts of each file, after choice and filter; a file's prompts follow each other."""
        ends = [bisect.bisect_left(self._row_indices, end) for end in self._ends]
        return [end - start for start, end in itertools.pairwise([0, *ends])]

    def data_sources(self) -> dict[str, str]:
        """Every data source among the prompts, and where its first prompt stands."""
        of_rows = [source for file in self._files for source in file.column("data_source")]
        first_rows: dict[str, int] = {}
        for row_index in self._row_indices:
            first_rows.setdefault(str(of_rows[row_index]), row_index)
        return {source: self._record(row_index)[1] for source, row_index in first_rows.items()}

    def describe_lengths(self, at_most: int = 1000) -> str:
        """How long ``at_most`` prompts are, in one line. Raises ``ValueError`` when one is too long for the options."""
        rows = [self._record(self._row_indices[index]) for index in evenly_spread(len(self), at_most)]
        token_ids = [(self._encode(*row)[1], row[1]) for row in rows]
        for ids, where in token_ids:
            fit_prompt(ids, self._options, where)
        return describe_lengths([len(ids) for ids, _ in token_ids], len(self), self._options.max_prompt_length)

    def row(self, row_index: int) -> PromptRow:
        """The prompt of a row of the files. Raises ``ValueError`` when the choice of rows has none of this index."""
        if row_index not in self._row_indices:
            raise ValueError(
                f"the checkpoint was sampling row {row_index} of data.train_files, which the chosen rows do not have. "
                "Give the data it was trained on, or start anew with trainer.resume_mode=disable."
            )
        return self[self._row_indices.index(row_index)]

    def __getitem__(self, index: int) -> PromptRow:
        """The prompt at ``index``, truncated. Raises ``ValueError`` when it is malformed or too long."""
        row_index = self._row_indices[index]
        record, where = self._record(row_index)
        messages, token_ids = self._encode(record, where)
        reward_model = record["reward_model"]
        if record["data_source"] is None or not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
            raise ValueError(
                "a row must have a data_source and a reward_model {'style': ..., 'ground_truth': ...}, got "
                f"{record['data_source']!r} and {reward_model!r} in {where}. Convert the file."
            )
        return PromptRow(
            row_index=row_index,
            prompt_token_ids=fit_prompt(token_ids, self._options, where),
            messages=messages,
            data_source=str(record["data_source"]),
            ground_truth=reward_model["ground_truth"],
            extra_info=_extra_info(record, where),
        )

    def _record(self, row_index: int) -> tuple[Record, str]:
        """A row of the files, and where it stands in words."""
        number = bisect.bisect_right(self._ends, row_index)
        file = self._files[number]
        within = row_index - (self._ends[number] - len(file))
        return file[within], f"row {within} of {file.path}"

    def _encode(self, record: Record, where: str) -> tuple[list[dict[str, Any]], list[int]]:
        """A record's messages and their token ids, untruncated."""
        messages = check_messages(record[self._options.prompt_key], self._options.prompt_key, where)
        try:
            return messages, encode_prompt(self._tokenizer, messages, self._options.template_arguments)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _extra_info(record: Record, where: str) -> dict[str, Any]:
    extra_info = record.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise ValueError(
            f"column 'extra_info' must hold a mapping of further fields or null, got {str(extra_info)[:80]!r} in {where}."
        )
    return extra_info or {}


def fit_prompt(token_ids: list[int], options: PromptOptions, where: str) -> list[int]:
    """``token_ids`` cut to the longest length as ``truncation`` says; ``middle`` cuts out the middle.

    Raises ``ValueError`` naming the row (``where``) when the prompt is longer and ``truncation`` is ``error``.
    """
    limit = options.max_prompt_length
    if len(token_ids) <= limit:
        return token_ids
    match options.truncation:
        case "left":
            return token_ids[-limit:]
        case "right":
            return token_ids[:limit]
        case "middle":
            head = limit // 2
            return token_ids[:head] + token_ids[head - limit :]
        case "error":
            raise ValueError(
                f"a prompt must have at most data.max_prompt_length={limit} tokens, got {len(token_ids)} in "
                f"{where}. Raise the limit, set data.filter_overlong_prompts=True, or choose "
                "data.truncation=left, right or middle."
            )


def build_train_loader(config: DataConfig, tokenizer: Any, seed: int) -> "StatefulDataLoader[list[PromptRow]]":
    """Batches of ``config.prompts_per_draw`` prompts; each pass is an epoch, whose last incomplete batch is left out.

    ``state_dict`` and ``load_state_dict`` of the loader resume exactly, also between two epochs. ``seed`` is used when
    ``data.seed`` is null. Raises ``ValueError`` for everything that is wrong with the data.
    """
    data_seed = seed if config.seed is None else config.seed
    choice = RowChoice(config.train_max_samples, data_seed if config.shuffle else None)
    dataset = _prompts(config.train_files, config, tokenizer, choice)
    if len(dataset) < config.prompts_per_draw:
        key = "train_batch_size" if config.prompts_per_draw == config.train_batch_size else "gen_batch_size"
        raise ValueError(
            f"data.train_files must give at least data.{key}={config.prompts_per_draw} prompts, got "
            f"{len(dataset)} after data.train_max_samples and filtering. Lower the batch size or add data."
        )
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torchdata calls a deprecated torch function
        return StatefulDataLoader(
            dataset,
            batch_sampler=_batches(dataset, config, data_seed),
            collate_fn=_as_list,
            num_workers=config.dataloader_num_workers,
        )


def prompt_sources(files: Sequence[str], config: DataConfig, tokenizer: Any) -> Sequence[str | CustomRecords]:
    """Where rows come from: the files themselves, or an instance of ``data.custom_cls`` that reads them.

    Raises ``ValueError`` when that class cannot be loaded or made.
    """
    return files if config.custom_cls.path is None else [CustomRecords(config, files, tokenizer)]


def _prompts(files: Sequence[str], config: DataConfig, tokenizer: Any, choice: RowChoice) -> PromptDataset:
    return PromptDataset(prompt_sources(files, config, tokenizer), tokenizer, PromptOptions.from_config(config), choice)


def _batches(dataset: PromptDataset, config: DataConfig, seed: int) -> EpochBatches:
    if config.train_weights is None:
        return EpochBatches(len(dataset), config.prompts_per_draw, seed, config.shuffle)
    return MixedBatches(dataset.file_sizes(), config.train_weights, config.prompts_per_draw, seed, config.shuffle)


def _as_list(rows: list[PromptRow]) -> list[PromptRow]:
    return rows


def build_validation_rows(config: DataConfig, tokenizer: Any, seed: int) -> list[PromptRow]:
    """All validation prompts in the order of the files, or ``val_max_samples`` of them.

    ``seed`` is used when ``data.seed`` is null. Raises ``ValueError`` for everything that is wrong with the data.
    """
    data_seed = seed if config.seed is None else config.seed
    choice = RowChoice(config.val_max_samples, data_seed if config.shuffle else None)
    dataset = _prompts(config.val_files, config, tokenizer, choice)
    return [dataset[index] for index in range(len(dataset))]
