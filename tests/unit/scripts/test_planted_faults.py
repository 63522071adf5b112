"""The matrix of planted faults: every arm is a run that can start, what was run is not run again, and
outcomes are honest."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from planted_faults.faults import ARMS, COMMON, LEFT_OUT, Fault, planted
from planted_faults.held_out import HELD_OUT, RIGHT
from planted_faults.held_out_second import HELD_OUT_2, RIGHT_2
from planted_faults.matrix import lines_of, made_by, named_first, row_of, write_matrix
from planted_faults.runs import DONE, PLANS, TABLES, folder_of, known_run, overrides_of, run_all
from planted_series import COOLER, SETTINGS, SIGNS, wave, write_run
from planted_series import planted as planted_run

from verl_rc.config.load import load_run_config
from verl_rc.health import causes
from verl_rc.insight.run_folder import Part, ReplayedRecord, RunData
from verl_rc.insight.verdict import gap


@pytest.mark.parametrize("arm", PLANS)
def test_every_arm_is_a_run_that_can_start(arm: str) -> None:
    places = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    load_run_config([*overrides_of(arm, 1), *places])


def test_all_faults_of_the_plan_are_planted_or_said_to_be_left_out() -> None:
    assert {fault.number for fault in ARMS.values()} | LEFT_OUT.keys() == set(range(23))


def test_held_out_faults_are_in_no_other_table_and_are_judged_by_causes_that_the_doctor_names() -> None:
    assert HELD_OUT.keys() == RIGHT.keys()
    assert HELD_OUT_2.keys() == RIGHT_2.keys()
    assert len(PLANS) == sum(map(len, TABLES.values()))
    assert {fault.number for fault in TABLES["held-out"].values()} == set(range(101, 109))
    assert {fault.number for fault in TABLES["held-out-second"].values()} == set(range(201, 209))
    assert {fault.number for fault in TABLES["held-out-fourth"].values()} == {0, *range(301, 311)}
    folders = (Path(gap.__file__).parent, Path(causes.__file__).parent)
    rules = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    assert all(f'"{cause}"' in rules for names in [*RIGHT.values(), *RIGHT_2.values()] for cause in names)


def test_what_is_planted_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_FAULT", "top_p:0.95,report_raw")
    assert planted() == {"top_p": "0.95", "report_raw": ""}
    monkeypatch.setenv("PLANTED_FAULT", "")
    assert planted() == {}


def test_a_matrix_goes_on_where_it_was_and_what_did_not_start_is_tried_again(tmp_path: Path) -> None:
    started: list[str] = []
    statuses = {"temperature:0.9": [1, 0], "temperature:0.98": [0]}

    def start(fault: str, overrides: Sequence[str], folder: Path) -> int:
        started.append(fault)
        folder.mkdir(parents=True, exist_ok=True)
        status = statuses[fault].pop(0)
        if status == 0:
            (folder / "metrics.jsonl").write_text('{"step": 1, "actor/grad_norm": 1.0}\n')
        return status

    arms = ["temperature 0.9", "temperature 0.98"]
    assert [run.arm for run in run_all(tmp_path, arms, (1,), start)] == ["temperature 0.98"]
    assert [run.arm for run in run_all(tmp_path, arms, (1,), start)] == ["temperature 0.9"]
    assert started == ["temperature:0.9", "temperature:0.98", "temperature:0.9"]
    assert list(run_all(tmp_path, arms, (1,), start)) == []


def test_a_run_of_other_overrides_is_not_taken_for_this_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "age 1", 2)
    folder.mkdir()
    done = {"exit_status": 0, "seconds": 1.0, "overrides": [], "planted": ""}
    (folder / DONE).write_text(json.dumps(done))
    assert known_run(tmp_path, "age 1", 2) is None


def run_of(**signs: float) -> RunData:
    return planted_run(
        {f"rollout_corr/{name}": wave(value) for name, value in (SIGNS | signs).items()}, SETTINGS
    )


FAULT = Fault(1, ("temperature",))


@pytest.mark.parametrize(
    ("signs", "fault", "outcome"),
    [
        (COOLER, FAULT, "right"),
        (COOLER, Fault(3, ("log-probs rounded",)), "wrong"),
        (COOLER, Fault(0, ("rounding",)), "false alarm"),
        ({}, FAULT, "not seen"),
        ({}, Fault(0, ("rounding",)), "right"),
    ],
)
def test_outcomes(signs: dict[str, float], fault: Fault, outcome: str) -> None:
    assert named_first(run_of(**signs), fault, "").outcome == outcome


def test_a_run_that_its_own_checks_end_has_named_the_fault() -> None:
    fault = Fault(7, (), checks=("LedgerError",))
    assert named_first(run_of(), fault, "LedgerError: the loss must look at …").outcome == "right"
    assert named_first(run_of(), fault, "OSError: disk full").outcome == "not seen"


def test_the_table_and_its_sums(tmp_path: Path) -> None:
    arm = "prompt token missing"
    folder = write_run(
        folder_of(tmp_path, arm, 1), {"actor/grad_norm": wave(1.0), "rollout_corr/k3_kl": wave(1e-3)}
    )
    record = ReplayedRecord(9, 8, 700, 0.25, {"trainer": Part(0.25123456, 0.97)}, {8: 0.01}, {"noise": 0.0})
    (folder / "diagnosis.json").write_text(json.dumps({"replayed": [record.as_json()]}))
    done = {"exit_status": 0, "seconds": 9.0, "overrides": [*COMMON, *ARMS[arm].overrides, "trainer.seed=1"]}
    (folder / DONE).write_text(json.dumps(done | {"planted": ARMS[arm].planted}))
    run = known_run(tmp_path, arm, 1)
    assert run is not None
    row = row_of(run)
    assert row["replayed"][0]["parts"]["trainer"]["size"] == 0.2512
    lines = lines_of([row])
    assert (
        lines[2]
        == "| prompt token missing | 1 | not seen: rounding | right: the trainer scores other inputs or with "
        "noise |"
    )
    assert lines[3].startswith("without replays: 0 right, 0 not separable, 1 not seen, 0 wrong of 1")
    assert lines[4].startswith("with replays: 1 right")


def test_a_matrix_keeps_the_rows_of_runs_whose_folders_are_gone(tmp_path: Path) -> None:
    path, table = tmp_path / "matrix.json", ("age 1", "age 4")
    others = tuple(arm for arm in ARMS if arm not in table)[:1]

    def row(arm: str, seed: int, x: int) -> dict[str, object]:
        return {"arm": arm, "seed": seed, "made_by": made_by(arm, seed), "x": x}

    old = [row(arm, seed, 0) for arm in (*others, "age 4") for seed in (1, 2, 3)]
    old[-1]["made_by"] = "other overrides"
    write_matrix(path, (*others, "age 4"), old)
    found = write_matrix(path, table, [row("age 4", 2, 1), row("age 1", 2, 2)])
    assert [(one["seed"], one["arm"], one["x"]) for one in found] == [
        (1, "age 4", 0),
        (2, "age 1", 2),
        (2, "age 4", 1),
    ]
    assert json.loads(path.read_text())["rows"] == found
