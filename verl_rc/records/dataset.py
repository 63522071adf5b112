"""The prompt data set in verl's format: reading, selection, tokenisation, and a resumable stream of shuffled
batches."""

import bisect
import itertools
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from verl_rc.config.task import DataConfig
from verl_rc.records.episode import Message, Opening
from verl_rc.records.image_reader import ImageReader, with_pictures
from verl_rc.records.pictures import Pictures, read_pictures
from verl_rc.records.records import CustomRecords, Record, RecordFile, VerifiersRecords, check_messages
from verl_rc.records.tokenize import encode_prompt
from verl_rc.records.unread import MEDIA


class EpochBatches(Sampler[list[int]]):
    """Batches of row numbers over epochs; each iteration yields the remaining batches of one epoch.

    The order depends only on ``seed`` and the epoch. An incomplete last batch is dropped. The epoch advances
    with its last batch.
    """

    def __init__(
        self, num_rows: int, batch_size: int, seed: int, shuffle: bool, fingerprint: int = 0
    ) -> None:
        """``num_rows`` is at least ``batch_size``; ``shuffle=False`` keeps the order of the rows.
        ``fingerprint``: of the rows."""
        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self.epoch = 0
        """Epoch of the next batch, from 0."""
        self.position = 0
        """Batches of that epoch that were already yielded."""

    def __len__(self) -> int:
        """Batches of one epoch."""
        return self._num_rows // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the remaining batches of the current epoch."""
        epoch = self.epoch
        order = self._order(epoch)
        while self.epoch == epoch:
            start = self.position * self._batch_size
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = epoch + 1, 0
            yield order[start : start + self._batch_size]

    def state_after(self, batches: int) -> dict[str, int | bool | str]:
        """The state when so many batches have been used since the first: a loader asks for more ahead."""
        epoch, position = divmod(batches, len(self))
        return {**self._identity(), "epoch": epoch, "position": position}

    def load_state_dict(self, state: Mapping[str, int | bool | str]) -> None:
        """Continue from a ``state_after``. Raises ``ValueError`` when it belongs to other data or another
        order."""
        identity = self._identity()
        saved = {name: state.get(name) for name in identity}
        if saved != identity:
            raise ValueError(
                f"a resumed run must read the data it was started with: the saved state has {saved}, now it "
                f"is {identity}. Restore data.train_files, data.train_weights, data.custom_cls, "
                "data.prompt_key, data.train_batch_size, data.shuffle, data.seed and the filters, or "
                "start a new run with trainer.resume_mode=disable."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, int | bool | str]:
        return {
            "num_rows": self._num_rows,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def _order(self, epoch: int) -> list[int]:
        return self._rows_in_order(self._num_rows, epoch)

    def _rows_in_order(self, num_rows: int, *identity: int) -> list[int]:
        """Row numbers, in a different shuffled order for each ``identity``."""
        if not self._shuffle:
            return list(range(num_rows))
        # SeedSequence takes no negative numbers; the sign is an entry of its own.
        entropy = [abs(self._seed), int(self._seed < 0), *identity]
        order: list[int] = np.random.default_rng(entropy).permutation(num_rows).tolist()
        return order


class MixedBatches(EpochBatches):
    """Batches in which every file has its share of the rows, over epochs; resumable.

    An epoch has as many rows as the files together. A file with more than its natural share is repeated in a
    new order; a file with less continues in the next epoch where it stopped.
    """

    def __init__(
        self,
        file_sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        shuffle: bool,
        fingerprint: int = 0,
    ) -> None:
        """``file_sizes``: rows of each file, in the order of concatenation; ``weights``: their shares, in any
        unit.

        ``shuffle=False`` keeps the order of each file's rows. Raises ``ValueError`` when a file has no row.
        """
        super().__init__(sum(file_sizes), batch_size, seed, shuffle, fingerprint)
        if min(file_sizes) < 1:
            raise ValueError(
                "every file with a weight in data.train_weights must have at least one row left after "
                f"data.train_max_samples and filtering, got {list(file_sizes)} rows. Remove the file, or "
                "loosen the filter."
            )
        self._file_sizes = list(file_sizes)
        self._weights = list(weights)
        self._files = spread_files_by_weight(weights, len(self) * batch_size)
        self._rows_per_epoch = [self._files.count(file) for file in range(len(self._file_sizes))]

    def _identity(self) -> dict[str, int | bool | str]:
        mixture = ",".join(
            f"{size}*{weight!r}" for size, weight in zip(self._file_sizes, self._weights, strict=True)
        )
        return {**super()._identity(), "mixture": mixture}

    def _order(self, epoch: int) -> list[int]:
        first_rows = np.cumsum([0, *self._file_sizes])
        file_rows = [iter(self._rows_of(file, epoch)) for file in range(len(self._file_sizes))]
        return [int(first_rows[file]) + next(file_rows[file]) for file in self._files]

    def _rows_of(self, file: int, epoch: int) -> list[int]:
        """The rows of a file in ``epoch``: a slice of an infinite sequence of permutations of its rows."""
        size, count = self._file_sizes[file], self._rows_per_epoch[file]
        first = epoch * count
        permutations = range(first // size, (first + count - 1) // size + 1)
        rows = [row for number in permutations for row in self._rows_in_order(size, file, number)]
        return rows[first % size : first % size + count]


def spread_files_by_weight(weights: Sequence[float], count: int) -> list[int]:
    """``count`` file numbers, spread as evenly as ``weights`` (positive, in any unit) allow: the next one is
    the file furthest below its share, the first of equals."""
    shares = [weight / sum(weights) for weight in weights]
    counts = [0] * len(shares)
    order = []
    for length in range(1, count + 1):
        deficits = [length * share - file_count for share, file_count in zip(shares, counts, strict=True)]
        file = deficits.index(max(deficits))
        counts[file] += 1
        order.append(file)
    return order


def require_ground_truths(without: str | None) -> None:
    """Raise ``ValueError`` unless ``without``, the location of a row that lacks a ground truth, is None."""
    if without is not None:
        raise ValueError(
            "a built-in scorer must find a ground_truth in a row's reward_model, but it is null in "
            f"{without}. Give one, remove the row, or name a function of your own with "
            "reward.custom_reward_function.path."
        )


def describe_lengths(lengths: Sequence[int], num_prompts: int, limit: int) -> str:
    """A line with the histogram of prompt lengths (tokens, before truncation) against
    ``data.max_prompt_length``.

    ``lengths`` may be those of a sample of ``num_prompts`` prompts. Bins double: 1, 2-3, 4-7, 8-15 tokens and
    so on.
    """
    ordered = sorted(lengths)
    bins = Counter(length.bit_length() for length in ordered)
    shares = ", ".join(
        f"{_bin_name(exponent)}: {count / len(ordered):.0%}" for exponent, count in bins.items()
    )
    num_overlong = sum(length > limit for length in ordered)
    sample = f"{num_prompts}" if len(ordered) == num_prompts else f"{len(ordered)} of {num_prompts}"
    return (
        f"{sample} prompts by tokens: {shares}; median {ordered[(len(ordered) - 1) // 2]}, longest "
        f"{ordered[-1]}, data.max_prompt_length={limit}, longer {num_overlong / len(ordered):.1%}"
    )


def _bin_name(exponent: int) -> str:
    first, last = (1 << exponent) >> 1, (1 << exponent) - 1
    return str(first) if first == last else f"{first}-{last}"


def evenly_spread(count: int, at_most: int) -> list[int]:
    """Up to ``at_most`` evenly spaced numbers from 0 to ``count - 1``, starting at 0."""
    return list(range(0, count, -(-count // at_most)))


@dataclass(frozen=True)
class PromptRow:
    """One prompt of the data set."""

    row_index: int
    """Index among all rows of the files, before selection and filter; part of the seeds of the row's samples.
    """
    prompt_token_ids: list[int]
    """Token ids of the prompt under the chat template, up to the start of the answer."""
    messages: list[dict[str, Any]]
    """The prompt of the data as chat messages ``{role, content}``."""
    data_source: str
    """Name that selects the scorer and that validation metrics carry."""
    ground_truth: Any
    """Expected answer, for the scorer."""
    extra_info: dict[str, Any]
    """Further fields, passed to reward functions."""
    agent_name: str | None = None
    """Name of its environment. None means that of the run, if there is one."""
    opening: Opening | None = None
    """The opening of the environment, which ``prompt_token_ids`` encode. None means ``messages``."""
    pictures: Pictures | None = None
    """Its pictures, in the order of their placeholders. None if it has none."""

    @property
    def prompt(self) -> Sequence[Message]:
        """The messages that the policy reads first."""
        return self.messages if self.opening is None else self.opening.messages

    def for_environment(self) -> dict[str, Any]:
        """The row for environments; see ``Episode.row``."""
        return {
            "prompt": self.messages,
            "data_source": self.data_source,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
            "agent_name": self.agent_name,
        }


def select_rows(num_rows: int, max_samples: int, seed: int | None) -> Sequence[int]:
    """At most ``max_samples`` (-1: all) of ``num_rows`` row numbers, ascending: a random sample if there is a
    ``seed``, else the first ones."""
    if not 0 <= max_samples < num_rows:
        return range(num_rows)
    if seed is None:
        return range(max_samples)
    return sorted(random.Random(seed).sample(range(num_rows), max_samples))


class PromptDataset(Dataset[PromptRow]):
    """The prompts of some files, tokenised on access."""

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: Any,
        config: DataConfig,
        max_samples: int = -1,
        reader: ImageReader | None = None,
    ) -> None:
        """Read ``files``, at least one, or let ``data.custom_cls`` read them, choose rows, filter.

        ``reader``: the model's. None if it reads no pictures.

        Raises ``ValueError`` naming the file, column or row that is wrong, or the class that cannot be
        loaded.
        """
        self._files: list[RecordFile | VerifiersRecords | CustomRecords]
        if config.custom_cls.path is not None:
            self._files = [CustomRecords(config, files, tokenizer)]
        else:
            self._files = [_record_file(path, config, reader) for path in files]
        self._ends = list(itertools.accumulate(len(file) for file in self._files))
        self._tokenizer = tokenizer
        self._reader = reader
        self._config = config
        seed = config.seed if config.shuffle else None
        self._row_indices = select_rows(self._ends[-1], max_samples, seed)
        limit = config.max_prompt_length
        if config.filter_overlong_prompts:
            self._row_indices = [
                row for row in self._row_indices if len(self._encode(*self._record(row))[1]) <= limit
            ]
        if not self._row_indices:
            raise ValueError(
                f"data.max_prompt_length={limit} must leave at least one prompt of "
                f"{[file.path for file in self._files]}, but data.filter_overlong_prompts leaves none. Raise "
                "the limit."
            )
        self[0]  # a file in the wrong format is refused now, not in the first step

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._row_indices)

    def file_sizes(self) -> list[int]:
        """Number of prompts of each file after selection and filter; the files are concatenated."""
        ends = [bisect.bisect_left(self._row_indices, end) for end in self._ends]
        return [end - start for start, end in itertools.pairwise([0, *ends])]

    def fingerprint(self) -> int:
        """A number that other prompts, or these in another order, do not give: of 64 prompts of the files, or
        of the name of ``data.custom_cls``, whose rows may be drawn anew."""
        if self._config.custom_cls.name is not None:
            return zlib.crc32(self._config.custom_cls.name.encode())
        crc, key = 0, self._config.prompt_key
        for index in evenly_spread(len(self), 64):
            record, location, folder = self._record(self._row_indices[index])
            messages = check_messages(record[key], key, location)
            crc = zlib.crc32(json.dumps(messages, sort_keys=True, default=str).encode(), crc)
            if self._reader is not None and (images := record.get(self._config.image_key)):
                crc = zlib.crc32(str(read_pictures(images, folder).number).encode(), crc)
        return crc

    def data_sources(self) -> dict[str, str]:
        """Every data source with the location of its first prompt."""
        sources = [source for file in self._files for source in file.column("data_source")]
        first_rows: dict[str, int] = {}
        for row_index in self._row_indices:
            first_rows.setdefault(str(sources[row_index]), row_index)
        return {source: self._record(row_index)[1] for source, row_index in first_rows.items()}

    def without_ground_truth(self) -> str | None:
        """The location of the first prompt without a ground truth. None if every prompt has one."""
        cells = [cell for file in self._files for cell in file.column("reward_model")]
        for row_index in self._row_indices:
            cell = cells[row_index]
            if isinstance(cell, dict) and cell.get("ground_truth") is None:
                return self._record(row_index)[1]
        return None

    def unread_columns(self) -> list[str]:
        """Names of the files' columns that are not read."""
        return sorted({name for file in self._files for name in file.unread_columns})

    def describe_lengths(self, at_most: int = 1000) -> str:
        """One line with the lengths of ``at_most`` prompts. Raises ``ValueError`` when one is too long for
        the options."""
        lengths = []
        for index in evenly_spread(len(self), at_most):
            row = self._record(self._row_indices[index])
            _, token_ids, pictures = self._encode(*row)
            self._fit(token_ids, pictures, row[1])
            lengths.append(len(token_ids))
        return describe_lengths(lengths, len(self), self._config.max_prompt_length)

    def row(self, row_index: int) -> PromptRow:
        """The prompt of a row of the files. Raises ``ValueError`` when the row is not selected."""
        if row_index not in self._row_indices:
            raise ValueError(
                f"a resumed run must read the data it was started with, but row {row_index} of "
                "data.train_files, which the checkpoint was sampling, is not selected now. Restore the data, "
                "or start a new run with trainer.resume_mode=disable."
            )
        return self[self._row_indices.index(row_index)]

    def __getitem__(self, index: int) -> PromptRow:
        """The prompt at ``index``, truncated. Raises ``ValueError`` when it is malformed or too long."""
        row_index = self._row_indices[index]
        record, location, folder = self._record(row_index)
        _check_record(record, location)
        messages, token_ids, pictures = self._encode(record, location, folder)
        return PromptRow(
            row_index=row_index,
            prompt_token_ids=self._fit(token_ids, pictures, location),
            messages=messages,
            pictures=pictures,
            data_source=str(record["data_source"]),
            ground_truth=record["reward_model"]["ground_truth"],
            extra_info=record.get("extra_info") or {},
            agent_name=record.get("agent_name"),
        )

    def _record(self, row_index: int) -> tuple[Record, str, Path]:
        """A row of the files, its location for messages, and the folder of its file."""
        number = bisect.bisect_right(self._ends, row_index)
        file = self._files[number]
        file_row = row_index - (self._ends[number] - len(file))
        return file[file_row], f"row {file_row} of {file.path}", Path(file.path).parent

    def _encode(
        self, record: Record, location: str, folder: Path
    ) -> tuple[list[dict[str, Any]], list[int], Pictures | None]:
        """A record's messages, their token ids, untruncated, and its pictures."""
        messages = check_messages(record[self._config.prompt_key], self._config.prompt_key, location)
        arguments = self._config.apply_chat_template_kwargs
        try:
            images = record.get(self._config.image_key)
            marked, pictures = with_pictures(messages, images, self._reader, folder)
            token_ids = encode_prompt(self._tokenizer, marked, arguments)
            if pictures is not None and self._reader is not None:
                token_ids = self._reader.expand(token_ids, pictures)
            return messages, token_ids, pictures
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error

    def _fit(self, token_ids: list[int], pictures: Pictures | None, location: str) -> list[int]:
        """See ``fit_prompt``. Of a prompt with pictures nothing is cut."""
        config = self._config if pictures is None else self._config.model_copy(update={"truncation": "error"})
        return fit_prompt(token_ids, config, location)


def _record_file(path: str, config: DataConfig, reader: ImageReader | None) -> RecordFile | VerifiersRecords:
    """A data file, all of whose rows are well-formed. Raises ``ValueError`` naming the first that is not, or
    that has pictures where there is no ``reader``."""
    prompt_key = config.prompt_key
    required = (prompt_key, "data_source", "reward_model")
    is_refused = reader is None and config.image_key in MEDIA  # by every file
    pictures = () if is_refused else (config.image_key,)
    optional = ("extra_info", "agent_name", *pictures, *VerifiersRecords.COLUMNS)
    file = RecordFile(path, (), [*required, *optional], messages=prompt_key)
    rows: RecordFile | VerifiersRecords = file
    if VerifiersRecords.fits(file):
        rows = VerifiersRecords(file, prompt_key)
    else:
        file.require(required)
    for row, record in enumerate(rows):
        location = f"row {row} of {path}"
        messages = check_messages(record[prompt_key], prompt_key, location)
        _check_record(record, location)
        if reader is None:
            try:
                with_pictures(messages, record.get(config.image_key), None, Path(path).parent)
            except ValueError as error:
                raise ValueError(f"{location}: {error}.") from error
    return rows


def _check_record(record: Record, location: str) -> None:
    """Raise ``ValueError`` naming the ``location`` unless a record has what is not its prompt."""
    reward_model, extra_info = record["reward_model"], record.get("extra_info")
    for column in ("data_source", "reward_model"):
        if record[column] is None:
            raise ValueError(f"column {column!r} must hold a value in every row, but {location} has none.")
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ValueError(
            "column 'reward_model' must hold {'style': ..., 'ground_truth': ...}, got "
            f"{str(reward_model)[:80]!r} in {location}. Convert the file."
        )
    if extra_info is not None and not isinstance(extra_info, dict):
        raise ValueError(
            "column 'extra_info' must hold a mapping of further fields or null, got "
            f"{str(extra_info)[:80]!r} in {location}."
        )


def fit_prompt(token_ids: list[int], config: DataConfig, location: str) -> list[int]:
    """``token_ids`` truncated to ``data.max_prompt_length`` as ``data.truncation`` says; ``middle`` removes
    the middle.

    Raises ``ValueError`` with the row's ``location`` when a prompt is too long and ``truncation`` is
    ``error``.
    """
    limit = config.max_prompt_length
    if len(token_ids) <= limit:
        return token_ids
    match config.truncation:
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
                f"{location}. Raise the limit, set data.filter_overlong_prompts=True, or choose "
                "data.truncation=left, right or middle."
            )


class PromptLoader(DataLoader[PromptRow]):
    """A loader of batches of prompts."""

    dataset: PromptDataset
    batch_sampler: EpochBatches


def build_train_loader(config: DataConfig, tokenizer: Any, reader: ImageReader | None = None) -> PromptLoader:
    """Build a loader of batches of ``config.gen_batch_size`` prompts; an iteration is an epoch, without an
    incomplete batch.

    ``PromptStream`` knows its position. Raises ``ValueError`` for invalid data.
    """
    dataset = PromptDataset(config.train_files, tokenizer, config, config.train_max_samples, reader)
    if len(dataset) < config.gen_batch_size:
        key = "train_batch_size" if config.gen_batch_size == config.train_batch_size else "gen_batch_size"
        raise ValueError(
            f"data.train_files must give at least data.{key}={config.gen_batch_size} prompts, got "
            f"{len(dataset)} after data.train_max_samples and filtering. Lower the batch size or add data."
        )
    return PromptLoader(
        dataset,
        batch_sampler=_batches(dataset, config),
        collate_fn=list,
        num_workers=config.dataloader_num_workers,
    )


def _batches(dataset: PromptDataset, config: DataConfig) -> EpochBatches:
    order = config.gen_batch_size, config.seed, config.shuffle, dataset.fingerprint()
    if config.train_weights is None:
        return EpochBatches(len(dataset), *order)
    return MixedBatches(dataset.file_sizes(), config.train_weights, *order)


def build_validation_rows(
    config: DataConfig, tokenizer: Any, reader: ImageReader | None = None
) -> list[PromptRow]:
    """All validation prompts in the order of the files, or ``val_max_samples`` of them, none without
    ``val_files``; ``ValueError`` for invalid data."""
    if not config.val_files:
        return []
    dataset = PromptDataset(config.val_files, tokenizer, config, config.val_max_samples, reader)
    return [dataset[index] for index in range(len(dataset))]


def _endless(loader: Any) -> Iterator[list[PromptRow]]:
    """The batches of all epochs."""
    return itertools.chain.from_iterable(itertools.repeat(loader))


class PromptStream:
    """An endless stream of a loader's batches, epoch after epoch.

    Its position counts the batches that were drawn, whatever the processes of the loader have read ahead.
    """

    def __init__(self, loader: Any, saved: Mapping[str, Any] | None = None) -> None:
        """``loader``: result of ``build_train_loader``; nobody else may iterate it. ``saved``: the state to
        resume. None means the beginning."""
        self._loader = loader
        self._order: EpochBatches = loader.batch_sampler
        self._batches: Iterator[list[PromptRow]] = _endless(loader)
        self._batches_drawn = 0
        if saved is not None:
            self.load_state_dict(saved)

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self._order)

    def draw(self) -> tuple[int, list[PromptRow]]:
        """The next batch and its epoch, counted from 0."""
        rows = next(self._batches)
        epoch = self._batches_drawn // len(self)
        self._batches_drawn += 1
        return epoch, rows

    def first(self) -> PromptRow:
        """The first prompt of the files; it is not drawn."""
        row: PromptRow = self._loader.dataset[0]
        return row

    def row(self, row_index: int) -> PromptRow:
        """See ``PromptDataset.row``."""
        row: PromptRow = self._loader.dataset.row(row_index)
        return row

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch."""
        return self._order.state_after(self._batches_drawn)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a ``state_dict``. Raises ``ValueError`` when it is invalid, or of other data or another
        order."""
        self._order.load_state_dict(state)
        self._batches_drawn = self._order.epoch * len(self) + self._order.position
        self._batches = _endless(self._loader)
