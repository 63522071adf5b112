"""A step that the driver cannot hold is refused before it runs, with its number and the keys."""

import pytest
from planned_runs import config_of

from verl_rc.cli import main
from verl_rc.config.errors import ConfigError
from verl_rc.plan import machine
from verl_rc.plan.driver import driver_bytes, too_many_tokens
from verl_rc.runtime.workers import host

GIVEN = {
    "data.train_batch_size": 1000,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 500,
    "data.max_prompt_length": 1000,
    "data.max_response_length": 3000,
}
TOKENS = 1000 * 8 * 4000
SYNCHRONOUS = (500 << 20) + TOKENS * (160 + 16)


def test_the_longest_responses_of_a_step_and_of_the_groups_that_wait_count() -> None:
    assert driver_bytes(config_of(GIVEN)) == SYNCHRONOUS
    ahead = {
        "actor_rollout_ref.hybrid_engine": False,
        "async_training.staleness_threshold": 2,
        "algorithm.rollout_correction.rollout_is": "token",
    }
    assert driver_bytes(config_of({**GIVEN, **ahead})) == SYNCHRONOUS + 2 * TOKENS * 16


def test_it_is_refused_from_the_byte_on_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run's start and by the doctor, on any cluster: the driver runs here."""
    config = config_of({**GIVEN, "ray_kwargs.ray_init.address": "auto"})
    monkeypatch.setattr(machine, "available_memory", lambda: SYNCHRONOUS)
    machine.refuse_too_little_memory(config)
    (finding,) = machine.check_step(config)
    assert (finding.status, too_many_tokens(config, SYNCHRONOUS)) == ("ok", None)
    monkeypatch.setattr(machine, "available_memory", lambda: SYNCHRONOUS - 1)
    words = r"5\.73 GiB of memory must be free .* 8,000 rows of 4,000 tokens \(32 million\)"
    with pytest.raises(
        ConfigError, match=rf"{words}, got 5\.73 GiB: lower data\.train_batch_size, .*rollout\.n or"
    ):
        machine.refuse_too_little_memory(config)
    (finding,) = machine.check_step(config)
    assert finding.status == "failed"
    assert "8,000 rows of 4,000 tokens" in finding.must
    assert finding.remedy.startswith(
        "lower data.train_batch_size, actor_rollout_ref.rollout.n or data.max_resp"
    )


def test_explain_says_it_after_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 30)
    sizes = ["data.train_batch_size=1024", "actor_rollout_ref.rollout.n=8", "data.max_response_length=4096"]
    files = [
        "data.train_files=unused.parquet",
        "data.val_files=unused.parquet",
        "actor_rollout_ref.model.path=unused",
    ]
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "explain",
                *files,
                *sizes,
                "actor_rollout_ref.actor.ppo_mini_batch_size=256",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            ]
        )
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "= 8192 rows a step" in printed.out
    assert "lower data.train_batch_size" in printed.err
