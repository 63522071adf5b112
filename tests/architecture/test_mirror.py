"""Every module of a pure package has its test file at the same place."""

from architecture.source_tree import PACKAGE, PURE_PACKAGES, ROOT, listed, package_files

TESTED_ELSEWHERE = {
    f"metrics/catalog/{room}.py": "tests/unit/metrics/catalog/test_lookup.py"
    for room in ("accounting", "asynchrony", "batch", "learning", "rollout_corr", "sync", "time", "validation")
} | {"metrics/sinks/protocol.py": "tests/unit/metrics/sinks/test_tracker.py"}
"""Tables of entries and interfaces: nothing of their own to run."""


def test_file_of(module: str) -> str:
    folder, _, name = module.rpartition("/")
    return TESTED_ELSEWHERE.get(module, f"tests/unit/{folder}/test_{name}")


test_file_of.__test__ = False


def test_every_module_has_its_test_file():
    modules = [path.relative_to(PACKAGE).as_posix() for path in package_files(*PURE_PACKAGES, "metrics", "config")]
    missing = [
        f"verl_rc/{module}: {test_file_of(module)} is missing"
        for module in modules
        if not module.endswith("__init__.py") and not (ROOT / test_file_of(module)).exists()
    ]
    assert not missing, listed(missing)


def test_the_mirror_itself():
    assert test_file_of("losses/gspo.py") == "tests/unit/losses/test_gspo.py"
    assert test_file_of("metrics/sinks/jsonl.py") == "tests/unit/metrics/sinks/test_jsonl.py"


def test_test_folders_are_no_packages():
    inits = [str(path) for path in (ROOT / "tests").rglob("__init__.py")]
    assert not inits, listed(inits)
