"""Writes docs/configuration.md from the schema: python scripts/generate_config_docs.py"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, AGGREGATIONS, POLICY_LOSSES
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
    return "\n".join([*parts, *_algorithms()]) + "\n"


def _algorithms() -> Iterator[str]:
    """What the names of losses, averages and estimators stand for."""
    yield "\n## Policy losses\n\nThe loss of a token (of a row for `geo_mean`); sg[…] is a constant of the gradient."
    yield "`verl-rc explain` prints the whole objective with the meaning of every symbol.\n"
    yield "| `loss_mode` | loss | options | source |\n|---|---|---|---|"
    for name, loss in POLICY_LOSSES.items():
        options = ", ".join(f"`{option.key}`" for option in loss.options)
        mode = f"`{name}`" if loss.is_loss_mode else f"(`loss_type={name}`)"
        average = f", averaged `{loss.aggregation}`" if loss.aggregation else ""
        yield _row(mode, f"{loss.title}: {loss.formula}{average}", options, loss.source)
    yield "\n## Averages of token losses\n\n| `loss_agg_mode` | average | source |\n|---|---|---|"
    for name, average_spec in AGGREGATIONS.items():
        divisors = average_spec.divisors.format(counted="response tokens", factor="`loss_scale_factor`")
        yield _row(f"`{name}`", f"{average_spec.average_of('l')}; {divisors}", average_spec.source)
    yield "\n## Advantage estimators\n\nA of a token; s is the row's score, g its group: the rows that answer one prompt.\n"
    yield "| `adv_estimator` | A | reads beside rewards | options | source |\n|---|---|---|---|---|"
    for name, estimator in ADVANTAGE_ESTIMATORS.items():
        what = f"the same as `{estimator.same_as}`" if estimator.same_as else f"{estimator.title}: {estimator.formula}"
        lists = [", ".join(f"`{entry}`" for entry in entries) for entries in (estimator.inputs, estimator.options)]
        yield _row(f"`{name}`", what, *lists, estimator.source)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
