"""Every estimator and every policy loss takes two steps of the real loop: finite numbers, and weights of its
own."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import ROOT, run_overrides

from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, LOSS_MODES
from verl_rc.metrics import check_names
from verl_rc.runtime.checkpoint import load_full_state_dict

pytestmark = pytest.mark.slow

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    digits = sum(a == b for a, b in zip(solution_str, str(ground_truth))) / 10
    return {"score": digits + len(solution_str) / 100, "digits": digits, "length": len(solution_str), "acc": float(digits > 0)}
"""  # noqa: E501
OF_ONES_OWN = """
def signs(inputs):
    rewards = inputs.token_level_rewards
    scores = rewards.sum(-1, keepdim=True)
    advantages = (scores - scores.mean()).sign() * inputs.response_mask
    return advantages, advantages

def log_prob_loss(inputs):
    return inputs.reduce(-inputs.advantages * inputs.log_probs), {}
"""
TRAINING = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.optim.lr=2e-3",
    "actor_rollout_ref.rollout.sync_proof.canary_freq=0",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=2",
]
"""Several updates per step, so that ratios leave 1 and losses differ."""
ESTIMATOR, LOSS = "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode"
FURTHER = {
    "gae": ["critic.optim.lr=1e-2", "critic.fsdp_config.dtype=float32"],
    "gdpo": ["algorithm.gdpo_reward_keys=[digits,length]", "algorithm.gdpo_reward_weights=[1.0,0.5]"],
    "clip_cov": [
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.2",
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb=0.0",
    ],
    "dro": ["actor_rollout_ref.actor.policy_loss.dro_beta=0.1"],
    "dppo_tv": ["actor_rollout_ref.actor.clip_ratio=0.01"],
    "dppo_kl": ["actor_rollout_ref.actor.clip_ratio=0.001"],
    "gspo": ["actor_rollout_ref.actor.clip_ratio=3e-4"],
    "luspo": ["actor_rollout_ref.actor.clip_ratio=3e-4"],
    "m2po": ["actor_rollout_ref.actor.policy_loss.m2_threshold=1e-6"],
    "bapo": ["actor_rollout_ref.actor.clip_ratio_c=1.0001"],
    "ipo": ["actor_rollout_ref.actor.policy_loss.ipo_eps=0.001"],
}
VECTORIZED = ("grpo_vectorized", "rloo_vectorized")
CHOICES = [
    *(
        f"{ESTIMATOR}={name}"
        for name in (*ADVANTAGE_ESTIMATORS, "of_ones_own:signs")
        if name not in (*VECTORIZED, "grpo")
    ),
    *(f"{LOSS}={name}" for name in (*LOSS_MODES, "of_ones_own:log_prob_loss") if name != "vanilla"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("algorithms")
    (folder / "reward.py").write_text(REWARD)
    (folder / "of_ones_own.py").write_text(OF_ONES_OWN)
    return folder


def train(task: dict[str, Path], folder: Path, run_folder: Path, *overrides: str) -> list[dict[str, float]]:
    """The metrics of every step that was taken."""
    kept = [
        item for item in run_overrides(task, run_folder) if not item.startswith("trainer.rollout_data_dir")
    ]
    reward = f"reward.custom_reward_function.path={folder / 'reward.py'}"
    command = [sys.executable, "-m", "verl_rc.main_ppo", *kept, reward, *TRAINING, *overrides]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > 0]


def weights(run_folder: Path) -> torch.Tensor:
    state = load_full_state_dict(run_folder / "global_step_2" / "actor")
    return torch.cat([state[name].double().flatten() for name in sorted(state)])


@pytest.fixture(scope="module")
def vanilla_grpo(task: dict[str, Path], folder: Path) -> torch.Tensor:
    train(task, folder, folder / "vanilla")
    return weights(folder / "vanilla")


@pytest.mark.parametrize("choice", CHOICES)
def test_two_steps(
    task: dict[str, Path], folder: Path, tmp_path: Path, vanilla_grpo: torch.Tensor, choice: str
) -> None:
    steps = train(task, folder, tmp_path, choice, *FURTHER.get(choice.rpartition("=")[2], []))
    assert [line["step"] for line in steps] == [1, 2]
    check_names({name for line in steps for name in line} - {"step"})
    for line in steps:
        assert not [name for name, value in line.items() if not math.isfinite(value)]
        assert line["actor/nonfinite_gradients"] == 0
        assert line["actor/grad_norm"] > 0
    found = weights(tmp_path)
    assert bool(found.isfinite().all())
    assert float((found - vanilla_grpo).norm() / vanilla_grpo.norm()) > 1e-6


def test_dynamic_sampling_goes_on_as_if_nothing_had_happened(
    task: dict[str, Path], folder: Path, tmp_path: Path
) -> None:
    """Prompts that were drawn, trained on or not, are used up; a resumed run draws the ones after them."""
    options = [
        "algorithm.filter_groups.enable=True",
        "data.gen_batch_size=3",
        "trainer.total_training_steps=4",
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True",
        "reward.reward_kwargs.overlong_buffer_cfg.len=4",
    ]
    expected = train(task, folder, tmp_path / "whole", *options)
    assert sum(line["training/filter_groups/evicted_samples"] for line in expected) > 0
    assert sum(line["training/filter_groups/discarded_surplus_samples"] for line in expected) > 0
    shutil.copytree(tmp_path / "whole" / "global_step_2", tmp_path / "again" / "global_step_2")
    found = train(task, folder, tmp_path / "again", *options)
    assert [line["step"] for line in found] == [3, 4]
    for one, other in zip(found, expected[2:], strict=True):
        different = [
            name for name in other if one[name] != other[name] and not name.startswith(("timing_", "perf/"))
        ]
        assert not different
