"""The base of every section: frozen, closed, checked."""

import pytest
from pydantic import Field, ValidationError

from verl_rc.config.base import StrictModel


class Section(StrictModel):
    size: int = Field(3, ge=1)
    """A documented field."""


def test_sections_are_frozen_closed_and_documented() -> None:
    assert Section.model_fields["size"].description == "A documented field."
    with pytest.raises(ValidationError, match="frozen"):
        Section().size = 4  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Section.model_validate({"sise": 4})
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Section(size=0)
