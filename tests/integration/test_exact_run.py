"""A whole run in exact mode, with weights that change under running responses: every token is that of its own
weights, to the bit; and a trainer that rounds in one place ends the run."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from real_runs import of_folder, train
from small_runs import run_overrides

from verl_rc.config.run import RunConfig
from verl_rc.insight.replay.rows import read_rows
from verl_rc.insight.replay.trainer import TrainerReplay
from verl_rc.insight.replay.weights import SavedWeights, config_of
from verl_rc.records.batches import TokenBatch
from verl_rc.records.token_records.token_record import FOLDER
from verl_rc.runtime.exact import EXACT_ENVIRONMENT

EXACT = [
    "actor_rollout_ref.exact=True",
    "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
]
PARTIAL = [
    "algorithm.rollout_correction.preset=decoupled_token_is",
    "async_training.staleness_threshold=1",
    "async_training.partial_rollout=True",
    "async_training.deterministic_steps=5",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.actor.checkpoint.async_save=False",
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "trainer.token_records.freq=1",
    "trainer.token_records.full_freq=1",
]


def scores_of(config: RunConfig, weights: str, tokens: TokenBatch) -> torch.Tensor:
    return TrainerReplay(config, weights).score(tokens)


def test_every_token_of_a_partial_rollout_is_that_of_its_own_weights(
    task: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in EXACT_ENVIRONMENT["cpu"].items():
        monkeypatch.setenv(name, value)
    result = train([*run_overrides(task, tmp_path), *EXACT, *PARTIAL, *of_folder(tmp_path)])
    assert result.returncode == 0, result.stderr[-3000:]
    config, continued, compared = config_of(tmp_path), 0, set[int]()
    saved = SavedWeights(config, tmp_path, tmp_path / "exported")
    # This process has multiplied before: its libraries are not held to one order of sums any more.
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        for rows in read_rows(tmp_path, most_rows=100, first_step=1, last_step=3):
            assert rows.train is not None
            young = rows.versions == rows.step - 1
            assert torch.equal(rows.train[young], rows.rollout[young])
            continued += int((young & (rows.versions[:, :1] < rows.step - 1)).sum())
            for version in set(rows.versions.unique().tolist()) - {-1}:
                here = rows.versions == version
                scores = fresh.submit(scores_of, config, saved.folder(version), rows.tokens).result()
                assert torch.equal(scores[here], rows.rollout[here]), (rows.step, version)
                compared.add(rows.step - 1 - version)
    assert compared == {0, 1}, f"{tmp_path / FOLDER} must hold tokens of both ages"
    assert continued > 50


@pytest.mark.slow
def test_a_trainer_that_rounds_in_one_place_ends_the_run(
    task: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACTOR_WORKER", "rounding_worker:RoundingPolicyWorker")
    result = train([*run_overrides(task, tmp_path), *EXACT, *of_folder(tmp_path)])
    assert result.returncode == 1
    said = r"in exact mode the trainer's log-probs must be those of the engine, but "
    assert said in result.stderr, result.stderr[-3000:]
    assert f"verl-rc exact {task['model']} --dtype bfloat16" in result.stderr
