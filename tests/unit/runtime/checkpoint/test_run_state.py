import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import small_run_config

from verl_rc.algorithm.health.ranges import CauseEpisode, CauseHistory, HealthHistory
from verl_rc.algorithm.health.run_limits import FailedGroups, LeftOutUpdates, RewardHistory, StepScores
from verl_rc.algorithm.ppo.control import ControlState
from verl_rc.algorithm.supply.group_book import BookState, GroupTotals
from verl_rc.algorithm.supply.step_time import WaitTotals
from verl_rc.config.schema import public_values, value_at
from verl_rc.records.dataset import EpochBatches
from verl_rc.runtime.checkpoint import run_state
from verl_rc.runtime.checkpoint.run_state import (
    FIXED_KEYS,
    OPEN_GROUP_KEYS,
    RunState,
    SavedRun,
    SupplyState,
    check_settings,
    state_under,
)
from verl_rc.runtime.checkpoint.store import CheckpointError

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 3, "shuffle": True, "seed": 1, "train_files": ["a.parquet"]},
    "trainer": {"seed": 1, "total_epochs": 2, "logger": ["console"], "n_gpus_per_node": 2},
    "actor_rollout_ref": {
        "model": {"path": "here", "lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "actor": {"optim": {"lr": 1e-5}},
        "rollout": {"n": 4},
    },
}


SUPPLY = SupplyState(
    BookState(
        4,
        10,
        {"trained": GroupTotals(8, 70), "filtered": GroupTotals(1, 8), "stale": GroupTotals(1, 9)},
        balance=7,
    ),
    failed=FailedGroups((3,), "no answer"),
    drawn=((1, 5), (1, 2)),
    groups=lambda: {"groups": [], "token_ids": torch.tensor([3], dtype=torch.int32)},
    filtered_since_batch=3,
    waits=WaitTotals(4, 40.5, 0.1 + 0.2, 9.75),
    is_length_alert_sent=True,
)


