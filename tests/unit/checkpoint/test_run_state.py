import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_rc.checkpoint.errors import CheckpointError
from verl_rc.checkpoint.run_state import RunState, check_same_model
from verl_rc.data.epoch_batches import EpochBatches

CONFIG: dict[str, Any] = {
    "data": {"train_batch_size": 3, "shuffle": True, "seed": 1, "train_files": ["a.parquet"]},
    "trainer": {"seed": 1, "total_epochs": 2, "logger": ["console"], "n_gpus_per_node": 2},
    "actor_rollout_ref": {
        "model": {"path": "here", "lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "actor": {"optim": {"lr": 1e-5}},
        "rollout": {"n": 4},
    },
}


def build_loader(num_workers: int = 0) -> "StatefulDataLoader[list[int]]":
    with warnings.catch_warnings(action="ignore"):
        batches = EpochBatches(10, 3, seed=1, shuffle=True)
        return StatefulDataLoader(list(range(100, 110)), batch_sampler=batches, collate_fn=list, num_workers=num_workers)


def state_after_five_batches() -> RunState:
    loader = build_loader()
    served = list(loader)
    iterator = iter(loader)
    served += [next(iterator), next(iterator)]
    assert len(served) == 5
    return RunState(
        step=5,
        loader=loader.state_dict(),
        control={"kl_coef": 0.1 + 0.2, "threshold": None},
        gap_limits={"rollout": 0.25, "canary": None},
        skipped_in_a_row=1,
        tracker_run_id="abc",
        num_ranks=2,
        config=CONFIG,
    )


def test_round_trip(tmp_path: Path) -> None:
    state = state_after_five_batches()
    state.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.pt", "run_state.json"]
    assert RunState.load(tmp_path) == state


def test_the_loader_goes_on_where_it_stood(tmp_path: Path) -> None:
    whole = build_loader()
    expected = [batch for _ in range(3) for batch in whole][5:]
    state_after_five_batches().save(tmp_path)
    resumed = build_loader()
    resumed.load_state_dict(RunState.load(tmp_path).loader)
    assert [batch for _ in range(2) for batch in resumed] == expected
    assert len(expected) == 4


def test_nothing_but_json_is_written(tmp_path: Path) -> None:
    state = state_after_five_batches()
    with pytest.raises(ValueError, match="JSON compliant"):
        dataclasses.replace(state, control={"kl_coef": math.nan}).save(tmp_path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        dataclasses.replace(state, config={"folder": tmp_path}).save(tmp_path)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "run_state.json").unlink(), "must hold run_state.json, but .* is missing"),
        (lambda folder: (folder / "data.pt").unlink(), "must hold data.pt, but .* is missing"),
        (lambda folder: (folder / "run_state.json").write_text('{"step": '), "must be a JSON file"),
        (lambda folder: (folder / "run_state.json").write_bytes(b"\xff"), "must be a JSON file"),
        (lambda folder: (folder / "run_state.json").write_text("[1]"), "must hold a JSON object, got list"),
        (lambda folder: (folder / "data.pt").write_bytes(b"PK"), "must hold a loader's state, but reading it gave"),
        (lambda folder: (folder / "data.pt").write_bytes(b""), "must hold a loader's state, but reading it gave"),
        (lambda folder: edit(folder / "run_state.json", format_version=2), "must have format version 1, got 2"),
        (lambda folder: edit(folder / "run_state.json", colour="red"), r"missing: \[\], unknown: \['colour'\]"),
    ],
)
def test_everything_that_can_be_wrong_has_one_message(tmp_path: Path, damage: Any, said: str) -> None:
    state_after_five_batches().save(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=said) as caught:
        RunState.load(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint must be a folder"):
        RunState.load(tmp_path / "nowhere")


def changed(key: str, value: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(json.dumps(CONFIG))
    section = tree
    *path, leaf = key.split(".")
    for part in path:
        section = section[part]
    section[leaf] = value
    return tree


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
        check_same_model(CONFIG, changed(key, given))
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
    check_same_model(CONFIG, changed(key, given))


def test_all_differences_are_named_at_once() -> None:
    config = changed("data.seed", 2)
    config["trainer"]["seed"] = 2
    with pytest.raises(CheckpointError, match=r"data\.seed was 1, now it is 2; trainer\.seed was 1, now it is 2"):
        check_same_model(CONFIG, config)


def test_keys_that_one_side_does_not_know_are_not_compared() -> None:
    without = changed("data.seed", 1)
    del without["actor_rollout_ref"]["model"], without["data"]["seed"]
    check_same_model(CONFIG, without)
    check_same_model(without, CONFIG)


def test_a_checkpoint_from_before_guards_were_saved_has_them_at_zero(tmp_path: Path) -> None:
    state_after_five_batches().save(tmp_path)
    path = tmp_path / "run_state.json"
    plain = json.loads(path.read_text())
    del plain["reward_watch"], plain["nonfinite_in_a_row"]
    path.write_text(json.dumps(plain))
    assert RunState.load(tmp_path) == state_after_five_batches()
