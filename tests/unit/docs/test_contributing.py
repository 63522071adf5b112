"""Every patch of CONTRIBUTING.md applies to the package as it is, and what it adds works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import HELPERS, ROOT

_PATCH = re.compile(r"^### (Add [^\n]+)\n(?:(?!^##).)*?^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATCHES = dict(_PATCH.findall((ROOT / "CONTRIBUTING.md").read_text()))

USES = {
    "Add a policy loss": """
import torch
from sound_run import sound_run
from verl_rc.config.load import load_run_config
from verl_rc.algorithm.losses import compute_policy_loss, policy_loss_names
from documents.configuration import render
from verl_rc.plan.explain import plan_text

old, current = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 1.0]]).log().requires_grad_()
loss, metrics = compute_policy_loss("surrogate", old, current, torch.tensor([[1.0, -2.0]]), torch.ones(1, 2))
loss.backward()
assert abs(loss.item() - 1.75) < 1e-6, loss  # (-1 * 0.5 + 2 * 2) / 2
assert torch.allclose(current.grad, torch.tensor([[-0.25, 2.0]])), current.grad
assert "surrogate" in policy_loss_names()
config = load_run_config([*sound_run(), "actor_rollout_ref.actor.policy_loss.loss_mode=surrogate"])
assert "−A r" in plan_text(config)
assert "| `surrogate` | −A r |" in render()
""",
    "Add an advantage estimator": """
import torch
from sound_run import sound_run
from verl_rc.algorithm.advantage import compute_advantages
from verl_rc.config.load import load_run_config

rewards = torch.tensor([[0.0, 1.0], [3.0, 0.0], [2.0, 0.0]])
advantages, _ = compute_advantages("best_of_group", rewards, torch.tensor([[1, 1], [1, 1], [1, 0]]), group_ids=["a", "a", "b"])
assert advantages.tolist() == [[-2.0, -2.0], [0.0, 0.0], [0.0, 0.0]], advantages
assert load_run_config(sound_run("best_of_group")).algorithm.adv_estimator == "best_of_group"
""",  # noqa: E501
    "Add a rejection rule": """
import torch
from sound_run import sound_run
from verl_rc.config.load import load_run_config
from verl_rc.correction import compute_rollout_correction
from verl_rc.metrics.catalog import CATALOG

given = {"rollout_rs": "token_l1", "rollout_rs_threshold": 1.0}
log_ratio = torch.tensor([[0.5, -1.5, 1.5, 0.0]])
result = compute_rollout_correction(log_ratio - 2, torch.full((1, 4), -2.0), torch.ones(1, 4), given)
assert result.keep_mask.bool().tolist() == [[True, False, False, True]], result.keep_mask
name = "rollout_corr/rollout_rs_token_l1_masked_fraction"
assert result.metrics()[name] == 0.5
assert CATALOG.find(name) is not None
load_run_config([*sound_run(), *(f"algorithm.rollout_correction.{key}={value}" for key, value in given.items())])
""",  # noqa: E501
    "Add a metric": """
import torch
from small_models import make_train_batch, ragged
from verl_rc.records.batches import PolicyEvaluations, RolloutBatch
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.metrics.catalog import CATALOG
from verl_rc.algorithm.ppo.batch_metrics import batch_metrics
from verl_rc.algorithm.ppo.train_batch import StepInputs

batch = make_train_batch([7, 2, 5, 4])
rollouts = RolloutBatch(
    tokens=batch.tokens,
    response_mask=batch.response_mask,
    rollout_log_probs=batch.rollout_log_probs,
    policy_versions=torch.zeros(4, 7, dtype=torch.int64),
    group_ids=torch.arange(4),
    finished=torch.ones(4, dtype=torch.bool),
    batch_size=[4],
)
scored = ScoredBatch(ragged(rollouts), torch.zeros(4))
evaluations = scored.rollouts.become(PolicyEvaluations)
inputs = StepInputs(scored, evaluations, ragged(batch), None, torch.zeros(4), torch.zeros(18), None)
assert batch_metrics(inputs, 5, 100)["response_length/median"] == 4.5
assert CATALOG.find("response_length/median").unit == "tokens"
""",
    "Add a stage": """
import ast, inspect, logging, torch
from types import SimpleNamespace
from verl_rc.trainer import stages, train
from verl_rc.trainer.step_record import StepRecord
from verl_rc.metrics.catalog import CATALOG

