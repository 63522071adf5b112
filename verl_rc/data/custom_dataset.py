"""Prompts from a class of the user's own: loaded from a Python file, read row by row like a data file."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_rc.config.task import DataConfig
from verl_rc.config.user_code import load_user_module
from verl_rc.data.records import Record

_KEY = "data.custom_cls"


class CustomRecords:
    """The rows of an instance of ``data.custom_cls``, in the place of a data file.

    The class is called with verl's keyword arguments ``data_files``, ``tokenizer``, ``processor`` (always None) and
    ``config``, and has ``__len__`` and ``__getitem__``. A row is a mapping in verl's format: chat messages under
    ``data.prompt_key`` or ``raw_prompt``, ``data_source``, ``reward_model``, and ``extra_info`` if there is any. Tokens,
    limits and the choice of rows are made from it as from a file's row.
    """

    def __init__(self, config: DataConfig, data_files: Sequence[str], tokenizer: Any) -> None:
        """Make the instance. Raises ``ValueError`` when the class cannot be loaded, or has no length or no row."""
        assert config.custom_cls.path is not None
        assert config.custom_cls.name is not None
        self.path = f"{config.custom_cls.name} of {config.custom_cls.path}"
        self._prompt_key = config.prompt_key
        cls = load_class(config.custom_cls.path, config.custom_cls.name)
        try:
            self._rows = cls(data_files=list(data_files), tokenizer=tokenizer, processor=None, config=config)
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"{self.path} ({_KEY}) must take data_files, tokenizer, processor and config, but it raised {error!r}."
            ) from error
        if not hasattr(self._rows, "__len__") or not hasattr(self._rows, "__getitem__"):
            raise ValueError(f"{_KEY}.name must name a class with __len__ and __getitem__, {self.path} lacks one of them.")
        if len(self) == 0:
            raise ValueError(f"{self.path} ({_KEY}) must give at least one row for {list(data_files)}, it gives none.")

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def column(self, name: str) -> list[Any]:
        """The values of one column, row by row; reads every row."""
        return [self[index][name] for index in range(len(self))]

    def __getitem__(self, index: int) -> Record:
        """Row ``index`` as a record. Raises ``ValueError`` when it is no mapping or lacks a column."""
        try:
            row = self._rows[index]
        except (Exception, SystemExit) as error:
            raise ValueError(f"{self.path} ({_KEY}) must give {len(self)} rows, but row {index} raised {error!r}.") from error
        given = dict(row) if isinstance(row, Mapping) else {}
        if self._prompt_key not in given and "raw_prompt" in given:
            given[self._prompt_key] = given["raw_prompt"]
        missing = [name for name in (self._prompt_key, "data_source", "reward_model") if name not in given]
        if missing:
            raise ValueError(
                f"a row of {self.path} must be a mapping with the keys {self._prompt_key!r} (or 'raw_prompt'), 'data_source' and "
                f"'reward_model', but row {index} lacks {missing}; it is {str(row)[:120]}."
            )
        return given


def load_class(path: str, name: str) -> Any:
    """The class ``name`` of the Python file ``path``. Raises ``ValueError`` when there is none."""
    module = load_user_module(path, f"{_KEY}.path")
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        there = sorted(key for key, value in vars(module).items() if isinstance(value, type))
        raise ValueError(f"{_KEY}.name must name a class of {path}, got {name!r}; its classes are {there}.")
    return cls
