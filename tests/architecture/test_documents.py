"""What documents, docstrings and comments name exists: files, links, modules, metrics."""

import ast
import re
from pathlib import Path

import pytest
from architecture.source_tree import PACKAGE, ROOT, listed, parse, texts

from verl_rc.metrics.catalog import CATALOG

TOP_LEVEL = ("verl_rc", "scripts", "tests", "docs", "configs", "recipes", "docker", "requirements", r"\.ci")
_PATH = re.compile(
    rf"(?<![\w/.<{{$-])((?:{'|'.join(TOP_LEVEL)})/[\w./-]*\w\.(?:py|sh|md|yaml|yml|json|toml|txt))\b"
)
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)")
_MODULE = re.compile(r"(?<![\w./])verl_rc(?:\.\w+)+")
_METRIC = re.compile(
    r"`((?:rollout_corr|actor|critic|perf|timing_s|timing_per_token_ms|sync|training|val-core|val-aux"
    r"|response_length|prompt_length|global_seqlen)/[\w{}@/.-]+)`"
)

_BOUNDED = re.compile(r"`([\w/]+)` ([<>] [\d.]*\d(?: or [<>] [\d.]*\d)?)")


def missing_paths(text: str, where: str) -> list[str]:
    """Files named from the root of the repository that are not there."""
    return [
        f"{where}: {name} does not exist"
        for name in sorted(set(_PATH.findall(text)))
        if not (ROOT / name).exists()
    ]


def dead_links(text: str, where: str) -> list[str]:
    """Relative Markdown links that lead nowhere."""
    folder = (ROOT / where).parent
    return [
        f"{where}: link to {target} is dead"
        for target in _LINK.findall(text)
        if not (folder / target).exists()
    ]


def _defines(module: Path, name: str) -> bool:
    names: set[str] = set()
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[-1] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return name in names


def unknown_modules(text: str, where: str) -> list[str]:
    """Dotted names below ``verl_rc`` that are neither a module nor defined in one."""
    violations = []
    for dotted in sorted(set(_MODULE.findall(text))):
        place, rest = PACKAGE, dotted.split(".")[1:]
        while rest and (place / rest[0]).is_dir():
            place /= rest.pop(0)
        if rest and (place / f"{rest[0]}.py").exists():
            place /= f"{rest.pop(0)}.py"
        module = place / "__init__.py" if place.is_dir() else place
        if (
            rest
            and rest[0] not in ("__version__", "__all__")
            and not (module.exists() and _defines(module, rest[0]))
        ):
            violations.append(f"{where}: {dotted} does not exist")
    return violations


def unknown_metrics(text: str, where: str) -> list[str]:
    """Metric names in backticks that have no entry in the catalogue."""
    names = (
        name
        for name in sorted(set(_METRIC.findall(text)))
        if not name.endswith((".py", ".md", ".json", ".yaml"))
    )
    known = {spec.name for spec in CATALOG}
    return [
        f"{where}: metric {name} has no entry"
        for name in names
        if name not in known and CATALOG.find(name) is None
    ]


def other_bounds(text: str, where: str) -> list[str]:
    """Bounds written behind a metric that are not the ends of its healthy range."""
    return [
        f"{where}: {name} {bounds}, healthy is {spec.healthy_in_words}"
        for name, bounds in _BOUNDED.findall(text)
        if (spec := CATALOG.find(name)) is not None and spec.healthy is not None
        if not set(map(float, re.findall(r"[\d.]+", bounds))) <= set(spec.healthy)
    ]


def test_files_that_are_named_exist():
    violations = [
        v for where, text in texts() if "architecture" not in where for v in missing_paths(text, where)
    ]
    assert not violations, listed(violations)


@pytest.mark.parametrize("check", [dead_links, unknown_modules, unknown_metrics, other_bounds])
def test_documents_name_what_exists(check):
    violations = [v for where, text in texts(".md") for v in check(text, where)]
    assert not violations, listed(violations)


@pytest.mark.parametrize(
    ("check", "text", "count"),
    [
        (missing_paths, "see `scripts/test.sh` and docs/metrics.md.", 0),
        (missing_paths, "see `scripts/no_such.sh`, (docs/ghost.md)", 2),
        (missing_paths, "writes runs/x/metrics.jsonl and <dir>/docs/ghost.md", 0),
        (dead_links, "[a](metrics.md) [b](https://example.com) [c](#here) [d](metrics.md#sync)", 0),
        (dead_links, "[a](ghost.md) [b](../ghost/x.py#part)", 2),
        (
            unknown_modules,
            "`verl_rc.metrics.sinks.open_tracker`, `verl_rc.metrics`, verl_rc.metrics.record.Metric.",
            0,
        ),
        (unknown_modules, "`verl_rc.ghost`, `verl_rc.metrics.ghost`, verl_rc.metrics.record.Ghost", 3),
        (
            unknown_metrics,
            "`actor/pg_loss`, `rollout_corr/rollout_rs_{rule}_{extreme}`, `val-core/digits/acc/mean@1`",
            0,
        ),
        (unknown_metrics, "`actor/pg_los`, `sync/ghost`", 2),
        (other_bounds, "`rollout_corr/rollout_is_mean` < 0.5 or > 2, `rollout_corr/chi2_seq` > 9", 0),
        (other_bounds, "`rollout_corr/rollout_is_mean` < 0.4 or > 3 | `actor/pg_clipfrac` > 0.5", 2),
        (unknown_metrics, "`rollout_corr/kept_fraction_correct`, `rollout_corr/log_ratio_p99`", 0),
        (unknown_metrics, "`rollout_corr/kept_fraction_right`, `rollout_corr/log_ratio_p90`", 2),
    ],
)
def test_the_checks_themselves(check, text, count):
    assert len(check(text, "docs/planted.md")) == count
