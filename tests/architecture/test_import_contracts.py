"""Each import contract of pyproject.toml can fail. ``lint-imports`` shows that the package keeps them."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from architecture.source_tree import ROOT

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LINT = (
    "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(is_debug_mode=False, "
    "show_timings=False))"
)

FAULTS = {
    "layers": ("tensor_ops/__init__.py", "import verl_rc.trainer"),
    "ray": ("runtime/rollout/__init__.py", "def late():\n    import ray"),
    "vllm": ("records/rollout_batch.py", "import vllm"),
    "engine-rooms": ("trainer/cluster/placement.py", "from verl_rc.runtime.rollout.vllm import engine"),
    "wandb": ("metrics/record.py", "import wandb"),
    "hydra": ("main_ppo.py", "from omegaconf import OmegaConf"),
    "config-light": ("config/__init__.py", "from torch import Tensor"),
    "plan-light": ("plan/run_plan.py", "import torch"),
    "insight-light": ("insight/verdict.py", "import torch"),
    "siblings": ("config/__init__.py", "import verl_rc.metrics"),
}


def lint_imports(folder: Path) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-c", LINT], cwd=folder, capture_output=True, text=True, check=False
    )
    return result.returncode, result.stdout + result.stderr


@pytest.fixture
def skeleton(tmp_path):
    """An empty package of the same shape, with one allowed import of each kind."""
    layers = next(contract for contract in CONTRACTS if contract["type"] == "layers")["layers"]
    for name in re.findall(r"\w+", " ".join(layers)):
        if name.startswith("main_") or name == "cli":
            (tmp_path / f"verl_rc/{name}.py").parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / f"verl_rc/{name}.py").write_text("")
        else:
            (tmp_path / "verl_rc" / name).mkdir(parents=True)
            (tmp_path / "verl_rc" / name / "__init__.py").write_text("")
    (tmp_path / "verl_rc/__init__.py").write_text("")
    for name, text in {
        "runtime/weight_sync/manifest.py": "",
        "runtime/weight_sync/transfer_group.py": "",
        "runtime/weight_sync/sender.py": "from verl_rc.runtime.weight_sync import manifest",
        "metrics/record.py": "import verl_rc.config",
        "plan/run_plan.py": "",
        "plan/driver.py": "",
        "runtime/workers/policy_worker.py": "import torch",
        "insight/page.py": "from verl_rc.insight import verdict",
        "insight/run_folder.py": "",
        "insight/hooks/__init__.py": "",
        "insight/hooks/recorder.py": "",
        "insight/hooks/verl.py": "",
        "insight/diagnosis.py": "",
        "insight/picture.py": "",
        "insight/verdict.py": "from verl_rc.insight import run_folder",
        "algorithm/ppo/objective.py": "import torch",
        "plan/explain.py": "from verl_rc.plan import run_plan",
        "metrics/sinks.py": "import wandb",
        "config/load.py": "import hydra, omegaconf",
        "trainer/cluster/placement.py": "import ray",
        "trainer/train.py": "import ray\nfrom verl_rc.metrics import sinks\nfrom verl_rc.config import load",
        "records/rollout_batch.py": "",
        "runtime/rollout/vllm/__init__.py": "",
        "runtime/rollout/vllm/engine.py": "import vllm\nfrom verl_rc.runtime.weight_sync import manifest",
        "main_ppo.py": "from verl_rc.trainer import train",
    }.items():
        (tmp_path / "verl_rc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "verl_rc" / name).write_text(text)
    for folder in (path for path in (tmp_path / "verl_rc").rglob("*") if path.is_dir()):
        (folder / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_what_the_design_allows_is_allowed(skeleton):
    status, report = lint_imports(skeleton)
    assert status == 0, report


def test_every_contract_notices_its_fault(skeleton):
    assert set(FAULTS) == {contract["id"] for contract in CONTRACTS}
    for file, code in FAULTS.values():
        with (skeleton / "verl_rc" / file).open("a") as module:
            module.write(f"\n{code}\n")
    status, report = lint_imports(skeleton)
    assert status == 1, report
    for contract in CONTRACTS:
        assert f"{contract['name']} BROKEN" in re.sub(r"\s+", " ", report)


def test_a_package_without_a_place_in_the_layers_is_noticed(skeleton):
    (skeleton / "verl_rc" / "utils").mkdir()
    (skeleton / "verl_rc" / "utils" / "__init__.py").write_text("")
    status, report = lint_imports(skeleton)
    assert status == 1, report
    assert "utils" in report
