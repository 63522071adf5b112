"""The groups are installed with the package, and work where there is no checkout."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILD = "import setuptools; setuptools.setup()"
LOAD = (
    "import verl_rc.config.load as load; config = load.load_run_config(['task=digits', 'hardware=cpu', "
    "'correction=tis']); print(load.__file__, config.data.train_batch_size, "
    "config.algorithm.rollout_correction.rollout_is)"
)


def test_a_built_package_has_the_groups(tmp_path: Path) -> None:
    source, built, elsewhere = tmp_path / "source", tmp_path / "built", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for folder in ("verl_rc", "configs"):
        shutil.copytree(
            ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-c", BUILD, "--quiet", "build_py", "--build-lib", str(built)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    shutil.rmtree(source)
    environment = {**os.environ, "PYTHONPATH": str(built)}
    command = [sys.executable, "-c", LOAD]
    result = subprocess.run(
        command, cwd=elsewhere, env=environment, check=True, capture_output=True, text=True
    )
    assert result.stdout.split() == [
        str(built / "verl_rc" / "config" / "load" / "__init__.py"),
        "32",
        "token",
    ]
    files = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.yaml")}
    assert {
        path.relative_to(built / "verl_rc" / "configs") for path in (built / "verl_rc" / "configs").rglob("*")
    } >= files
