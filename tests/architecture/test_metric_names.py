"""Every metric name that the code spells out has an entry in the catalogue, and docs/metrics.md shows the catalogue."""

import ast
import re

import pytest
from architecture.source_tree import listed, package_files, parse, relative
from generate_metrics_docs import PAGE, render

from verl_rc.metrics.catalog import CATALOG

ROOMS = (
    r"(?:actor|critic|global_seqlen|perf|prompt_length|response|response_length"
    r"|rollout_corr|sync|timing_s|train|training)"
)
_NAME = re.compile(rf"{ROOMS}/[a-z0-9_/]*[a-z0-9]")
_ENTRIES = tuple(spec.name for spec in CATALOG)


def names_without_entry(tree: ast.AST, path: str) -> list[str]:
    """Whole string literals only; ``critic/score``, completed to ``critic/score/mean`` elsewhere, counts as known."""
    inside_f_strings = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
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


def stages_without_entry(tree: ast.AST, path: str) -> list[str]:
    """Stages of a step, which become ``timing_s/<stage>`` and ``timing_busy_s/<stage>``."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    rooms = {"stage": "timing_s", "add_busy": "timing_busy_s"}
    return [
        f"{path}:{call.lineno} {rooms[call.func.attr]}/{call.args[0].value} has no entry in verl_rc/metrics/catalog"
        for call in calls
        if call.func.attr in rooms
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and CATALOG.find(f"{rooms[call.func.attr]}/{call.args[0].value}") is None
    ]


def test_stages_of_the_driver_have_entries():
    violations = [v for path in package_files("driver") for v in stages_without_entry(parse(path), relative(path))]
    assert not violations, listed(violations)


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("record.stage('gen')", 0),
        ("record.stage('generate')", 1),
        ("record.add_busy('ghost', 1.0)", 1),
        ("record.stage(name)", 0),
    ],
)
def test_the_check_of_stages_itself(code, count):
    assert len(stages_without_entry(ast.parse(code), "planted.py")) == count


def test_names_in_the_code_have_entries():
    violations = [v for path in package_files() for v in names_without_entry(parse(path), relative(path))]
    assert not violations, listed(violations)


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python scripts/generate_metrics_docs.py"


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