said = []
logging.getLogger("verl_rc").addFilter(lambda line: said.append(line.getMessage()))
logging.getLogger("verl_rc").setLevel(logging.INFO)
record = StepRecord()
stages.show_sample(SimpleNamespace(scores=torch.tensor([0.0, 2.0, 1.0]), texts=["a", "b", "c"]), record)
assert said == ["best response: b"], said
assert "timing_s/show_sample" in record.metrics()
assert CATALOG.find("timing_s/show_sample") is not None
nodes = ast.walk(ast.parse(inspect.getsource(train.train)))
lines = {node.func.attr: node.lineno for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
assert lines["show_sample"] > lines["publish"]
""",  # noqa: E501
    "Add an engine": """
from sound_run import sound_run
from verl_rc.config.load import load_run_config
from verl_rc.runtime.rollout.engine import engine_options

options = engine_options(load_run_config([*sound_run(), "actor_rollout_ref.rollout.name=table"]), "cpu")
assert (options.worker, options.deterministic) == ("verl_rc.runtime.rollout.table.engine:TableEngine", False)
vllm = engine_options(load_run_config(sound_run()), "cpu").worker
assert vllm == "verl_rc.runtime.rollout.vllm.engine:VllmEngine"
""",
    "Add an environment": """
import asyncio
from sound_run import sound_run
from verl_rc.config.load import load_run_config
from verl_rc.records.episode import Episode, Turn
from verl_rc.runtime.rollout.environment_host import open_host

name = "actor_rollout_ref.rollout.environment.name=verl_rc.runtime.rollout.environments.echo:Echo"
rollout = load_run_config([*sound_run(), name]).actor_rollout_ref.rollout

async def play():
    host, episode = open_host(rollout), Episode((0, 0, 0), {"ground_truth": "hello"}, 1)
    first = await host.step(episode, Turn(0, "hallo", (1,), True))
    second = await host.step(episode, Turn(1, "hello", (2,), True))
    return (await host.open(episode.row, 1)).messages, first.reply, second.reply

messages, first, second = asyncio.run(play())
assert messages == [{"role": "user", "content": "hello"}]
assert (first.done, first.reward, second.done, second.reward) == (False, 0.0, True, 1.0)
""",
}
"""What a patch makes possible, tried in a process that has the patched package."""


def patched(folder: Path, *titles: str) -> Path:
    """A copy of the package and what it needs, with some patches."""
    for name in ("verl_rc", "configs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    for title in titles:
        given = {"input": PATCHES[title], "capture_output": True, "text": True, "check": False}
        result = subprocess.run(["git", "apply", "--whitespace=error", "-"], cwd=folder, **given)
        assert result.returncode == 0, f"{title}: {result.stderr}"
    return folder


def test_there_is_a_patch_for_each_addition() -> None:
    assert list(PATCHES) == list(USES)
    for title, patch in PATCHES.items():
        assert len(re.findall(r"^\+[^+]", patch, re.MULTILINE)) <= 20, f"{title}: keep the patch short"


@pytest.mark.parametrize("title", PATCHES)
def test_a_patch_applies_by_itself(title: str, tmp_path: Path) -> None:
    patched(tmp_path, title)


def test_what_they_add_works_and_keeps_the_rules_of_metric_names(tmp_path: Path) -> None:
    """In one process, whose imports take longer than all uses."""
    folder = patched(tmp_path, *PATCHES)
    shutil.copytree(ROOT / "tests" / "architecture", folder / "tests" / "architecture")
    shutil.copy(ROOT / "pyproject.toml", folder)
    uses = "\n".join(f"exec({use!r}, {{'__name__': {title!r}}})" for title, use in USES.items())
    names = ["-q", "-p", "no:cacheprovider", "tests/architecture/test_metric_names.py"]
    paths = [str(folder), str(ROOT / "tests"), HELPERS, str(ROOT / "scripts")]
    result = subprocess.run(
        [sys.executable, "-c", f"{uses}\nimport pytest\nraise SystemExit(pytest.main({names}))"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_without_its_patch_nothing_works() -> None:
    with pytest.raises(ValueError, match=r"must be|unknown"):
        exec(USES["Add an advantage estimator"], {"__name__": "use"})
