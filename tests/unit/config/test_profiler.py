"""The steps, ranks and engines that are profiled, by this schema's keys and by verl's."""

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.profiler import ProfilerConfig
from verl_rc.trainer.profiling import require_steps

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref", "rollout"))
RUN = [
    *("data.train_files=a.parquet", "data.val_files=b.parquet", "actor_rollout_ref.model.path=m"),
    *("actor_rollout_ref.actor.use_dynamic_bsz=True", "trainer.n_gpus_per_node=2"),
    *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"),
]
ON = ["global_profiler.tool=torch", "global_profiler.steps=[2]"]


def profiler_of(*overrides: str) -> ProfilerConfig:
    return load_run_config([*RUN, *overrides]).global_profiler


def test_each_step_has_a_trace_or_steps_that_follow_each_other_share_one() -> None:
    single = ProfilerConfig(tool="torch", steps=[1, 2, 5])
    assert [single.window(step, 9) for step in range(1, 7)] == [(1, 1), (2, 2), None, None, (5, 5), None]
    joined = single.model_copy(update={"profile_continuous_steps": True})
    assert [joined.window(step, 9) for step in (1, 2, 3, 5)] == [(1, 2), (1, 2), None, (5, 5)]
    assert joined.window(1, last_step=1) == (1, 1)  # the run ends inside of the window
    assert ProfilerConfig(steps=[1]).window(1, 9) is None


@pytest.mark.parametrize(
    ("overrides", "ranks", "engines"),
    [
        ([], [0], []),
        ([f"{ACTOR}.enable=True", f"{ACTOR}.ranks=[1]"], [1], []),
        (
            [f"{ACTOR}.enable=True", f"{ACTOR}.ranks=[1]", f"{REF}.enable=True", f"{REF}.ranks=[0]"],
            [0, 1],
            [],
        ),
        ([f"{ACTOR}.enable=False", f"{ACTOR}.ranks=[1]"], [0], []),
        ([f"{REF}.enable=True", f"{REF}.all_ranks=True", f"{ACTOR}.ranks=[0]"], "all", []),
        ([f"{ROLLOUT}.enable=True", f"{ROLLOUT}.all_ranks=True"], [0], "all"),
    ],
)
def test_verls_roles_choose_ranks_and_engines(overrides: list[str], ranks: object, engines: object) -> None:
    profiler = profiler_of(*ON, *overrides)
    assert (profiler.ranks, profiler.engines) == (ranks, engines)


def test_verls_roles_mean_nothing_without_a_tool() -> None:
    assert profiler_of(f"{ACTOR}.enable=True", f"{ACTOR}.ranks=[1]", f"{ACTOR}.all_ranks=False").ranks == [0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["global_profiler.tool=torch"], "needs global_profiler.steps"),
        ([*ON, "global_profiler.ranks=[2]"], r"ranks must be below the run's 2 ranks, got \[2\]"),
        ([*ON, "global_profiler.engines=[7]"], r"engines must be below the run's 1 engines, got \[7\]"),
        ([*ON, f"{ACTOR}.enable=True"], "name none: write ranks"),
        ([*ON, f"{ACTOR}.enable=True", f"{ACTOR}.tool_config.torch.schedule.active=2"], "recorded whole"),
        ([*ON, f"{ACTOR}.enable=True", f"{ACTOR}.tool_config.torch.contents=[stack]"], "what the CPU and"),
        (["global_profiler.tool=torch", "global_profiler.steps=[0]"], "greater than or equal to 1"),
    ],
)
def test_a_profiler_of_nothing_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profiler_of(*overrides)


def test_a_step_that_never_comes_is_refused_and_one_that_is_over_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    profiler = ProfilerConfig(tool="torch", steps=[3, 4])
    with pytest.raises(
        ConfigError, match=r"must be among the run's 3 steps, got \[3, 4\].*total_training_steps"
    ):
        require_steps(profiler, total_steps=3, steps_done=0)
    with caplog.at_level("INFO", logger="verl_rc"):
        require_steps(profiler, total_steps=4, steps_done=3)
        assert not caplog.messages
        require_steps(profiler, total_steps=4, steps_done=4)
    assert caplog.messages == ["global_profiler.steps=[3, 4]: all of them are done, nothing is profiled"]
