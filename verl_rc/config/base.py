"""The base of every configuration model: frozen, documented, closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """A section of the configuration: immutable once built, unknown keys refused, defaults checked like given
    values."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
