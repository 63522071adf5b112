"""Pages that scripts write say what the code says now."""

from types import ModuleType

import generate_config_docs
import generate_metrics_docs
import generate_migration_docs
import generate_preset_docs
import pytest

WRITERS = [generate_config_docs, generate_metrics_docs, generate_migration_docs, generate_preset_docs]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.PAGE.name)
def test_a_page_is_current(writer: ModuleType) -> None:
    assert writer.PAGE.read_text(encoding="utf-8") == writer.render(), f"run: python scripts/{writer.__name__}.py"
