"""Tests mirror packages: each has its folder, and a folder below ``tests/unit`` has the name of a package."""

from collections.abc import Iterable

from architecture.source_tree import PACKAGE, PURE_PACKAGES, ROOT, listed, package_files

UNIT = ROOT / "tests" / "unit"
BESIDE = {"docs", "fuzz", "scripts"}
"""Folders of tests of something else than one package."""
TESTED_BY_WHOLE_RUNS = {"distributed"}
"""Packages that do nothing without several processes: tests/integration has theirs."""


def strangers(folders: Iterable[str], packages: Iterable[str]) -> set[str]:
    """Folders of tests that no package has the name of."""
    return {folder for folder in set(folders) - set(packages) if folder.partition("/")[0] not in BESIDE}


def test_every_package_has_its_tests():
    packages = {path.relative_to(PACKAGE).parts[0] for path in package_files() if path.parent != PACKAGE}
    assert set(PURE_PACKAGES) <= packages
    missing = {
        package
        for package in packages - TESTED_BY_WHOLE_RUNS
        if not list((UNIT / package).rglob("test_*.py"))
    }
    assert not missing, listed([f"tests/unit/{package} has no tests" for package in sorted(missing)])


def test_folders_of_tests_are_named_after_packages():
    packages = {path.parent.relative_to(PACKAGE).as_posix() for path in package_files()}
    folders = {path.parent.relative_to(UNIT).as_posix() for path in UNIT.rglob("test_*.py")}
    found = strangers(folders, packages)
    assert not found, listed(
        [f"tests/unit/{folder}: there is no verl_rc/{folder}" for folder in sorted(found)]
    )


def test_the_mirror_itself():
    assert strangers(["losses", "config/load", "scripts/cluster"], ["losses", "config/load"]) == set()
    assert strangers(["loss", "config/loaders"], ["losses", "config", "config/load"]) == {
        "loss",
        "config/loaders",
    }


def test_test_folders_are_no_packages():
    inits = [str(path) for path in (ROOT / "tests").rglob("__init__.py")]
    assert not inits, listed(inits)
