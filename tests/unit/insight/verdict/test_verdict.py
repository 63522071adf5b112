"""What is said about learning, correction and speed, and how it is put: one plan for each, and the limits
beside it."""

import json
import math
from dataclasses import replace

import pytest
from planted_series import STEPS, healthy, planted, ramp, wave

from verl_rc.config.run import RunConfig
from verl_rc.config.schema import has_key, is_section
from verl_rc.insight.run_folder.records import Ending, RunData, Series
from verl_rc.insight.verdict import verdict_of
from verl_rc.insight.verdict.correction import correction_statements, half_ess_length
from verl_rc.insight.verdict.gap import gap_statements
from verl_rc.insight.verdict.gap_series import GAP
from verl_rc.insight.verdict.learning import learning_statements
from verl_rc.insight.verdict.speed import speed_statements, stage_seconds

SCORE, LENGTH, CUT = "critic/score/mean", "response_length/mean", "response_length/clip_ratio"
ESS, K3 = "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/k3_kl"
VALIDATION = "val-core/gsm8k/acc/mean@1"


def causes(statements):
    return [(found.cause, found.level) for found in statements]


def bump(high: float, low: float) -> list[float]:
    """Rises for half the run, then falls."""
    return ramp(0.1, high, STEPS // 2) + ramp(high, low, STEPS // 2 - 8) + wave(low, 0.02, 8)


# ---- Learning.


def test_a_run_that_learns():
    (found,) = learning_statements(planted({VALIDATION: [0.2, 0.7]}))
    assert (found.cause, found.level) == ("learns", "good")
    assert "validation gsm8k acc 0.200 to 0.700" in found.text
    assert found.evidence["change"] == pytest.approx(0.37, abs=0.03)  # 36 of 39 steps of 0.4


def test_a_run_that_does_not_improve():
    (found,) = learning_statements(planted({SCORE: wave(0.3)}))
    assert causes([found]) == [("does not improve", "notice")]


def test_a_collapse_by_updates_that_are_too_large():
    metrics = {
        SCORE: bump(0.6, 0.1),
        "actor/ppo_kl": wave(0.3),
        "actor/pg_clipfrac": wave(0.5),
        "actor/lr": [3e-5] * STEPS,
    }
    (found,) = learning_statements(planted(metrics))
    assert causes([found]) == [("collapse: updates too large", "fault")]
    assert found.overrides == ("actor_rollout_ref.actor.optim.lr=1e-05",)
    assert "ppo_kl up to 0.31" in found.text


@pytest.mark.parametrize(("low", "collapsed"), [(0.2, True), (0.4, False)])
def test_a_collapse_is_half_of_the_best(low, collapsed):
    (found,) = learning_statements(planted({SCORE: bump(0.6, low)}))
    assert (found.cause == "collapse") is collapsed


def test_noise_is_no_collapse():
    noisy = [0.5 + 0.5 * math.sin(2.4 * step) for step in range(STEPS)]
    (found,) = learning_statements(planted({SCORE: noisy}))
    assert "collapse" not in found.cause


@pytest.mark.parametrize(("share", "said"), [(0.45, True), (0.2, False)])
def test_responses_that_grow_into_the_limit(share, said):
    found = learning_statements(planted({CUT: ramp(0.02, share), LENGTH: ramp(30, 62)}))
    assert (("responses cut off", "fault") in causes(found)) is said
    if said:
        assert found[0].overrides == ("data.max_response_length=128",)


def test_a_reward_that_can_be_had_by_length():
    found = learning_statements(planted({LENGTH: ramp(30, 62), VALIDATION: [0.5, 0.3]}))
    assert causes(found) == [("reward for length", "fault")]
    assert causes(learning_statements(planted({LENGTH: ramp(30, 62), VALIDATION: [0.3, 0.5]}))) == [
        ("learns", "good")
    ]
    assert causes(learning_statements(planted({LENGTH: ramp(30, 36), VALIDATION: [0.5, 0.3]}))) == [
        ("does not improve", "notice")
    ]


def test_entropy_that_is_lost():
    lost = {"actor/entropy": ramp(1.0, 0.001), SCORE: wave(0.3)}
    assert causes(learning_statements(planted(lost))) == [("entropy lost", "fault")]
    assert causes(learning_statements(planted(lost | {SCORE: healthy()[SCORE]}))) == [("learns", "good")]
    assert causes(learning_statements(planted(lost | {"actor/entropy": ramp(1.0, 0.2)}))) == [
        ("does not improve", "notice")
    ]


def test_gradients_that_are_not_finite():
    norms = wave(1.0)
    norms[6], norms[7] = math.nan, math.inf
    found = learning_statements(planted({"actor/grad_norm": norms}))
    assert (found[0].cause, found[0].steps) == ("gradients not finite", (7, 8))
    skipped = learning_statements(planted({"actor/nonfinite_gradients": [0.0] * 30 + [1.0] + [0.0] * 9}))
    assert (skipped[0].cause, skipped[0].confidence) == ("gradients not finite", "likely")


# ---- Correction.


def test_the_length_at_which_weights_of_rows_lose_half():
    # The specification's own numbers: ln 2 / (2 k3) is 2,700 tokens at 1.3e-4, 700 at 5e-4, 17 at 0.02.
    values = half_ess_length(planted({K3: [1.3e-4, 5e-4, 0.02]})).values
    assert values == pytest.approx([2700, 700, 17], rel=0.03)


@pytest.mark.parametrize(("ess", "level"), [(0.6, None), (0.4, "notice"), (0.2, "fault")])
def test_weights_that_waste_the_batch(ess, level):
    found = correction_statements(planted({ESS: wave(ess, 0.02)}))
    assert causes(found) == ([("cheap", "good")] if level is None else [("weights waste the batch", level)])


def test_weights_of_rows_that_are_too_long():
    metrics = {ESS: wave(0.3, 0.02), K3: wave(0.02)}
    (found,) = correction_statements(
        planted(metrics, {"algorithm.rollout_correction.rollout_is": "sequence"})
    )
    assert found.overrides == ("algorithm.rollout_correction.rollout_is=token",)
    assert "lose half of it at 17 tokens, and responses have 1" in found.text
    (found,) = correction_statements(planted(metrics))  # token weights already
    assert found.overrides == ()


@pytest.mark.parametrize(("share", "said"), [(0.15, True), (0.07, False)])
def test_much_is_rejected(share, said):
    metrics = {
        "rollout_corr/rollout_rs_masked_fraction": wave(share),
        "rollout_corr/rollout_rs_token_k1_masked_fraction": wave(share - 0.02),
        "rollout_corr/rollout_rs_seq_mean_k1_masked_fraction": wave(0.02),
        "rollout_corr/rollout_rs_token_k1_seq_masked_fraction": wave(0.9),
    }
    (found,) = correction_statements(planted(metrics))
    assert (found.cause == "much is rejected") is said
    assert not said or "13% by token_k1" in found.text


# ---- Speed.


def test_where_the_time_goes():
    run = planted({"timing_s/testing": [50.0] * STEPS})
    assert stage_seconds(run)["gen"] == pytest.approx(6.0, rel=0.03)
    assert "testing" not in stage_seconds(run)
    (found,) = speed_statements(run)
    assert found.cause == "busy"
    assert "60% of it gen" in found.text


@pytest.mark.parametrize(("idle", "said"), [(0.35, True), (0.2, False)])
def test_idle_workers(idle, said):
    (found,) = speed_statements(planted({"perf/overhead_fraction": wave(idle)}))
    assert (found.cause == "idle") is said


# ---- The whole.


def test_nothing_is_wrong_with_a_healthy_run():
    verdict = verdict_of(planted({}))
    assert verdict.headline == "Nothing is wrong, as far as metrics tell."
    assert [found.topic for found in verdict.statements] == ["learning", "gap", "correction", "speed"]
    assert verdict.do_first == ()
    assert verdict.lines()[0] == f"{verdict.headline} The log goes to step {STEPS} of {STEPS}."


def everything_wrong() -> RunData:
    norms = [math.nan] * STEPS
    return planted(
        {
            "actor/grad_norm": norms,
            SCORE: bump(0.6, 0.1),
            "actor/ppo_kl": wave(0.3),
            CUT: ramp(0.02, 0.6),
            "rollout_corr/misalignment_z": [-30.0] * STEPS,
            "rollout_corr/nonfinite_token_fraction": [0.1] * STEPS,
            ESS: wave(0.1),
            "rollout_corr/rollout_rs_masked_fraction": wave(0.4),
            "perf/overhead_fraction": wave(0.5),
        }
    )


def test_a_verdict_has_at_most_eight_lines_and_three_overrides():
    verdict = verdict_of(everything_wrong())
    assert verdict.headline.startswith("Something is wrong: learning: ")
    assert len(verdict.lines()) <= 8
    assert len(verdict.do_first) <= 3


def test_a_fault_of_the_gap_comes_first_and_no_correction_is_advised_with_it():
    settings = {"algorithm.rollout_correction.rollout_is": "sequence", "actor_rollout_ref.rollout.top_p": 0.9}
    bad = {ESS: wave(0.2), K3: wave(0.02), "rollout_corr/misalignment_z": [-30.0] * STEPS}
    assert verdict_of(planted(bad, settings)).do_first == (
        "actor_rollout_ref.rollout.top_p=1.0",
        "actor_rollout_ref.rollout.top_k=-1",
    )
    assert (
        "algorithm.rollout_correction.rollout_is=token"
        in verdict_of(planted({ESS: wave(0.2), K3: wave(0.02)}, settings)).do_first
    )


def test_overrides_are_keys_of_the_configuration():
    wrong = everything_wrong()
    old = planted({f"rollout_corr/age_{age}_k3_kl": wave(1e-3 * (age + 1) ** 2) for age in range(4)})
    pinned = [(0.01 + 0.02 * step) ** 2 for step in range(STEPS)]
    flat = {"actor/entropy": ramp(1, 0), SCORE: wave(0.3)}
    late = planted({K3: pinned, "rollout_corr/kl": pinned, "actor/ppo_kl": wave(5e-4)} | flat)
    grown = planted(
        {K3: ramp(1e-4, 1e-2), "rollout_corr/kl": ramp(1e-4, 1e-2), "actor/ppo_kl": [0.05] * STEPS}
    )
    settings = {"algorithm.rollout_correction.rollout_is": "sequence"}
    wasteful = planted({ESS: wave(0.2), K3: wave(0.02), "rollout_corr/kl": wave(0.02)}, settings)
    said = [
        statement for run in (wrong, old, late, grown, wasteful) for statement in verdict_of(run).statements
    ]
    found = {override.partition("=")[0] for statement in said for override in statement.overrides}
    assert len(found) >= 11
    assert [key for key in found if not (has_key(RunConfig, key) and not is_section(RunConfig, key))] == []


def test_how_it_ended():
    run = planted({})
    run.ending = Ending(143, "SIGTERM")
    assert (
        verdict_of(run).progress
        == f"The run ended after {STEPS} of {STEPS} steps with exit code 143: SIGTERM."
    )
    run.ending, run.total_steps = None, 100
    assert verdict_of(run).progress == f"The log goes to step {STEPS} of 100: it still trains, or was killed."
    run.steps, run.total_steps = range(15, 21), None
    assert verdict_of(run).progress == "The log goes to step 20."
    run.steps = ()
    assert verdict_of(run).progress == "No step is logged."


def test_numbers_of_a_sentence_are_its_evidence():
    for run in (planted({}), everything_wrong()):
        for found in verdict_of(run).statements:
            assert all(isinstance(value, int | float) for value in found.evidence.values())
            assert "{" not in found.sentence
            json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.parametrize("steps", [1, 2, 3, 11, 12])
def test_short_runs(steps):
    verdict = verdict_of(planted({}, without=()) if steps == STEPS else shortened(steps))
    assert all(found.level != "fault" for found in verdict.statements)
    assert verdict.lines()


def shortened(steps: int) -> RunData:
    run = planted({})
    run.series = {
        name: Series(series.steps[:steps], series.values[:steps]) for name, series in run.series.items()
    }
    run.steps, run.total_steps = run.steps[:steps], steps
    return run


def test_a_run_that_only_validates():
    run = planted({VALIDATION: [0.25]}, without=list(healthy()))
    (found,) = verdict_of(run).statements
    assert found.text == "validation gsm8k acc 0.250, once"


def test_a_run_without_metrics_is_not_judged():
    verdict = verdict_of(RunData("x", planted({}).path, "verl_rc run"))
    assert verdict.headline == "Nothing can be told."


def test_names_of_a_run_cannot_break_a_sentence():
    run = planted({"val-core/{evil}{0}/acc/mean@1": [0.1, 0.2]}, {"actor_rollout_ref.rollout.top_p": "{x}"})
    assert "{evil}{0}" in verdict_of(run).statements[0].text


@pytest.mark.parametrize(
    ("source", "trainer", "metrics", "is_pasted"),
    [
        ("verl_rc run", "", {}, True),
        ("verl's console log", "verl", {}, True),
        ("W&B export", "", {}, True),
        ("TRL's trainer_state.json", "TRL", {}, False),
        ("W&B export", "", {SCORE: "reward/mean"}, False),
    ],
)
def test_overrides_are_of_keys_that_the_trainer_has(source, trainer, metrics, is_pasted):
    run = replace(everything_wrong(), source=source, trainer=trainer, their_names=metrics)
    assert bool(verdict_of(run).do_first) is is_pasted


def test_a_gap_is_judged_where_nothing_else_was_logged():
    """SkyRL's and slime's names of other metrics are not the catalogue's."""
    run = planted({GAP: ramp(0.01, 0.2)}, source="W&B export", without=[n for n in healthy() if n != GAP])
    (found,) = (statement for statement in verdict_of(run).statements if statement.topic == "gap")
    assert (found.cause, found.level) == ("grown, cause not separable by metrics", "fault")


@pytest.mark.parametrize(("last", "level"), [(1e-6, "good"), (0.01, "fault")])
def test_a_gap_that_begins_at_0_has_grown_beyond_what_float32_rounds(last, level):
    gap = [0.0, 0.0, *wave(last, steps=STEPS - 2)]
    run = planted({GAP: gap}, without=["rollout_corr/k3_kl", "rollout_corr/kl"])
    (found,) = gap_statements(run)
    assert found.level == level


@pytest.mark.parametrize(("clip", "overrides"), [(0.2, 1), (None, 1), (0.3, 0)])
def test_a_clip_that_is_to_be_raised_is_not_lowered(clip, overrides):
    metrics = {"actor/entropy": ramp(1.0, 0.01), SCORE: wave(0.3)}
    run = planted(metrics, {"actor_rollout_ref.actor.clip_ratio_high": clip})
    (found,) = (statement for statement in learning_statements(run) if statement.cause == "entropy lost")
    assert len(found.overrides) == overrides
