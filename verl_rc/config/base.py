"""The base of every configuration model: frozen, documented, closed to unknown keys."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from verl_rc.config.errors import shortened

_LONGEST_NAME = 255


class StrictModel(BaseModel):
    """A section of the configuration: immutable once built, unknown keys refused, defaults checked like given
    values, numbers finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def _usable_path(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise ValueError(f"a path must not be empty or hold NUL, got {text!r}")
    if any(len(part.encode("utf-8", "replace")) > _LONGEST_NAME for part in Path(text).parts):
        raise ValueError(f"every name in a path must have at most {_LONGEST_NAME} bytes, got {shortened(text)!r}")
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError as error:
        raise ValueError(f"a path that begins with ~ must name a user with a home, got {text!r}") from error


UserPath = Annotated[str, AfterValidator(_usable_path)]
"""A path, or the name of a model on the hub; ``~`` is the home of whoever starts the run."""
