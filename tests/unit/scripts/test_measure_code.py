"""Numbers about a package that can be counted by hand."""

import sys
from pathlib import Path

import measure_code
import pytest
from measure_code import BUDGETS, Package, house, patched_files
from recipe_arguments import ROOT

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.metrics.catalog import SECTIONS


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """Three modules, one above the other, and a block that two of them share."""
    folder = tmp_path / "verl_rc"
    (folder / "correction").mkdir(parents=True)
    block = "".join(f"    number_{i} = values['key_{i}'] + {i}\n" for i in range(8))
    (folder / "low.py").write_text(
        f'"""Low."""\n\n\ndef low(values):  # a comment\n    """Say so."""\n{block}'
    )
    (folder / "correction" / "middle.py").write_text(
        f"from verl_rc.low import low\n\n\ndef middle(values):\n{block}\n"
        "    if values:\n        low(values)\n    raise ValueError\n"
    )
    (folder / "main_ppo.py").write_text("from verl_rc import low\n\nlow.low({})\n")
    return Package(folder)


def test_files_lines_and_functions(package: Package) -> None:
    assert sorted(package.sizes) == [3, 13, 16]
    assert sorted(package.function_sizes) == [10, 13]
    assert package.rooms == 1


def test_statements_are_counted_without_docstrings(package: Package) -> None:
    low, middle, main = 1 + 8, 1 + 1 + 8 + 3, 2
    assert package.statements() == low + middle + main
    assert package.statements(package.reached(["verl_rc.main_ppo"])) == low + main


def test_every_patch_of_contributing_is_counted() -> None:
    assert list(patched_files(ROOT)) == [
        "policy loss",
        "advantage estimator",
        "rejection rule",
        "metric",
        "stage",
        "engine",
        "environment",
    ]


@pytest.fixture(scope="module")
def numbers() -> dict[str, int]:
    return house(ROOT)


def test_keys_and_metrics_are_those_of_the_package(numbers: dict[str, int]) -> None:
    assert numbers["configuration keys"] == len(fields_of(RunConfig))
    assert numbers["metrics"] == sum(len(section) for section in SECTIONS.values())
    assert numbers.keys() == BUDGETS.keys()


def test_a_number_over_its_budget_is_a_line(
    numbers: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure_code, "house", lambda _: numbers)
    monkeypatch.setattr(measure_code, "style", lambda _: {})
    monkeypatch.setattr(sys, "argv", ["measure_code.py", str(ROOT)])
    monkeypatch.setitem(BUDGETS, "statements of the package", 1)
    monkeypatch.setitem(BUDGETS, "metrics", 10**6)
    measure_code.main()
    lines = {line.split(" | ")[0].strip("| "): line for line in capsys.readouterr().out.splitlines()}
    assert "(over)" in lines["statements of the package"]
    assert "(over)" not in lines["metrics"]
