"""Every metric name that the code spells out has an entry in the catalogue, and every entry is reported
somewhere."""

import ast
import re
from collections.abc import Iterable

import pytest
from architecture.source_tree import listed, package_files, parse, relative

from verl_rc.metrics.catalog import CATALOG
from verl_rc.metrics.catalog.spec import Catalog, MetricSpec

SECTIONS = (
    r"(?:actor|critic|global_seqlen|perf|prompt_length|response|response_length"
    r"|rollout_corr|sync|timing_s|train|training)"
)
_NAME = re.compile(rf"{SECTIONS}/[a-z0-9_/]*[a-z0-9]")
_ENTRIES = tuple(spec.name for spec in CATALOG)


def names_without_entry(tree: ast.AST, path: str) -> list[str]:
    """Whole string literals only; ``critic/score``, completed to ``critic/score/mean`` elsewhere, counts as
    known."""
    inside_f_strings = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    literals = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside_f_strings
    )
    return [
        f"{path}:{literal.lineno} {literal.value} has no entry in verl_rc/metrics/catalog"
        for literal in literals
        if _NAME.fullmatch(literal.value)
        and CATALOG.find(literal.value) is None
        and not any(entry.startswith(f"{literal.value}/") for entry in _ENTRIES)
    ]


def stages(tree: ast.AST) -> dict[str, int]:
    """Stages of a step, which become ``timing_s/<stage>`` and ``timing_busy_s/<stage>``, and the lines they
    stand in."""
    calls = (
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    )
    rooms = {
        "stage": ("timing_s",),
        "add_busy": ("timing_busy_s",),
        "timed": ("timing_s", "timing_busy_s"),
    }
    return {
        f"{room}/{call.args[0].value}": call.lineno
        for call in calls
        if call.args and isinstance(call.args[0], ast.Constant)
        for room in rooms.get(call.func.attr, ())
    }


def stages_without_entry(tree: ast.AST, path: str) -> list[str]:
    found = stages(tree).items()
    return [
        f"{path}:{line} {name} has no entry in verl_rc/metrics/catalog"
        for name, line in found
        if CATALOG.find(name) is None
    ]


def unreported_entries(trees: Iterable[ast.AST], catalog: Catalog) -> list[str]:
    """Entries whose name nobody spells out: neither whole, nor as an f-string, nor as a beginning that one
    completes."""
    texts: set[str] = set()
    templates: list[str] = []
    for tree in trees:
        texts |= stages(tree).keys()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                templates.append(
                    "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
                )
    templates = [text for text in templates if not text.startswith(("timing_s/", "timing_busy_s/"))]
    whole = [text for text in templates if "/" in text.partition("\0")[0]]
    endings = [
        re.compile(re.escape(text[1:]).replace("\0", ".+"))
        for text in templates
        if text[:2] in ("\0/", "\0_")
    ]

    def is_completed(name: str) -> bool:
        cuts = (cut for cut in range(1, len(name)) if name[:cut] in texts)
        return any(ending.fullmatch(name[cut:]) for cut in cuts for ending in endings)

    def is_reported(spec: MetricSpec) -> bool:
        name = re.sub(r"\{\w+\}", "x", spec.name)
        samples = (text.replace("\0", "x") for text in whole)
        return (
            name in texts
            or any(map(spec.matches, texts))
            or any(spec.matches(sample) for sample in samples)
            or any(re.fullmatch(re.escape(text).replace("\0", ".+"), name) for text in whole)
            or is_completed(name)
            or (spec.name.startswith("{") and any(ending.fullmatch(name[1:]) for ending in endings))
        )

    return [
        f"{spec.name} is reported by nobody: drop it from the catalogue"
        for spec in catalog
        if not is_reported(spec)
    ]


def test_every_entry_is_reported():
    paths = [path for path in package_files() if not relative(path).startswith("verl_rc/metrics/")]
    violations = unreported_entries([parse(path) for path in paths], CATALOG)
    assert not violations, listed(violations)


@pytest.mark.parametrize(
    ("name", "code", "count"),
    [
        ("a/b", "{'a/b': 1.0}", 0),
        ("a/b", "{'a/c': 1.0}", 1),
        ("a/{n}_b", "{f'a/{number}_b': 1.0}", 0),
        ("a/b/mean", "{f'{name}/mean': 1.0 for name in ('a/b',)}", 0),
        ("a/b/mean", "{f'{name}/max': 1.0 for name in ('a/b',)}", 1),
        ("timing_s/gen", "record.stage('gen')", 0),
        ("timing_busy_s/gen", "record.stage('gen'); f'timing_busy_s/{name}'", 1),
    ],
)
def test_the_check_of_entries_itself(name, code, count):
    assert len(unreported_entries([ast.parse(code)], Catalog([MetricSpec(name, "1", "")]))) == count


def test_stages_of_the_driver_have_entries():
    violations = [
        v for path in package_files("trainer") for v in stages_without_entry(parse(path), relative(path))
    ]
    assert not violations, listed(violations)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("record.stage('gen')", 0),
        ("record.stage('generate')", 1),
        ("record.add_busy('ghost', 1.0)", 1),
        ("record.timed('ghost', call)", 2),
        ("record.stage(name)", 0),
    ],
)
def test_the_check_of_stages_itself(code, count):
    assert len(stages_without_entry(ast.parse(code), "planted.py")) == count


def test_names_in_the_code_have_entries():
    violations = [v for path in package_files() for v in names_without_entry(parse(path), relative(path))]
    assert not violations, listed(violations)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("metrics = {'actor/pg_loss': 1.0, 'critic/score': 2.0}", 0),
        ("metrics = {'actor/pg_los': 1.0}", 1),
        ("name = f'timing_s/{stage}'", 0),
        ("text = 'actor/critic workers'", 0),
    ],
)
def test_the_check_itself(code, count):
    assert len(names_without_entry(ast.parse(code), "planted.py")) == count
