"""Writes docs/configuration.md from the schema: python scripts/generate_config_docs.py"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from verl_rc.config.run import RunConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

_HEAD = """# Configuration

Every key of `python -m verl_rc.main_ppo key=value …`, with its default; generated from the schema by
`python scripts/generate_config_docs.py`. Names are verl's. `algorithm.rollout_correction.preset=NAME` fills the leaves of that
section which nobody gave.
"""


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section that has leaves of its own, with its dotted name."""
    children = {name: field.annotation for name, field in model.model_fields.items()}
    if any(not _is_section(annotation) for annotation in children.values()):
        yield prefix, model
    for name, annotation in children.items():
        if _is_section(annotation):
            yield from sections(annotation, f"{prefix}.{name}" if prefix else name)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, model in sections(RunConfig):
        parts.append(f"\n## {name}\n\n| key | default | meaning |\n|---|---|---|")
        for leaf, field in model.model_fields.items():
            if _is_section(field.annotation):
                continue
            default = "required" if field.default is PydanticUndefined else f"`{field.default!r}`"
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            parts.append(f"| `{leaf}` | {default} | {meaning} |")
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
