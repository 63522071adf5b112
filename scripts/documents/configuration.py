"""docs/configuration.md and configs/reference.yaml, from the schema."""

import textwrap
import types
from collections.abc import Iterable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from documents.markdown import table
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, AGGREGATIONS, POLICY_LOSSES, LossSpec
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import followed_key, section_of

_CONFIGS = Path(__file__).parents[2] / "configs"
_WIDTH = 100
_HEAD = """# Configuration

Every key of `python -m verl_rc.main_ppo key=value …`, with its default, as
`python -m scripts.documents` writes it from the schema.
[configs/reference.yaml](../configs/reference.yaml) is the same as YAML to copy from.

{names}

## Groups

A group sets several keys at once:

{groups}
```bash
python -m verl_rc.main_ppo task=digits hardware=cpu correction=decoupled_seq_is trainer.seed=2
verl-rc explain task=math hardware=8gpu model=qwen3_8b correction=decoupled_token_is
python -m verl_rc.main_ppo task=digits hardware=cpu --cfg=job
python -m verl_rc.main_ppo task=digits hardware=cpu --multirun correction=decoupled_seq_is,bypass_pg_is
```

What wins, the weakest first: the schema's defaults, the run file, `hardware`, `model`, `task`,
`async`, `correction`, and the keys of the command line, the last of which wins. No two of these
groups set the same key, and a group may be given once. A task brings a model; `model=NAME` takes
another, and `GROUP=null` or `~GROUP` takes none. `correction=NAME` is short for
`algorithm.rollout_correction.preset=NAME`, which fills the leaves of that section that were not
given anywhere.

Files of your own: `--config-dir DIR --config-name NAME` begins with the run file `DIR/NAME.yaml`;
with `defaults: [ppo_trainer, _self_]` its keys win over those of the groups. A folder
`DIR/hardware` holds further choices of a group, and any other folder is a new group.

As in Hydra, `--cfg=job|hydra|all`, `--resolve`, `--package`, `--info` and `--help` print and stop,
`~KEY` takes a key back, and `--multirun` makes a run for each combination of values, in folders 0,
1, … where `trainer.default_local_dir` is the same. A sweep over thresholds is written
`choice(2.0,3.0)`. `main_sft` has the same options and no groups.
"""
OWN_SECTIONS = (
    "actor_rollout_ref.rollout.environment",
    "actor_rollout_ref.rollout.sync_proof",
    "algorithm.adaptive_entropy",
    "algorithm.rollout_correction.score_centering",
    "trainer.alerts",
    "trainer.token_records",
)
"""Sections without a key of verl."""
OWN_LOSSES = ("bapo", "ipo", "m2po")
"""Losses with options that verl lacks."""
_REFERENCE_HEAD = """\
# Every key of python -m verl_rc.main_ppo with its default and what it means: a list to copy from. Values here are the
# defaults, so that a run needs none of them. ??? must be given. Written by python -m scripts.documents.
"""  # noqa: E501
_PRESET = (
    "preset: null # fills the leaves below that are not given; a name of verl-rc presets, as correction=NAME"
)


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section that has leaves of its own, with its dotted name."""
    children = {name: section_of(field.annotation) for name, field in model.model_fields.items()}
    if any(child is None for child in children.values()):
        yield prefix, model
    for name, child in children.items():
        if child is not None:
            yield from sections(child, f"{prefix}.{name}" if prefix else name)


def render() -> str:
    """The whole page."""
    names = (
        "Keys that verl has too have verl's names, except "
        "[those that moved](migration_from_verl.md#keys-by-another-name). verl lacks the sections "
        f"{_listed(OWN_SECTIONS)}, the options of the losses {_listed(OWN_LOSSES)}, and single keys."
    )
    parts = [_HEAD.format(groups=table(("group", "choices"), _groups()), names=_filled(names))]
    first: dict[str, tuple[str, str]] = {}
    keys_by_row: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, model in sections(RunConfig):
        parent, _, last = name.rpartition(".")
        leaves = {
            leaf: field for leaf, field in model.model_fields.items() if section_of(field.annotation) is None
        }
        is_alone = len(leaves) == 1 and parent in keys_by_row
        rows = keys_by_row.setdefault(parent if is_alone else name, {})
        for leaf, field in leaves.items():
            cells = _default_and_meaning(field, f"{name}.{leaf}", first)
            rows.setdefault(cells, []).append(f"{last}.{leaf}" if is_alone else leaf)
    for name, section in keys_by_row.items():
        cells_of_rows = ((_listed(keys), *cells) for cells, keys in section.items())
        parts.append(f"\n## {name}\n\n{table(('key', 'default', 'meaning'), cells_of_rows)}")
    return "".join([*parts, *_algorithms()])


def _default_and_meaning(field: FieldInfo, key: str, first: dict[str, tuple[str, str]]) -> tuple[str, str]:
    """Default and meaning of ``key``, or where they stand: the key that means the same and comes ``first`` on
    the page, or its section where the name is the same."""
    default = "required" if field.is_required() else f"`{field.default!r}`"
    leaf, followed, meaning = key.rpartition(".")[2], followed_key(field), _meaning(field)
    if followed is not None and followed.rpartition(".")[2] == leaf:
        return default, f"Null: as in ``{followed.rpartition('.')[0]}``."
    said, default_there = first.setdefault(meaning, (key, default))
    section, _, leaf_there = said.rpartition(".")
    if said == key:
        return default, meaning
    if (leaf, default) == (leaf_there, default_there):
        return "as there", f"As in ``{section}``."
    return default, f"As ``{said}``."


def _filled(text: str) -> str:
    """Lines of at most ``_WIDTH`` columns, without a break inside a link or a name."""
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _algorithms() -> Iterator[str]:
    """Tables of losses, averages and estimators."""
    yield (
        "\n## Policy losses\n\nThe loss of a token (of a row for `geo_mean`); sg[…] is a constant of the "
        "gradient.\n`verl-rc explain` prints the whole objective with the meaning of every symbol.\n\n"
    )
    yield table(("`loss_mode`", "loss", "options", "source"), starmap(_loss_cells, POLICY_LOSSES.items()))
    averages = (
        (
            f"`{name}`",
            spec.average_of("l"),
            spec.source,
        )
        for name, spec in AGGREGATIONS.items()
    )
    yield (
        "\n## Averages of token losses\n\nl is the loss of a token and m its mask. N and S are the response "
        "tokens and the rows with any,\nof the mini-batch over all ranks; n are the response tokens of a "
        "row; F is `loss_scale_factor`.\n\n"
    )
    yield table(("`loss_agg_mode`", "average", "source"), averages)
    yield (
        "\n## Advantage estimators\n\nA of a token; s is the row's score, g its group: the rows that answer "
        "one prompt.\n\n"
    )
    first: dict[str, str] = {}
    estimators = []
    for name, spec in ADVANTAGE_ESTIMATORS.items():
        said = first.setdefault(spec.formula, name)
        formula = spec.formula if said == name else f"as `{said}`"
        meaning = f"the same as `{spec.same_as}`" if spec.same_as else f"{spec.title}: {formula}"
        estimators.append((f"`{name}`", meaning, _listed(spec.options), spec.source))
    yield table(("`adv_estimator`", "A", "options", "source"), estimators)


def _loss_cells(name: str, loss: LossSpec) -> tuple[str, ...]:
    mode = f"`{name}`" if loss.is_loss_mode else f"(`loss_type={name}`)"
    average = f", averaged `{loss.aggregation}`" if loss.aggregation else ""
    options = _listed(option.key for option in loss.options)
    return mode, f"{loss.formula}{average}", options, loss.source


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def render_reference() -> str:
    """The text of ``configs/reference.yaml``."""
    return "\n".join([_REFERENCE_HEAD, *_section_in_yaml(RunConfig, "")]) + "\n"


def _groups() -> Iterator[tuple[str, str]]:
    for folder in sorted(path for path in _CONFIGS.iterdir() if path.is_dir()):
        yield f"`{folder.name}`", _listed(file.stem for file in sorted(folder.glob("*.yaml")))
    yield "`correction`", "every [preset](rollout_correction.md#presets)"


def _section_in_yaml(model: type[BaseModel], indent: str) -> Iterator[str]:
    # A leaf that a file gives wins over the preset: given as a default, it would take away what the preset
    # sets.
    has_preset = model is RolloutCorrectionConfig
    if has_preset:
        yield f"{indent}{_PRESET}"
    for name, field in model.model_fields.items():
        child = section_of(field.annotation)
        about = f"{_meaning(field)}{_choices(field.annotation)}"
        comment = f"{indent}# "
        yield from textwrap.wrap(
            about, _WIDTH, initial_indent=comment, subsequent_indent=comment, break_on_hyphens=False
        )
        if child is not None:
            yield f"{indent}{name}:"
            yield from _section_in_yaml(child, f"{indent}  ")
        else:
            value = (
                "???"
                if field.is_required()
                else yaml.safe_dump(field.default, default_flow_style=True, width=1000)
            )
            yield (
                f"{indent}{'# ' if has_preset else ''}{name}: "
                f"{value.removesuffix(chr(10)).removesuffix(chr(10) + '...')}"
            )


def _meaning(field: FieldInfo) -> str:
    text, followed = " ".join((field.description or "").split()), followed_key(field)
    return text if followed is None else f"{text} Null: ``{followed}``."


def _choices(annotation: Any) -> str:
    """The allowed values of a leaf with a fixed set of values, in words."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    values = [value for part in parts if get_origin(part) is Literal for value in get_args(part)]
    return (
        f" One of {', '.join(map(str, values))}{', null' if type(None) in parts else ''}."
        if len(values) > 1
        else ""
    )
