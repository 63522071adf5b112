"""The real loop as a user starts it: every part real, every metric in the catalogue, nothing left behind."""

import json
from pathlib import Path

import pytest
import yaml
from real_runs import left_over_processes, train
from small_runs import run_overrides

from verl_rc.config.load import load_config
from verl_rc.config.run import RunConfig
from verl_rc.metrics import check_names
from verl_rc.runtime.workers.host import usable_cores

MORE_THAN_CORES = usable_cores() + 1


def test_metrics_of_every_step_are_written_and_known(whole_run: Path) -> None:
    lines = [json.loads(line) for line in (whole_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    names = {name for line in lines for name in line} - {"step"}
    check_names(names)
    for name in (
        "rollout_corr/rollout_is_eff_sample_size",
        "rollout_corr/rollout_rs_seq_sum_k1_masked_fraction",
        "actor/grad_norm",
        "critic/score/mean",
        "response_length/clip_ratio",
        "timing_s/step",
        "perf/overhead_fraction",
    ):
        assert name in lines[2], name
    assert [line["step"] for line in lines if "val-core/digits/acc/mean@1" in line] == [0, 2, 4]


def test_the_trace_has_every_step_and_when_each_process_worked(whole_run: Path) -> None:
    events = json.loads((whole_run / "trace.json").read_text().rstrip(",\n") + "]")
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans if span["name"].startswith("step ")] == [
        f"step {step}" for step in range(5)
    ]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    work = {(names[span["pid"]], span["name"]) for span in spans}
    assert {("driver", "gen"), ("rollout engine 0", "decode"), ("actor rank 0", "update")} <= work


def test_rollouts_are_dumped_with_their_scores(whole_run: Path) -> None:
    samples = [json.loads(line) for line in (whole_run / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(samples) == 4 * 4
    assert {"input", "output", "gts", "score", "step", "acc"} <= set(samples[0])


def test_the_resolved_configuration_loads_back(whole_run: Path) -> None:
    path = whole_run / "resolved_config.yaml"
    again = load_config(RunConfig, ["--config-dir", str(path.parent), "--config-name", path.stem])
    assert again.model_dump(mode="json") == yaml.safe_load(path.read_text())


@pytest.mark.slow
def test_a_reward_function_that_fails_ends_the_run_with_its_sample(
    task: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(**kwargs):\n    raise KeyError('no such answer')\n"
    )
    custom = [
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.val_before_train=False",
    ]
    result = train([*run_overrides(task, tmp_path), *custom])
    assert result.returncode == 1
    assert "the reward function raised KeyError" in result.stderr[-1500:]
    assert not left_over_processes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_length=5", "data.max_prompt_length"),
        (
            "data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=128",
            "data.train_batch_size",
        ),
        (
            f"trainer.n_gpus_per_node={MORE_THAN_CORES} data.train_batch_size={MORE_THAN_CORES} "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={MORE_THAN_CORES}",
            "needs a core",
        ),
    ],
)
def test_impossible_data_or_resources_exit_with_2(
    task: dict[str, Path], tmp_path: Path, override: str, message: str
) -> None:
    result = train([*run_overrides(task, tmp_path), *override.split()])
    assert result.returncode == 2, result.stderr[-2000:]
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not left_over_processes()
