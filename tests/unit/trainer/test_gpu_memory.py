"""On every GPU the processes of a run fit together at every moment, and what would break that is seen."""

from pathlib import Path
from typing import Any

import pytest
from gpu_ledger import CAPACITY, Ledger, MemoryFaultError, train_on_ledger

from verl_rc.config.errors import ConfigError
from verl_rc.runtime.distributed.child_process import ProcessLostError
from verl_rc.runtime.weight_sync.sender import WeightSender
from verl_rc.runtime.workers.policy_worker import PolicyWorker
from verl_rc.runtime.workers.sharded_model import ShardedModel
from verl_rc.trainer import setup
from verl_rc.trainer.cluster.engine_group import EngineGroup

ACTOR, CRITIC, REF = (
    f"{role}.fsdp_config" for role in ("actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref")
)
ROLLOUT = "actor_rollout_ref.rollout"
ALL_ROLES = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=True")
OFFLOADED = (f"{ACTOR}.param_offload=True", f"{ACTOR}.optimizer_offload=True")
ALL_OFFLOADED = (
    *ALL_ROLES,
    *OFFLOADED,
    f"{CRITIC}.param_offload=True",
    f"{CRITIC}.optimizer_offload=True",
    f"{REF}.param_offload=True",
)
FULL = f"{ROLLOUT}.gpu_memory_utilization=0.9"
"""Leaves an offloaded rank 7.9 GiB beside an engine: its context, and a gathered layer or a bucket."""
FULLER = f"{ROLLOUT}.gpu_memory_utilization=0.915"
"""Leaves 6.7: room for one context beside a role's weights and a gathered layer, not for three."""


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ALL_ROLES,
        OFFLOADED,
        (*OFFLOADED, FULL),
        (*ALL_OFFLOADED, FULLER),
        (f"{ROLLOUT}.tensor_model_parallel_size=2",),
        (
            "async_training.trigger_parameter_sync_step=2",
            "algorithm.rollout_correction.preset=decoupled_token_is",
        ),
    ],
    ids=[
        "7B",
        "all roles",
        "offloaded",
        "offloaded, full",
        "all offloaded",
        "tensor parallel",
        "two steps a publication",
    ],
)
def test_a_run_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]) -> None:
    ledger = train_on_ledger(tmp_path, monkeypatch, *overrides)
    assert 40 < ledger.peak <= CAPACITY
    assert ledger.events.count("actor rank 7 update") == 2


@pytest.mark.parametrize(
    "overrides",
    # A bucket stays with the rank whose engine died with it.
    [
        (*OFFLOADED, f"{ROLLOUT}.gpu_memory_utilization=0.87"),
        (*ALL_ROLES, f"{ROLLOUT}.gpu_memory_utilization=0.58"),
    ],
    ids=["offloaded", "all roles"],
)
@pytest.mark.parametrize(
    "death",
    [
        ("collect", 1),
        ("collect", 2),
        ("load_bucket", 2),
        ("load_bucket", 5),
        ("sleep", 2),
        ("finish_update", 2),
    ],
    ids=lambda death: f"{death[0]} {death[1]}",
)
def test_an_engine_is_lost_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], death: tuple[str, int]
) -> None:
    ledger = Ledger()
    ledger.dies = ("rollout engine 3", *death)
    train_on_ledger(tmp_path, monkeypatch, *overrides, ledger=ledger)
    assert ledger.dies is None
    assert ledger.events.count("rollout engine 3 starts") == 2
    assert ledger.peak <= CAPACITY
    assert ledger.events.count("actor rank 7 update") == 2


def test_a_rank_that_dies_takes_all_its_roles_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger()
    ledger.dies = ("reference rank 5", "compute_log_probs", 1)
    with pytest.raises(ProcessLostError) as caught:
        train_on_ledger(tmp_path, monkeypatch, *ALL_ROLES, ledger=ledger)
    together = "the process of actor, critic and reference rank 5"
    assert str(caught.value).startswith(
        f"reference rank 5 died while it was to compute_log_probs ({together}): "
    )


def test_ranks_load_before_engines_start_and_engines_sleep_before_a_rank_lends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = train_on_ledger(tmp_path, monkeypatch, *ALL_ROLES).events
    starts = [event.removesuffix(" starts") for event in events if event.endswith(" starts")]
    assert starts[:8] == [
        f"actor, critic and reference rank {rank}" for rank in range(8)
    ]  # one process for a rank of each
    assert starts[8:] == [f"rollout engine {engine}" for engine in range(8)]
    of_engine = [
        event.removeprefix("rollout engine 5 ") for event in events if event.startswith("rollout engine 5 ")
    ]
    assert of_engine[:5] == ["starts", "sleep", "device_keys", "wake_up", "begin_update"]


