"""Numbers about a package that can be counted by hand."""

from pathlib import Path

import pytest
from measure_code import ADDITIONS, Package, measure, patched_files
from recipe_arguments import ROOT


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """Three modules, one above the other, and a block that two of them share."""
    folder = tmp_path / "verl_rc" / "correction"
    folder.mkdir(parents=True)
    block = "".join(f"    number_{i} = values['key_{i}'] + {i}\n" for i in range(8))
    (folder / "low.py").write_text(
        f'"""Low."""\n\n\ndef low(values):  # a comment\n    """Say so."""\n{block}'
    )
    (folder / "middle.py").write_text(
        "from verl_rc.correction.low import low\n\n\n"
        f"def middle(values):\n{block}\n"
        "    try:\n        low(values[f'{values}'])\n    except Exception:\n        raise\n"
    )
    (folder / "high.py").write_text(
        "from verl_rc.correction import middle\n\nkpop: Literal['x'] = middle  # kpops\n"
    )
    return Package(folder)


def test_files_lines_and_functions(package: Package) -> None:
    assert package.sizes == [3, 13, 17]
    assert package.function_sizes == [10, 14]


def test_comments_are_counted_and_docstrings_are_not(package: Package) -> None:
    assert package.num_comments == 2
    assert package.comments_per_100_lines == pytest.approx(200 / 33)


def test_string_subscripts_and_broad_excepts(package: Package) -> None:
    assert package.string_subscripts == 17
    assert package.broad_excepts == 1


def test_repeated_stretches(package: Package) -> None:
    assert package.repeated_percent == pytest.approx(100 * 16 / (1 + 9 + 13))


def test_the_longest_chain_of_imports(package: Package) -> None:
    assert package.import_chain == 3


def test_a_name_is_a_whole_word(package: Package) -> None:
    assert [path.name for path in package.files_that_name("kpop")] == ["high.py"]
    assert package.files_that_name("number") == []


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
    assert set(ADDITIONS) == set(patched_files(ROOT))


def test_examples_of_each_addition_are_there() -> None:
    numbers = measure(ROOT)
    for kind, name in ADDITIONS.items():
        assert int(numbers[f"files that name the {kind} {name}"]) > 0