def after_five_batches() -> SavedRun:
    """A state of which no field is what it is in the beginning."""
    state = RunState(
        step=5,
        prompts=EpochBatches(10, 3, seed=1, shuffle=True).state_after(5),
        supply=SUPPLY,
        control=ControlState(kl_coef=0.1 + 0.2, rejection_threshold=1.5, entropy_coeff=0.002),
        rollout_gap_limit=0.25,
        canary_gap_limit=1 / 3,
        left_out=LeftOutUpdates(skipped=1, nonfinite_actor=2, nonfinite_critic=3),
        rewards=RewardHistory((StepScores(8, 4.1, 3.9), StepScores(8, 4.0, 4.0)), best=0.7),
        health=HealthHistory(
            {"rollout_corr/kl": 2},
            {"rollout_corr/k3_kl": 4},
            CauseHistory({"temperature": CauseEpisode(3, 5, is_told=True)}, (0.1 + 0.2, 0.03)),
        ),
        tracker_run_id="abc",
    )
    return SavedRun(state, config=CONFIG, num_ranks=2)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every number, text and None in a tree of records, mappings and sequences, by its place."""
    if dataclasses.is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if callable(value):
        value = value()
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        return {path: value}
    return {
        place: leaf for name, part in value.items() for place, leaf in leaves(part, f"{path}.{name}").items()
    }


def test_a_checkpoint_holds_every_leaf_of_the_state(tmp_path: Path) -> None:
    saved = after_five_batches()
    beginning, now = leaves(RunState()), leaves(saved.state)
    assert not [place for place in beginning if place in now and now[place] == beginning[place]]
    saved.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checksums.json",
        "data.pt",
        "groups.pt",
        "run_state.json",
    ]
    loaded = SavedRun.load(tmp_path)
    assert leaves(loaded) == leaves(saved)


def test_nothing_but_json_is_written(tmp_path: Path) -> None:
    saved = after_five_batches()
    with pytest.raises(ValueError, match="JSON compliant"):
        SavedRun(dataclasses.replace(saved.state, rollout_gap_limit=math.nan), CONFIG, 1).save(tmp_path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        dataclasses.replace(saved, config={"folder": tmp_path}).save(tmp_path)


def test_a_synchronous_run_has_no_file_of_groups(tmp_path: Path) -> None:
    saved = after_five_batches()
    synchronous = dataclasses.replace(saved, state=dataclasses.replace(saved.state, supply=None))
    synchronous.save(tmp_path)
    assert not (tmp_path / "groups.pt").exists()
    assert SavedRun.load(tmp_path) == synchronous


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_state(folder: Path, without: str = "", **changes: Any) -> None:
    path = folder / "run_state.json"
    state = {**json.loads(path.read_text())["state"], **changes}
    edit(path, state={name: value for name, value in state.items() if name != without})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "run_state.json").unlink(), "must hold run_state.json, but .* is missing"),
        (lambda folder: (folder / "data.pt").unlink(), "must hold data.pt, but .* is missing"),
        (lambda folder: (folder / "groups.pt").unlink(), "must hold groups.pt, but .* is missing"),
        (lambda folder: (folder / "run_state.json").write_text('{"step": '), "must be a JSON file"),
        (lambda folder: (folder / "run_state.json").write_bytes(b"\xff"), "must be a JSON file"),
        (lambda folder: (folder / "run_state.json").write_text("[1]"), "must hold a JSON object, got list"),
        (lambda folder: (folder / "data.pt").write_bytes(b"PK"), r"data\.pt must have \d+ bytes, got 2"),
        (
            lambda folder: edit(folder / "run_state.json", format_version=10, written_by="verl_rc 0.9"),
            r"must have format 9 for verl_rc \S+, got format 10 of verl_rc 0\.9\. Resume with the release "
            r"that wrote it, or start anew",
        ),
        (lambda folder: edit(folder / "run_state.json", format_version=3), r"got format 3 of verl_rc \S+\. "),
        (
            lambda folder: (folder / "run_state.json").write_text('{"format_version": 1, "step": 20}'),
            r"got format 1 of an unknown release\. Resume with the release that wrote it",
        ),
        (lambda folder: edit(folder / "run_state.json", format_version=None), "got format None of verl_rc"),
        (
            lambda folder: edit_state(folder, step="five"),
            r"hold the state of a run, but: step: .* got 'five'",
        ),
        (lambda folder: edit_state(folder, colour="red"), "colour: Unexpected keyword argument, got 'red'"),
        (lambda folder: edit_state(folder, health=None), "health: "),
        (lambda folder: edit_state(folder, without="rewards"), r"missing: \['rewards'\]"),
        (
            lambda folder: edit(folder / "run_state.json", colour="red"),
            r"missing: \[\], unknown: \['colour'\]",
        ),
    ],
)
def test_everything_that_can_be_wrong_has_one_message(tmp_path: Path, damage: Any, said: str) -> None:
    after_five_batches().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=said) as caught:
        SavedRun.load(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint must be a folder"):
        SavedRun.load(tmp_path / "nowhere")


def changed(key: str, value: Any, config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json.dumps(config))
    section = tree
    *path, leaf = key.split(".")
    for part in path:
        section = section[part]
    section[leaf] = value
    return tree


def saved_run(state: RunState | None = None, config: dict[str, Any] = CONFIG) -> SavedRun:
    return SavedRun(state or RunState(), config, 2)


@pytest.mark.parametrize(
    ("key", "saved", "given"),
    [
        ("data.train_batch_size", 3, 6),
        ("data.shuffle", True, False),
        ("data.seed", 1, 2),
        ("trainer.seed", 1, 2),
        ("actor_rollout_ref.rollout.n", 4, 8),
        ("actor_rollout_ref.model.lora_rank", 4, 0),
        ("actor_rollout_ref.model.lora_alpha", 8, 16),
        ("actor_rollout_ref.model.target_modules", "all-linear", ["q_proj"]),
    ],
)
def test_what_may_not_change(key: str, saved: Any, given: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_settings(saved_run(), changed(key, given))
    assert f"{key} was {saved!r}, now it is {given!r}" in str(caught.value)
    assert "trainer.resume_mode=disable" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("actor_rollout_ref.model.path", "there"),
        ("actor_rollout_ref.actor.optim.lr", 1e-6),
        ("data.train_files", ["b.parquet"]),
        ("trainer.total_epochs", 3),
        ("trainer.logger", []),
        ("trainer.n_gpus_per_node", 1),
    ],
)
def test_what_may_change(key: str, given: Any) -> None:
    check_settings(saved_run(RunState(supply=SUPPLY)), changed(key, given))


def test_all_differences_are_named_at_once() -> None:
    config = changed("data.seed", 2)
    config["trainer"]["seed"] = 2
    with pytest.raises(
        CheckpointError, match=r"data\.seed was 1, now it is 2; trainer\.seed was 1, now it is 2"
    ):
        check_settings(saved_run(), config)


def test_keys_that_one_side_does_not_know_are_not_compared() -> None:
    without = changed("data.seed", 1)
    del without["actor_rollout_ref"]["model"], without["data"]["seed"]
    check_settings(saved_run(), without)
    check_settings(saved_run(config=without), CONFIG)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("actor_rollout_ref.rollout.temperature", 0.6),
        ("actor_rollout_ref.rollout.top_p", 0.9),
        ("actor_rollout_ref.rollout.environment.arguments", {"difficulty": 3}),
        ("actor_rollout_ref.rollout.environment.name", "my_module:Game"),
        ("actor_rollout_ref.exact", True),
    ],
)
def test_what_may_not_change_while_groups_are_open(key: str, given: Any) -> None:
    config = public_values(small_run_config(Path("/models/here")))
    groups = {"groups": [{}, {}], "token_ids": torch.zeros(0)}
    open_groups = RunState(supply=dataclasses.replace(SUPPLY, groups=lambda: groups))
    other = changed(key, given, config)
    with pytest.raises(
        CheckpointError, match=rf"holds 2 groups that were sampled ahead .*: {key} was .*, now"
    ):
        check_settings(saved_run(open_groups, config), other)
    check_settings(saved_run(open_groups, config), config)
    check_settings(saved_run(RunState(supply=SUPPLY), config), other)
    check_settings(saved_run(config=config), other)


MEASURED = after_five_batches().state
GAP = {"rollout_gap_limit": None, "canary_gap_limit": None, "health": HealthHistory()}
CONTROL = MEASURED.control


@pytest.mark.parametrize(
    ("key", "given", "begins_anew"),
    [
        ("actor_rollout_ref.rollout.quantization", "fp8_per_channel", GAP),
        ("actor_rollout_ref.actor.fsdp_config.dtype", "bfloat16", GAP),
        ("actor_rollout_ref.rollout.temperature", 0.6, GAP),
        ("reward.custom_reward_function.path", "mine.py", {"rewards": RewardHistory()}),
        ("reward.custom_reward_function.reward_kwargs", {"bonus": 1}, {"rewards": RewardHistory()}),
        ("algorithm.kl_ctrl.kl_coef", 0.5, {"control": dataclasses.replace(CONTROL, kl_coef=None)}),
        (
            "algorithm.rollout_correction.rollout_rs_threshold",
            3.0,
            {"control": dataclasses.replace(CONTROL, rejection_threshold=None)},
        ),
        ("actor_rollout_ref.actor.optim.lr", 1e-6, {}),
        ("reward.num_workers", 3, {}),
        ("data.dataloader_num_workers", 3, {}),
    ],
)
def test_what_was_measured_under_another_setting_begins_anew(
    key: str, given: Any, begins_anew: dict[str, Any]
) -> None:
    config = public_values(small_run_config(Path("/models/here")))
    state, messages = state_under(saved_run(MEASURED, config), changed(key, given, config))
    assert state == dataclasses.replace(MEASURED, **begins_anew)
    assert len(messages) == bool(begins_anew)
    assert all(f" as in a new run, because {key} was " in message for message in messages)
    assert state_under(saved_run(RunState(), config), changed(key, given, config)) == (RunState(), [])


def test_every_setting_of_a_rule_of_resuming_exists() -> None:
    known = public_values(small_run_config(Path("/models/here")))
    keys = [
        *FIXED_KEYS,
        *OPEN_GROUP_KEYS,
        *(key for keys in run_state._MEASURED_UNDER.values() for key in keys),
    ]
    assert [key for key in keys if value_at(known, key, run_state._ABSENT) is run_state._ABSENT] == []