def build_engines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines start when they are told to import, before the ranks load."""
    began: dict[str, Any] = {}
    build = EngineGroup.build

    def prepare(group: EngineGroup, options: Any) -> list[Any]:
        began["building"] = build(group, options, 1.0)
        return []

    monkeypatch.setattr(setup, "_check_what_is_named", lambda config: began.update(config=config))
    monkeypatch.setattr(EngineGroup, "prepare", prepare)
    monkeypatch.setattr(EngineGroup, "build", lambda *_: began["building"])


def nothing_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps all that was freed."""
    monkeypatch.setattr(Ledger, "empty_cache", lambda ledger: None)


def given_back_when_offloaded_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks give back what they freed when they offload something, as they did."""
    offload = ShardedModel._offload

    def old(model: ShardedModel) -> None:
        if model._fsdp.param_offload or getattr(model._fsdp, "optimizer_offload", False):
            offload(model)

    monkeypatch.setattr(ShardedModel, "_offload", old)


def engines_stay_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """From their start to the first step."""
    sleep, calls = EngineGroup.sleep, []

    def second(group: EngineGroup) -> None:
        calls.append(group)
        if len(calls) > 1:
            sleep(group)

    monkeypatch.setattr(EngineGroup, "sleep", second)


def rested_before_the_bucket_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(rank: PolicyWorker, interrupted: bool) -> Any:
        rank._weights_in_use.close()
        return rank._sender.release(interrupted)

    monkeypatch.setattr(PolicyWorker, "release_bucket", release)


PLANTED = {
    "B1: engines start while ranks load": (
        build_engines_at_once,
        (),
        "changed while rollout engine 0 started",
    ),
    "B3: nothing is given back": (nothing_is_given_back, (), "rollout engine 0 is refused|is out of memory"),
    "B3: engines are awake at the first publication": (
        engines_stay_awake,
        (*OFFLOADED, FULL),
        "is out of memory",
    ),
    "B4: several roles keep what they freed": (
        given_back_when_offloaded_only,
        ALL_ROLES,
        "is refused|is out of memory",
    ),
}


@pytest.mark.parametrize(("plant", "overrides", "fault"), PLANTED.values(), ids=PLANTED)
def test_what_broke_runs_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any, overrides: tuple[str, ...], fault: str
) -> None:
    """By what happens: memory runs out, or an engine measures wrongly."""
    plant(monkeypatch)
    ledger = Ledger()
    ledger.rule = False
    with pytest.raises(MemoryFaultError, match=fault):
        train_on_ledger(tmp_path, monkeypatch, *overrides, ledger=ledger)


@pytest.mark.parametrize(
    ("plant", "overrides"),
    [
        (given_back_when_offloaded_only, ()),
        (rested_before_the_bucket_is_freed, OFFLOADED),
        (nothing_is_given_back, OFFLOADED),
    ],
)
def test_what_is_not_given_back_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any, overrides: tuple[str, ...]
) -> None:
    """By the rule, also where memory suffices."""
    plant(monkeypatch)
    with pytest.raises(
        MemoryFaultError, match=r"actor rank 0 keeps \d+\.\d GiB that it freed, beside rollout engine 0"
    ):
        train_on_ledger(tmp_path, monkeypatch, *overrides)


def test_a_replaced_engine_is_refused_beside_ranks_that_keep_what_they_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5."""
    ledger = Ledger()
    ledger.rule, ledger.dies = False, ("rollout engine 3", "sleep", 2)
    given_back_when_offloaded_only(monkeypatch)
    with pytest.raises(MemoryFaultError, match="rollout engine 3 is refused"):
        train_on_ledger(tmp_path, monkeypatch, ledger=ledger)


def test_a_rank_lends_on_its_gpu_although_its_weights_rest_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: the device of the weights, when asked for between updates, is the host, where no engine is."""
    ledger = Ledger()
    monkeypatch.setattr(
        WeightSender,
        "device_key",
        lambda _: "GPU" if "actor's weights" in ledger.current.parts else "cpu@host",
    )
    with pytest.raises(ConfigError, match="needs every engine worker on the device of a trainer rank"):
        train_on_ledger(tmp_path, monkeypatch, *OFFLOADED, ledger=ledger)
