"""Token records of runs with formulas for processes: at which steps, of which rows, and that they hold what
was trained on."""

import dataclasses
import hashlib
import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from formula_run import live
from planned_runs import EMPTY_ROW, INPUTS, ROWS, config_of, driver_inputs, step_inputs

from verl_rc.algorithm.ppo.control import Control
from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.config.run import RunConfig
from verl_rc.correction import compute_rollout_correction
from verl_rc.records.batches import PolicyEvaluations
from verl_rc.records.dataset import PromptRow
from verl_rc.records.episode import Reply
from verl_rc.records.pictures import Pictures
from verl_rc.records.scored_batch import ScoredBatch
from verl_rc.records.token_records.token_parquet import read_record, record_files
from verl_rc.records.token_records.token_record import FOLDER, PIECES, TOKEN_CLASSES, TokenRecord, noise_scale
from verl_rc.runtime.checkpoint import RunState, SavedRun
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import Step, StepRecord
from verl_rc.trainer.token_records import ChosenRows, TokenRecorder

TOLD = [{"role": "user", "content": "h"}]


pytestmark = pytest.mark.usefixtures("no_processes")


def records(run: Path) -> dict[int, TokenRecord]:
    return {step: read_record(path) for step, path in record_files(run / FOLDER)}


def reasons(run: Path) -> dict[int, str]:
    return {step: record.facts["why"] for step, record in records(run).items()}


