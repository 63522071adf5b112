"""The planted faults: every arm is a run that can start, and what is planted changes what it says alone."""

from pathlib import Path

import pytest
import torch
from planted_series import COOLER, SETTINGS, SIGNS, wave
from planted_series import planted as planted_run
from research import planted_faults
from research.planted_faults import ARMS, COMMON, Fault, PlantedEngine, in_fp8, outcome_of, planted

from verl_rc.algorithm.health.cause_table import CAUSES
from verl_rc.config.load import load_run_config
from verl_rc.records.parts import Answer, Part, Sample


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_run_that_can_start(arm: str) -> None:
    places = ["actor_rollout_ref.model.path=m", "data.train_files=t", "data.val_files=v"]
    load_run_config([*COMMON, *ARMS[arm].overrides, *places])
    assert CAUSES.keys() >= set(ARMS[arm].causes)


def test_what_is_planted_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_FAULT", "top_p:0.95,report_raw")
    assert planted() == {"top_p": "0.95", "report_raw": ""}
    monkeypatch.setenv("PLANTED_FAULT", "")
    assert planted() == {}


@pytest.mark.parametrize(
    ("signs", "fault", "outcome"),
    [
        (COOLER, Fault(("temperature",)), ("named", "temperature")),
        (COOLER, Fault(("log-probs rounded",)), ("wrong", "temperature")),
        (COOLER, Fault((), is_healthy=True), ("false alarm", "temperature")),
        ({}, Fault(("temperature",)), ("not seen", "")),
        ({}, Fault((), is_healthy=True), ("right", "")),
    ],
)
def test_outcomes(
    monkeypatch: pytest.MonkeyPatch, signs: dict[str, float], fault: Fault, outcome: tuple[str, str]
) -> None:
    metrics = {f"rollout_corr/{name}": wave(value) for name, value in (SIGNS | signs).items()}
    monkeypatch.setattr(planted_faults, "read_run", lambda folder: planted_run(metrics, SETTINGS))
    assert outcome_of(fault, Path("run"), 0) == outcome


def test_a_run_that_its_own_checks_end_says_so(tmp_path: Path) -> None:
    (tmp_path / "output.log").write_text("step 1\nverl_rc.LedgerError: the mask must be …\nbye\n")
    assert outcome_of(ARMS["mask shifted"], tmp_path, 1) == (
        "stopped by the run itself",
        "verl_rc.LedgerError: the mask must be …",
    )


def test_a_rounded_cache_holds_what_fp8_can_say() -> None:
    """e4m3 has three bits behind the first one, a smallest number of 2^-9 and a largest of 448; ties go to
    the even one."""
    given = torch.tensor([1.0625, 1.07, -0.3, 500.0, -1e4, 2.0**-9, 2.0**-11], dtype=torch.bfloat16)
    assert in_fp8(given).tolist() == [1.0, 1.125, -0.3125, 448.0, -448.0, 2.0**-9, 0.0]


def engine_with(fault: str) -> PlantedEngine:
    engine = PlantedEngine.__new__(PlantedEngine)
    name, _, value = fault.partition(":")
    engine._planted, engine._chance = {name: value}, torch.Generator().manual_seed(7)
    engine._held, engine._rank = {}, 2
    return engine


@pytest.mark.parametrize(
    ("fault", "tokens", "log_probs"),
    [
        ("", False, False),
        ("rounded_log_probs", False, True),
        ("log_prob_floor:-0.1", False, True),
        ("shifted_log_probs", False, True),
        ("changed_tokens", True, False),
        ("stripped_stop", True, True),
    ],
)
def test_what_an_engine_misreports_leaves_the_answers_of_tools(
    fault: str, tokens: bool, log_probs: bool
) -> None:
    turn = Part(torch.full([6000], 20, dtype=torch.int32), torch.full([6000], -0.123), 3)
    answer = Answer(torch.tensor([7, 8], dtype=torch.int32))
    first, kept, last = engine_with(fault)._misreported(Sample(0, [turn, answer, turn], True)).parts
    assert kept is answer
    assert torch.equal(last.token_ids, turn.token_ids) != tokens
    assert torch.equal(last.log_probs, turn.log_probs) != log_probs
    assert len(first.token_ids) == 6000  # its end is no end of the response
    assert len(last.token_ids) == 6000 - (fault == "stripped_stop")


@pytest.mark.parametrize(
    ("fault", "loaded"),
    [
        ("", [0.0, 1.0, 2.0, 2.0]),
        ("skip_every_sync", [0.0, 0.0, 0.0, 0.0]),
        ("skip_one_sync", [0.0, 1.0, 1.0, 2.0]),
        ("stale_second_engine", [0.0, 0.0, 0.0, 0.0]),
        ("half_a_tensor", [0.0, 0.5, 1.0, 1.0]),
    ],
)
def test_updates_that_an_engine_misses(fault: str, loaded: list[float]) -> None:
    engine, found = engine_with(fault), []
    for version, value in ((0, 0.0), (7, 1.0), (8, 2.0), (9, 2.0)):
        sent = [("layers.0.gate_proj.weight", torch.full([4, 2], value))]
        ((_, tensor),) = engine._as_loaded(iter(sent), version)
        found.append(float(tensor.mean()))
    assert found == loaded