def test_first_steps_every_so_many_and_after_checkpoints(tmp_path: Path) -> None:
    live(
        tmp_path,
        RunState(),
        None,
        "trainer.save_freq=4",
        "trainer.token_records.freq=3",
        "trainer.alerts.reward_window=100",
        "algorithm.rollout_correction.rollout_rs=null",
        "algorithm.rollout_correction.rollout_rs_threshold=null",
        "algorithm.rollout_correction.rollout_rs_target_acceptance=null",
        steps=6,
    )
    alerts = (
        [json.loads(line)["step"] for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
        if (tmp_path / "alerts.jsonl").exists()
        else []
    )
    found = reasons(tmp_path)
    expected = {1: "first", 2: "first", 3: "regular", 5: "checkpoint", 6: "regular"}
    after_alerts = {step for alert in alerts for step in (alert, alert + 1)}
    assert {step: why for step, why in found.items() if step not in after_alerts or step <= 2} == {
        step: why for step, why in expected.items() if step not in after_alerts or step <= 2
    }
    assert found.keys() == expected.keys() | {step for step in after_alerts if step <= 6}


def test_the_step_of_an_alert_and_the_one_after(tmp_path: Path) -> None:
    services = SimpleNamespace(
        config=SimpleNamespace(
            trainer=SimpleNamespace(token_records=SimpleNamespace(enable=True, freq=100, full_freq=0)),
        ),
        tracker=SimpleNamespace(last_alert=41),
        saves_at=lambda step: False,
        folder=tmp_path,
    )
    recorder = TokenRecorder(cast(Services, services), 0)
    assert [recorder._reason(step) for step in (40, 41, 42, 43)] == [None, "alert", "alert", None]
    # The first one owns nothing while it writes nothing: the traceback of a failed step may hold it.
    TokenRecorder(cast(Services, services), 0)


def test_switched_off_nothing_is_written(tmp_path: Path) -> None:
    live(tmp_path, RunState(), None, "trainer.token_records.enable=False")
    assert not (tmp_path / FOLDER).exists()


def test_a_resumed_run_has_no_step_twice(tmp_path: Path) -> None:
    live(tmp_path, RunState())
    whole = {step: record.tokens["old_log_prob"] for step, record in records(tmp_path).items()}
    assert list(whole) == [1, 2, 3, 4]
    checkpoint = tmp_path / "global_step_2"
    live(tmp_path, SavedRun.load(checkpoint).state, checkpoint)
    again = records(tmp_path)
    assert list(again) == [1, 2, 3, 4]
    for step, record in again.items():
        np.testing.assert_array_equal(record.tokens["old_log_prob"], whole[step])
    assert [path.name for path in sorted((tmp_path / FOLDER).glob("*.replaced.parquet"))] == [
        "step_000003.replaced.parquet",
        "step_000004.replaced.parquet",
    ]


def test_pieces_go_on_behind_half_a_line(tmp_path: Path) -> None:
    live(tmp_path, RunState())
    path = tmp_path / FOLDER / PIECES
    with path.open("ab") as file:
        file.write(b'{"step": 4, "pieces": [[7, "\xc3')  # killed here
    live(tmp_path, SavedRun.load(tmp_path / "global_step_2").state, tmp_path / "global_step_2")
    assert [json.loads(line)["step"] for line in path.read_text("utf-8").splitlines()] == [1, 2, 3, 4]


def test_files_are_as_private_as_the_umask_says_and_never_leave_the_folder(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        live(tmp_path, RunState())
    finally:
        os.umask(before)
    folder = tmp_path / FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    logged = (tmp_path / "metrics.jsonl").read_text()
    assert "response_ids" not in logged


@pytest.mark.parametrize(
    ("contents", "has_ids", "has_prompts"),
    [("full", True, True), ("no_prompts", True, False), ("numbers_only", False, False)],
)
def test_contents(tmp_path: Path, contents: str, has_ids: bool, has_prompts: bool) -> None:
    live(tmp_path, RunState(), None, f"trainer.token_records.contents={contents}")
    record = records(tmp_path)[1]
    assert ("response_ids" in record.tokens) == has_ids
    assert (record.prompts is not None) == has_prompts
    assert (tmp_path / FOLDER / PIECES).exists() == has_ids
    assert "token_class" in record.tokens


def test_pieces_have_the_text_of_every_id(tmp_path: Path) -> None:
    live(tmp_path, RunState())
    lines = [json.loads(line) for line in (tmp_path / FOLDER / PIECES).read_text().splitlines()]
    ids = [entry[0] for line in lines for entry in line["pieces"]]
    assert len(ids) == len(set(ids))
    used = {
        token for record in records(tmp_path).values() for token in record.tokens["response_ids"].tolist()
    }
    used |= {
        int(token)
        for record in records(tmp_path).values()
        for prompt in record.prompts or ()
        for token in prompt
    }
    assert used <= set(ids)
    assert {entry[1] for line in lines for entry in line["pieces"]} == {"x"}


# ---- Which rows


def test_half_at_random_half_the_worst() -> None:
    squares = torch.tensor([0.0, 5.0, 1.0, torch.inf, 2.0, 0.1, 9.0, torch.nan])
    chosen = ChosenRows.choose(squares, 5, seed=3)
    drawn, worst = chosen.rows[:3], chosen.rows[3:]
    assert chosen.is_worst == [False] * 3 + [True] * 2
    assert chosen.inclusion == 3 / 8
    left = [row for row in (3, 7, 6, 1, 4, 2, 5, 0) if row not in drawn]
    assert worst == left[:2]
    assert ChosenRows.choose(squares, 5, seed=3) == chosen
    assert any(ChosenRows.choose(squares, 5, seed=other).rows != chosen.rows for other in range(4, 9))


def test_random_rows_are_taken_alike_whatever_their_gap() -> None:
    squares = torch.arange(8.0)
    counts = np.zeros(8)
    for seed in range(2_000):
        chosen = ChosenRows.choose(squares, 4, seed)
        counts[chosen.rows[:2]] += 1
    np.testing.assert_allclose(counts / 2_000, 0.25, atol=4 * (0.25 * 0.75 / 2_000) ** 0.5)


def test_a_small_batch_is_taken_whole() -> None:
    chosen = ChosenRows.choose(torch.tensor([1.0, 2.0]), 16, seed=1)
    assert (chosen.rows, chosen.is_worst, chosen.inclusion) == ([0, 1], [False, False], 1.0)


# ---- What a record holds


def recorded(
    folder: Path,
    config: RunConfig,
    scored: ScoredBatch,
    step: int = 1,
    evaluations: PolicyEvaluations = INPUTS.evaluations,
    stops: tuple[int, ...] = (2,),
) -> TokenRecord:
    """The record of a step."""
    services = SimpleNamespace(
        config=config,
        folder=folder,
        tokenizer=SimpleNamespace(all_special_ids=[], batch_decode=lambda rows, **_: ["x"] * len(rows)),
        tracker=SimpleNamespace(last_alert=None),
        stop_token_ids=stops,
        saves_at=lambda step: False,
    )
    mode = corrector_of(config.algorithm.rollout_correction)
    if config.algorithm.rollout_correction.mode != "decoupled":
        evaluations = PolicyEvaluations(batch_size=evaluations.batch_size)
    inputs = driver_inputs(config, dataclasses.replace(INPUTS, scored=scored, evaluations=evaluations))
    control = Control.from_config(config.algorithm)
    TokenRecorder(cast(Services, services), 0).write(inputs, Step(step, control, mode, StepRecord()))
    return records(folder)[step]


def samples_with_prompts() -> ScoredBatch:
    prompts = [PromptRow(row, [1], [], f"source {row % 2}", None, {}) for row in range(ROWS)]
    return dataclasses.replace(INPUTS.scored, prompts=prompts)


def test_a_record_names_pictures_and_has_each_beside_it_once(tmp_path: Path) -> None:
    pictures = Pictures([b"one"]), None, Pictures([b"one", b"other"])
    prompts = [PromptRow(row, [1], [], "", None, {}, pictures=pictures[row % 3]) for row in range(ROWS)]
    config = config_of({**CORRECTION, "trainer.token_records.contents": "full"})
    scored = dataclasses.replace(INPUTS.scored, prompts=prompts)
    record = recorded(tmp_path, config, scored)
    digests = [None if one is None else one.digests for one in (row.pictures for row in scored.rows)]
    assert [tuple(cell.split()) or None for cell in record.rows["pictures"]] == digests
    folder = tmp_path / FOLDER / "pictures"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        hashlib.sha256(image).hexdigest(): image for image in (b"one", b"other")
    }


CORRECTION: dict[str, Any] = {
    "algorithm.rollout_correction.rollout_is": "token",
    "algorithm.rollout_correction.rollout_is_threshold": 1.3,
    "algorithm.rollout_correction.rollout_rs": "token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold": "0.5_2.0",
    "algorithm.rollout_correction.diagnostics": "full",
    "trainer.token_records.full_freq": 1,
}


def test_a_full_record_holds_what_was_trained_on(tmp_path: Path) -> None:
    scored, config = samples_with_prompts(), config_of(CORRECTION)
    record, rollouts = recorded(tmp_path, config, scored), scored.rollouts
    inputs, evaluations = step_inputs(config), INPUTS.evaluations
    assert inputs.batch.rollout_is_weights is not None
    assert record.facts["why"] == "full"
    assert record.rows["row"].tolist() == list(range(ROWS))
    assert record.rows["source"].tolist() == [f"source {group % 2}" for group in rollouts.group_ids.tolist()]
    assert set(record.rows["inclusion"].tolist()) == {1.0}
    written = torch.arange(rollouts.response_mask.shape[1]) < rollouts.tokens.response_lengths[:, None]
    exact = {
        "response_mask": rollouts.response_mask,
        "rollout_log_prob": rollouts.rollout_log_probs,
        "old_log_prob": evaluations.proximal_log_probs,
        "advantage": inputs.batch.advantages,
        "kept": inputs.batch.loss_mask,
        "version": rollouts.policy_versions,
    }
    for name, values in exact.items():
        assert record.tokens[name].tolist() == values[written].tolist(), name
    np.testing.assert_allclose(
        record.tokens["weight"], inputs.batch.rollout_is_weights[written].numpy(), rtol=1e-3
    )
    assert not record.tokens["kept"].all()
    scales = noise_scale(record.tokens)
    assert scales is not None
    for i, (p, q) in enumerate(
        zip(
            evaluations.proximal_log_probs[written].tolist(),
            evaluations.sum_pi_squared[written].tolist(),
            strict=True,
        )
    ):
        expected = max(1 - 2 * np.exp(np.float64(p)) + q, 0.0) ** 0.5
        assert scales[i] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_log_probs_of_a_reference_and_of_a_teacher_keep_their_names(tmp_path: Path) -> None:
    scored, evaluations = samples_with_prompts(), INPUTS.evaluations.clone()
    evaluations.reference_log_probs = evaluations.proximal_log_probs - 0.25
    evaluations.teacher_log_probs = evaluations.proximal_log_probs + 0.5
    tokens = recorded(tmp_path, config_of(CORRECTION), scored, evaluations=evaluations).tokens
    np.testing.assert_allclose(tokens["ref_log_prob"], tokens["old_log_prob"] - 0.25, rtol=1e-3)
    np.testing.assert_allclose(tokens["teacher_log_prob"], tokens["old_log_prob"] + 0.5, rtol=1e-3, atol=1e-3)


def test_correcting_a_full_record_again_gives_the_metrics_of_the_step(tmp_path: Path) -> None:
    scored, config = samples_with_prompts(), config_of(CORRECTION)
    record = recorded(tmp_path, config, scored)
    width = int(record.lengths.max())
    padded = {
        name: np.zeros((ROWS, width), record.tokens[name].dtype)
        for name in ("old_log_prob", "rollout_log_prob", "response_mask")
    }
    for row in range(ROWS):
        for name, values in padded.items():
            values[row, : record.lengths[row]] = record.tokens[name][record.span(row)]
    tensors = [torch.from_numpy(values) for values in padded.values()]
    fields = {**record.facts["correction"], "diagnostics": "core"}
    again = compute_rollout_correction(*tensors, fields).metrics()
    inputs = step_inputs(config)
    assert inputs.correction is not None
    own = inputs.correction.metrics()
    assert {
        "rollout_corr/kl",
        "rollout_corr/rollout_is_mean",
        "rollout_corr/rollout_rs_token_k1_masked_fraction",
    } <= again.keys()
    for name, value in again.items():
        assert value == pytest.approx(own[name], rel=1e-6, abs=1e-9), name


def test_a_turn_has_its_reward_and_its_wait_at_its_last_token(tmp_path: Path) -> None:
    """Row 0 is made to have two turns; the environment has no turn of the empty row."""
    scored = samples_with_prompts()
    mask = scored.rollouts.response_mask.clone()
    mask[0, 2:4] = False
    episodes = [[Reply(reward=-float(row), done=True, waited=row / 2)] for row in range(ROWS)]
    episodes[0], episodes[EMPTY_ROW] = [Reply(TOLD, 0.5, waited=1.5), Reply(reward=2.0, done=True)], []
    rollouts = scored.rollouts.clone()
    rollouts.response_mask = mask
    scored = dataclasses.replace(scored, rollouts=rollouts, episodes=episodes)
    record = recorded(tmp_path, config_of(CORRECTION), scored)
    first = record.span(0)
    last = int(record.lengths[0]) - 5
    assert record.tokens["turn_reward"][first].tolist() == [0, 0.5, 0, 0, *[0.0] * last, 2.0]
    assert record.tokens["turn_wait"][first].tolist() == [0, 1.5, 0, 0, *[0.0] * last, 0.0]
    for row in range(1, ROWS):
        rewards, waits = (record.tokens[name][record.span(row)] for name in ("turn_reward", "turn_wait"))
        assert rewards.tolist() == ([*[0.0] * (len(rewards) - 1), -float(row)] if len(rewards) else [])
        assert not len(waits) or waits[-1] == row / 2


def test_some_rows_of_a_step(tmp_path: Path) -> None:
    scored = samples_with_prompts()
    record = recorded(
        tmp_path,
        config_of(
            {**CORRECTION, "trainer.token_records.full_freq": 0, "trainer.token_records.rows_per_step": 6}
        ),
        scored,
    )
    assert record.rows["chosen_by"].tolist() == ["random"] * 3 + ["worst"] * 3
    assert record.facts["rows_of_batch"] == ROWS
    assert record.facts["stop_token_ids"] == [2]
    assert record.facts["tokens_of_batch"] == int(scored.rollouts.response_mask.sum())
    difference = (INPUTS.evaluations.proximal_log_probs - scored.rollouts.rollout_log_probs).double()
    gaps = difference**2 * scored.rollouts.response_mask
    order = gaps.sum(dim=-1).argsort(descending=True).tolist()
    drawn = record.rows["row"].tolist()[:3]
    assert record.rows["row"].tolist()[3:] == [row for row in order if row not in drawn][:3]


def test_where_the_actor_corrects_no_log_probs_of_the_trainer_are_invented(tmp_path: Path) -> None:
    bypass = {
        "algorithm.rollout_correction.bypass_mode": True,
        "algorithm.rollout_correction.loss_type": "ppo_clip",
    }
    record = recorded(tmp_path, config_of(bypass), samples_with_prompts())
    assert {"old_log_prob", "weight", "kept", "sum_pi_squared", "varentropy", "entropy"}.isdisjoint(
        record.tokens
    )
    assert "advantage" in record.tokens


@pytest.mark.bench
def test_seconds_of_a_record() -> None:
    """Prints the seconds that a record of 16 rows of 4,096 tokens takes, beside those of correcting its batch
    of 512 rows."""
    import tempfile  # as below, only here
    import time

    from recorded_tokens import token_record

    from verl_rc.records.token_records.token_parquet import write_record

    record = token_record(1, [4_096] * 16)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        for _ in range(5):
            path = write_record(Path(folder), record)
        seconds = (time.perf_counter() - started) / 5
        print(f"{seconds * 1000:.1f} ms and {path.stat().st_size / 65_536:.1f} bytes a token")
    assert seconds < 0.5


def test_stop_tokens_are_of_the_special_class_whatever_their_text(tmp_path: Path) -> None:
    """The tokenizer of this test has no special tokens of its own."""
    scored = samples_with_prompts()
    stop = int(scored.rollouts.tokens.responses[0, 0])
    record = recorded(tmp_path, config_of(CORRECTION), scored, stops=(stop,))
    is_special = record.tokens["token_class"] == TOKEN_CLASSES.index("special")
    assert is_special.any()
    assert (is_special == (record.tokens["response_ids"] == stop)).all()
