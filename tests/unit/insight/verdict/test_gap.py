"""Each row of the decision table that metrics can speak to: the cause where it is planted, silence beside its
bound.

Expected numbers are worked out from the table's definitions: mean ratio = 1 - k1 + k3, gap = sqrt(k3), held
mass = mean ratio.
"""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_series import COOLER, SIGNS, STEPS, healthy, planted, ramp, wave
from planted_tokens import Planted, rows_of
from sound_run import sound_run

from verl_rc.algorithm.health.cause_table import BEYOND_ROUNDING
from verl_rc.algorithm.health.causes import PREFIX
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.schema import leaves_of, public_values
from verl_rc.insight.run_folder import Series
from verl_rc.insight.run_folder.bend import Bend
from verl_rc.insight.run_folder.foreign import FILE_LOGGER
from verl_rc.insight.run_folder.token_data import TokenData
from verl_rc.insight.verdict.gap import checked_rules, gap_statements, invisible_causes
from verl_rc.insight.verdict.gap_series import z_of_mean_ratio

K1, K3, CHI2 = "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token"
Z = "rollout_corr/misalignment_z"
PPO_KL = "actor/ppo_kl"


def only(statements):
    (statement,) = statements
    return statement


def with_mean_ratio(ratio: float, deviation: float = 0.1) -> dict[str, list[float]]:
    """Moments of ratios with this mean and standard deviation, in every step."""
    k3 = 0.02
    return {K1: [k3 + 1 - ratio] * STEPS, K3: [k3] * STEPS, CHI2: [deviation**2 + ratio**2 - 1] * STEPS}


def test_healthy_is_rounding():
    found = only(gap_statements(planted({})))
    assert (found.cause, found.level, found.row) == ("rounding", "good", 11)
    assert found.evidence["gap"] == pytest.approx(0.02 / math.sqrt(2), rel=0.05)


# ---- Row 1.


@pytest.mark.parametrize(
    "name", ["rollout_corr/nonfinite_token_fraction", "rollout_corr/safety_clamped_fraction"]
)
def test_row_1_numbers_that_are_not_finite(name):
    shares = [0.0] * STEPS
    shares[9] = shares[20] = 0.002
    found = only(gap_statements(planted({name: shares})))
    assert (found.cause, found.level, found.confidence, found.row) == (
        "overflow or empty logits",
        "fault",
        "named",
        1,
    )
    assert found.steps == (10, 21)
    assert "0.200%" in found.text
    assert f"2 of {STEPS} steps" in found.text


def test_row_1_once_is_likely():
    shares = [0.0] * (STEPS - 1) + [0.5]
    assert (
        only(gap_statements(planted({"rollout_corr/nonfinite_token_fraction": shares}))).confidence
        == "likely"
    )


# ---- Rows 4 to 7.


def test_z_from_the_moments():
    # 10,000 tokens, deviation 0.1: the mean has a standard error of 0.001.
    z = z_of_mean_ratio(planted(with_mean_ratio(0.962)))
    assert z.values == pytest.approx([-38.0] * STEPS)


def test_z_counts_tokens_from_lengths_where_no_ledger_is():
    # 12,000 tokens of which 100 of 120 are responses: 10,000 again.
    metrics = with_mean_ratio(0.962) | {
        "perf/total_num_tokens": [12_000.0] * STEPS,
        "response_length/mean": [100.0] * STEPS,
    }
    z = z_of_mean_ratio(planted(metrics, without=["ledger/sampled_tokens"]))
    assert z.values == pytest.approx([-38.0] * STEPS)


def test_row_5_a_sampling_filter_of_the_configuration_is_named_with_the_mass_it_keeps():
    found = only(gap_statements(planted(with_mean_ratio(0.962), {"actor_rollout_ref.rollout.top_p": 0.95})))
    assert (found.cause, found.level, found.confidence, found.row) == (
        "sampling filter not mirrored",
        "fault",
        "named",
        5,
    )
    assert found.evidence["held"] == pytest.approx(0.962)
    assert "96.2%" in found.text
    assert "top_p=0.95" in found.text
    assert "actor_rollout_ref.rollout.top_p=1.0" in found.overrides


def test_a_filter_whose_supports_the_trainer_has_is_not_what_is_missing():
    metrics = with_mean_ratio(0.962) | {"support/unrecorded_ratio": [0.0] * STEPS}
    found = only(gap_statements(planted(metrics, {"actor_rollout_ref.rollout.top_p": 0.95})))
    assert (found.cause, found.row) == ("raw log-probs, or not those of the sampled tokens", 7)
    assert "0.9620 instead of 1" in found.text
    assert "top_p" not in found.text


def test_rows_4_to_6_without_a_filter_in_the_configuration_are_likely_only():
    found = only(gap_statements(planted(with_mean_ratio(0.962))))
    assert (found.cause, found.confidence) == ("sampling filter, banned token or raw log-probs", "likely")


def test_row_7_more_mass_than_there_is():
    found = only(gap_statements(planted(with_mean_ratio(1.05))))
    assert (found.cause, found.level, found.row) == (
        "raw log-probs, or not those of the sampled tokens",
        "fault",
        7,
    )


@pytest.mark.parametrize(("z", "speaks"), [(-7.0, True), (-5.0, False), (7.0, True), (5.0, False)])
def test_the_bound_of_z(z, speaks):
    found = gap_statements(planted({Z: [z] * STEPS}))
    assert (only(found).level == "fault") is speaks


def test_one_step_beyond_the_bound_is_a_heavy_tail():
    z = [0.5] * STEPS
    z[5], z[12], z[30] = -20.0, 25.0, -9.0
    assert only(gap_statements(planted({Z: z}))).level == "good"
    z[6] = -8.0
    assert only(gap_statements(planted({Z: z}))).level == "fault"


def test_verl_with_rejection_says_nothing_about_missing_mass():
    rejected = {"rollout_corr/rollout_rs_masked_fraction": [0.1] * STEPS}
    assert only(gap_statements(planted(with_mean_ratio(0.962) | rejected, source=FILE_LOGGER))).row == 11
    assert only(gap_statements(planted(with_mean_ratio(0.962), source=FILE_LOGGER))).row == 5
    assert (
        only(gap_statements(planted(with_mean_ratio(0.962) | rejected))).row == 5
    )  # ours measures before rejection


# ---- Row 20 of other trainers, whose precision is not known.


@pytest.mark.parametrize(
    ("noise", "cause"), [(0.45, "rounding"), (0.55, "large from the start, cause not separable by metrics")]
)
@pytest.mark.parametrize("name", ["logit_noise", "logit_noise_least"])
def test_noise_that_rounding_makes_in_no_precision(noise, cause, name):
    run = planted({f"{PREFIX}{name}": [noise] * STEPS}, source=FILE_LOGGER)
    found = only(gap_statements(run))
    assert found.cause == cause
    if cause != "rounding":
        assert "replay" not in found.next_test


# ---- Row 16.


def aged(gaps: dict[int, float], noise: float = 0.05) -> dict[str, list[float]]:
    return {
        f"rollout_corr/age_{age}_k3_kl": [gap**2 for gap in wave(value, noise)] for age, value in gaps.items()
    }


def test_row_16_the_gap_is_linear_in_age():
    # The specification's k3 at ages 1, 2 and 4, and bf16's floor at age 0.
    found = only(
        gap_statements(
            planted(aged({0: 0.014, 1: math.sqrt(8e-4), 2: math.sqrt(2.6e-3), 4: math.sqrt(0.010)}))
        )
    )
    assert (found.cause, found.confidence, found.row) == ("staleness", "named", 16)
    assert found.evidence["slope"] == pytest.approx(0.022, rel=0.05)
    assert "async_training.staleness_threshold=0" in found.overrides


@pytest.mark.parametrize(
    ("given", "offered"),
    [
        ("", True),
        ("async_training.partial_rollout=False", True),
        ("async_training.partial_rollout=False async_training.trigger_parameter_sync_step=2", True),
        ("async_training.max_concurrent_rollouts=8", False),
        ("async_training.order=admitted async_training.kv_cache_on_update=keep", False),
        (
            "actor_rollout_ref.rollout.checkpoint_engine.stage_updates=True "
            "async_training.partial_rollout=False",
            False,
        ),
        ("algorithm.rollout_correction.proximal=interpolate", False),
    ],
)
def test_row_16_offers_what_the_run_takes(given: str, offered: bool):
    asynchronous = ["async_training.staleness_threshold=1", "actor_rollout_ref.hybrid_engine=False"]
    run = [
        *sound_run(),
        *asynchronous,
        "algorithm.rollout_correction.preset=decoupled_token_is",
        *given.split(),
    ]
    run += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.device=cpu"]
    settings = dict(leaves_of(public_values(load_run_config(run))))
    found = only(gap_statements(planted(aged({0: 0.014, 1: 0.05}), settings=settings)))
    assert found.overrides == (("async_training.staleness_threshold=0",) if offered else ())
    if offered:
        load_run_config([*run, *found.overrides])
    else:
        with pytest.raises(ConfigError, match=r"no effect|interpolates"):
            load_run_config([*run, "async_training.staleness_threshold=0"])


def test_verls_runs_are_offered_no_keys_that_verl_lacks():
    for metrics in (aged({0: 0.014, 1: 0.05}), pinned(0.5)):
        assert only(gap_statements(planted(metrics, source=FILE_LOGGER))).overrides == ()
    assert only(gap_statements(planted(pinned(0.5)))).overrides == (
        "actor_rollout_ref.rollout.sync_proof.canary_freq=1",
    )


def test_row_16_with_two_ages_is_likely_and_without_growth_silent():
    assert only(gap_statements(planted(aged({0: 0.014, 1: 0.05})))).confidence == "likely"
    assert (
        only(gap_statements(planted(aged({0: 0.014, 1: 0.024})))).cause == "rounding"
    )  # below twice the floor
    assert only(gap_statements(planted(aged({0: 0.014, 1: 0.030})))).cause == "staleness"
    assert only(gap_statements(planted(aged({1: 0.05})))).cause == "rounding"


def test_row_16_a_gap_that_scatters_more_than_it_grows_is_silent():
    assert (
        only(gap_statements(planted(aged({0: 0.014, 1: 0.05, 2: 0.014, 3: 0.06}, 0.5)))).cause == "rounding"
    )


# ---- Row 18.


def pinned(slope: float, floor: float = 0.014) -> dict[str, list[float]]:
    """Each step moves the policy by sqrt(2 * 5e-4) = 0.0316 nats; the gap has grown by slope times all of
    it."""
    moved = [math.sqrt(2 * 5e-4) * step for step in range(STEPS)]
    k3 = [(floor + slope * distance) ** 2 for distance in moved]
    return {PPO_KL: [5e-4] * STEPS, K3: k3, K1: k3}


def test_row_18_old_weights_from_the_start():
    found = only(gap_statements(planted(pinned(0.5))))
    assert (found.cause, found.level, found.confidence, found.row) == (
        "weights never arrive",
        "fault",
        "named",
        18,
    )
    assert found.evidence["slope"] == pytest.approx(0.5)
    assert found.evidence["r"] == pytest.approx(1.0)


@pytest.mark.parametrize(("slope", "row"), [(0.15, 18), (0.07, 20)])
def test_row_18_a_slow_growth_is_not_old_weights(slope, row):
    assert only(gap_statements(planted(pinned(slope)))).row == row


def test_row_18_says_nothing_of_a_gap_that_stays():
    steady = planted({PPO_KL: [5e-4] * STEPS})
    assert only(gap_statements(steady)).row == 11


@pytest.mark.parametrize(("noise", "row"), [(0.15, 18), (0.6, 20)])
def test_row_18_needs_a_straight_line(noise, row):
    chance = random.Random(3)
    k3 = [value * (1 + noise * chance.uniform(-1, 1)) ** 2 for value in pinned(0.15)[K3]]
    assert only(gap_statements(planted(pinned(0.15) | {K3: k3, K1: k3}))).row == row


# ---- Row 19.


def late(floor: float = 0.01, age: float = 0.0, shift: int = 1) -> dict[str, list[float]]:
    chance = random.Random(1)
    moved = [10 ** chance.uniform(-4, -2.5) for _ in range(STEPS)]
    gap = [floor] * shift + [math.sqrt(floor**2 + 1.6 * kl) for kl in moved[: STEPS - shift]]
    k3 = [value**2 for value in gap]
    return {PPO_KL: moved, K3: k3, K1: k3, "rollout_corr/token_age_mean": [age] * STEPS}


def test_row_16_where_all_tokens_but_those_of_the_first_step_have_one_age():
    """One step off in the real loop: sqrt(k3) of the fresh first step, and of tokens
    one update old."""
    old = [0.06 * (1 + 0.5 * math.sin(2.4 * step)) for step in range(1, STEPS)]
    series = {"rollout_corr/age_0_k3_kl": Series([1], [0.0042**2])}
    series["rollout_corr/age_1_k3_kl"] = Series(list(range(2, STEPS + 1)), [gap**2 for gap in old])
    run = planted({})
    run.series = {**run.series, **series}
    found = only(gap_statements(run))
    assert (found.cause, found.confidence, found.row) == ("staleness", "likely", 16)
    run.series = {**run.series, "rollout_corr/age_0_k3_kl": Series([1], [0.04**2])}
    run._finite.clear()
    assert only(gap_statements(run)).row != 16


def test_row_16_where_the_first_updates_were_the_largest():
    """Four updates behind in the real loop: ages 1 to 3 came once each, and with larger gaps than age 4 has
    later."""
    first = {0: 0.0045, 1: 0.163, 2: 0.283, 3: 0.386}
    run = planted({})
    late = {age: Series([age + 1], [gap**2]) for age, gap in first.items()}
    late[4] = Series(list(range(5, STEPS + 1)), [0.26**2] * (STEPS - 4))
    run.series = {**run.series, **{f"rollout_corr/age_{age}_k3_kl": series for age, series in late.items()}}
    found = only(gap_statements(run))
    assert (found.cause, found.confidence, found.evidence["oldest"]) == ("staleness", "likely", 4)


def test_row_19_the_gap_follows_the_update_before():
    found = only(gap_statements(planted(late())))
    assert (found.cause, found.level, found.confidence, found.row) == (
        "one version late",
        "fault",
        "likely",
        19,
    )


def test_row_19_is_silent_for_samples_that_are_said_to_be_old_and_for_other_lags():
    assert only(gap_statements(planted(late(age=1.0)))).row != 19
    assert only(gap_statements(planted(late(shift=3)))).row != 19


def test_row_19_compares_neighbouring_steps_only():
    run = planted(late())
    run.series = {
        name: Series([2 * step for step in series.steps], series.values)
        for name, series in run.series.items()
    }
    assert only(gap_statements(run)).row != 19


@pytest.mark.parametrize(
    ("jumps", "height", "is_named"),
    [
        ((9,), 11.0, True),
        ((9, 30), 4.1, True),
        ((9,), 3.9, False),
        ((), 1.0, False),
        (range(9, 20), 11.0, False),
    ],
)
def test_row_19_of_single_steps(jumps, height, is_named):
    """In the real loop a skipped update made eleven times the noise of the first steps, in one
    step."""
    noise = [0.0137 * (height if step in jumps else 1.2 if step > 1 else 1.0) for step in range(STEPS)]
    series = {"rollout_corr/logit_noise": noise, "sync/rollout_gap_mean": [value / 4 for value in noise]}
    found = only(gap_statements(planted(series)))
    assert (found.cause == "an update was missed") == is_named
    for name in series:  # where the other one is not known
        assert only(gap_statements(planted({name: series[name]}))).cause == found.cause
    if is_named:
        assert (found.level, found.row, found.evidence["step"]) == ("notice", 19, jumps[0] + 1)


def test_a_jump_that_few_tokens_make_is_no_missed_update():
    """Healthy runs of 60 and 120 steps had some: the mean gap is as before."""
    noise = [0.051 if step == 9 else 0.01 for step in range(STEPS)]
    size = [0.0075 if step == 9 else 0.0048 for step in range(STEPS)]
    series = {"rollout_corr/logit_noise": noise, "sync/rollout_gap_mean": size}
    assert only(gap_statements(planted(series))).cause == "rounding"


# ---- Rows 11 and 20.


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
FP32 = {f"{ROLLOUT}.dtype": "float32", f"{ACTOR}.fsdp_config.dtype": "float32"}
PRECISIONS = [
    (FP32 | {f"{ROLLOUT}.dtype": "bfloat16"}, 0.16),
    (FP32 | {f"{ACTOR}.fsdp_config.dtype": "bf16"}, 0.16),
    (FP32, 4e-4),
    (FP32 | {f"{ROLLOUT}.quantization": "fp8_per_channel"}, 0.44),
    (FP32 | {f"{ROLLOUT}.kv_cache_dtype": "fp8"}, 1.2),
]


@pytest.mark.parametrize(("settings", "bound"), PRECISIONS)
@pytest.mark.parametrize("share", [0.98, 1.02])
def test_row_20_noise_that_rounding_cannot_make_from_the_first_step_on(settings, bound, share):
    run = planted({"rollout_corr/logit_noise": [share * bound] * STEPS}, settings)
    found = only(gap_statements(run))
    assert (found.row == 20, found.level == "fault") == (share > 1, share > 1)
    assert ("--replay" in found.next_test) == (share > 1)


def test_row_20_of_the_start_says_nothing_of_old_samples_nor_of_unknown_precision():
    noise = {"rollout_corr/logit_noise": [2.0] * STEPS}
    aged_noise = noise | {"async/token_age/mean": [1.0] * STEPS}
    assert only(gap_statements(planted(aged_noise, PRECISIONS[0][0]))).row == 11
    assert only(gap_statements(planted(noise, {f"{ROLLOUT}.dtype": "auto"}))).row == 11
    assert only(gap_statements(planted(noise))).row == 11


# ---- Row 16, where it is the only one.


@pytest.mark.parametrize(("size", "row"), [(0.0, 11), (0.02, 16)])
def test_what_exact_mode_leaves_of_the_gap_is_staleness(size: float, row: int) -> None:
    gap = {"sync/rollout_gap_mean": [size] * STEPS, "rollout_corr/k3_kl": [size**2] * STEPS}
    found = only(gap_statements(planted(gap, {"actor_rollout_ref.exact": True})))
    assert (found.row, found.level) == (row, "notice" if size else "good")
    assert "exact mode leaves no rounding, all of it is staleness" in found.sentence
    assert "exact mode" not in only(gap_statements(planted(gap, FP32))).sentence


@pytest.mark.parametrize(("settings", "bound"), PRECISIONS)
@pytest.mark.parametrize(("entropy", "part"), [(math.log(4 / 3), 0.5), (50.0, 1.0)])
def test_row_20_a_mean_gap_that_rounding_cannot_make(settings, bound, entropy, part):
    """1 - exp(-entropy) is 1/4 and 1: logits with the largest noise of rounding move log-probs by half of it
    at most, and by all of it."""
    for share, row in ((0.98, 11), (1.02, 20)):
        gap = {"sync/rollout_gap_mean": [share * part * bound] * STEPS, "actor/entropy": [entropy] * STEPS}
        found = only(gap_statements(planted(gap, settings)))
        assert (found.row, found.level) == (row, "fault" if row == 20 else "good")
        assert found.evidence["gap"] == pytest.approx(share * part * bound)
    once = [0.0] * 9 + [9.0] + [0.0] * (STEPS - 10)
    noise = {"rollout_corr/logit_noise": [0.9 * bound] * STEPS}
    assert only(gap_statements(planted({"sync/rollout_gap_mean": once} | noise, settings))).row == 11


@pytest.mark.parametrize(("gap", "row"), [(0.0039, 11), (0.0041, 20)])
def test_row_20_a_mean_gap_that_rounding_does_not_make_in_this_model(gap, row):
    """Four times what the trainer estimated at the start."""
    run = {"sync/rollout_gap_mean": [gap] * STEPS, "sync/canary_rounding": [0.001, *[math.nan] * (STEPS - 1)]}
    found = only(gap_statements(planted(run)))
    assert found.row == row
    old = only(gap_statements(planted(run | {"async/token_age/mean": [1.0] * STEPS})))
    assert old.row == 11
    if row == 20:
        assert "0.0041 nats per token" in found.text
        assert "rounding makes 0.0010 in this model" in found.text


def test_row_20_a_mean_gap_of_old_samples_is_a_notice_that_names_their_age():
    gap = {"sync/rollout_gap_mean": [0.3] * STEPS, "async/token_age/mean": [1.0] * STEPS}
    found = only(gap_statements(planted(gap, PRECISIONS[0][0])))
    assert (found.cause, found.level) == (BEYOND_ROUNDING.name, "notice")
    assert "up to 1 steps old" in found.text
    assert only(gap_statements(planted(gap, {f"{ROLLOUT}.dtype": "auto"}))).row == 11


@pytest.mark.parametrize("sharpest", [-0.5, 0.3, 2.0, 4.0])
@pytest.mark.parametrize("noise", [0.03, 0.3])
def test_noise_on_logits_makes_no_larger_mean_gap(noise, sharpest):
    """Of flat policies and of certain ones."""
    rows = rows_of(Planted(noise=noise, sharpest=sharpest), 1, 1)
    logs, entropies = ([value for row in rows for value in row[name]] for name in ("old_log_prob", "entropy"))
    reported = [value for row in rows for value in row["rollout_log_prob"]]
    mean = statistics.fmean(abs(a - b) for a, b in zip(logs, reported, strict=True))
    assert mean < noise * math.sqrt(1 - math.exp(-statistics.fmean(entropies)))


# ---- Row 17.

BYPASS = {"algorithm.rollout_correction.bypass_mode": True, "actor_rollout_ref.actor.ppo_epochs": 2}


def drifting(rms: float, noise: float, steps: range = range(STEPS)) -> dict[str, list[float]]:
    """Over all updates log-ratios of this size in some steps, of 0.9 times the noise in the others."""
    sizes = [rms if step in steps else 0.9 * noise for step in range(STEPS)]
    k3 = [size**2 / 2 for size in sizes]
    return {K1: k3, K3: k3, f"{PREFIX}logit_noise": [noise] * STEPS}


@pytest.mark.parametrize(
    ("rms", "noise", "names"),
    [
        (0.041, 0.02, True),
        (0.039, 0.02, False),
        (0.021, 1e-6, True),
        (0.019, 1e-6, False),
        (0.15, 0.04, True),
    ],
)
def test_row_17_updates_move_the_policy_away_from_its_samples(rms, noise, names):
    found = only(gap_statements(planted(drifting(rms, noise), BYPASS)))
    assert (found.row == 17) is names
    if names:
        assert (found.cause, found.level, found.confidence) == ("drift within the step", "notice", "named")
        assert found.evidence["drift"] == pytest.approx(rms)
        assert found.overrides == ("actor_rollout_ref.actor.ppo_epochs=1",)


def test_row_17_needs_bypass_mode_and_two_steps_in_a_row():
    assert only(gap_statements(planted(drifting(0.1, 0.02)))).row != 17
    assert only(gap_statements(planted(drifting(0.1, 0.02, range(7, 8)), BYPASS))).row != 17
    found = only(gap_statements(planted(drifting(0.1, 0.02, range(7, 9)), BYPASS)))
    assert (found.row, found.steps) == (17, (8, 9))
    assert (
        only(gap_statements(planted({K3: [0.005] * STEPS, K1: [0.005] * STEPS}, BYPASS))).row != 17
    )  # no noise to compare with


def test_row_18_in_the_real_loop():
    """A quickstart whose receiver kept its first weights: sqrt(k3), mean |log-ratio| and ppo_kl."""
    k3 = [
        0.029,
        0.631,
        0.701,
        0.722,
        0.804,
        0.81,
        0.82,
        0.916,
        0.86,
        0.959,
        0.96,
        0.979,
        0.991,
        0.949,
        0.926,
        0.953,
    ]
    gap = [
        0.018,
        0.529,
        0.727,
        0.676,
        0.868,
        0.827,
        0.92,
        1.059,
        0.943,
        1.072,
        1.189,
        1.194,
        1.132,
        1.17,
        1.079,
        1.127,
    ]
    moved = [
        0.12245,
        0.0416,
        0.00712,
        0.00449,
        0.0167,
        0.02004,
        0.00706,
        0.00895,
        0.00078,
        0.00673,
        0.00625,
        -0.00099,
        0.00472,
    ]
    metrics = {
        K3: [value**2 for value in k3],
        K1: [value**2 for value in k3],
        PPO_KL: [*moved, 0.00191, 0.00074, 0.00037],
    }
    found = only(gap_statements(planted(metrics | {"sync/rollout_gap_mean": gap})))
    assert (found.cause, found.row) == ("weights never arrive", 18)


@pytest.mark.parametrize(("times", "level"), [(3.0, "notice"), (5.5, "fault")])
def test_row_20_is_a_fault_from_four_times_the_first_gap(times, level):
    gap = wave(0.015, 0.0, 8) + wave(0.015 * times, 0.01, STEPS - 8)
    k3 = [value**2 for value in gap]
    assert only(gap_statements(planted({"sync/rollout_gap_mean": gap, K3: k3, K1: k3}))).level == level


@pytest.mark.parametrize(("times", "row"), [(1.7, 11), (2.6, 20)])
def test_row_20_begins_at_twice_the_first_gap(times, row):
    k3 = [value**2 for value in ramp(0.014, 0.014 * times * 1.05)]
    found = only(gap_statements(planted({K3: k3, K1: k3, PPO_KL: [0.05] * STEPS})))
    assert found.row == row
    assert found.level == ("good" if row == 11 else "notice")


@pytest.mark.parametrize(("last", "row"), [(0.054, 11), (0.062, 20)])  # 3.7 and 4.2 times over the last steps
def test_row_20_sees_rare_tokens_that_the_mean_gap_does_not_where_they_are_far_off(last, row):
    k3 = [value**2 for value in ramp(0.014, last)]
    found = only(
        gap_statements(
            planted({K3: k3, K1: k3, PPO_KL: [0.05] * STEPS, "sync/rollout_gap_mean": wave(0.015)})
        )
    )
    assert found.row == row
    assert ("(sqrt(k3))" in found.text) == (row == 20)
    assert "mean |log-ratio|" in only(gap_statements(planted({"sync/rollout_gap_mean": wave(0.015)}))).text


@pytest.mark.parametrize(
    ("rise", "level"), [((0.003, 0.108, 0.082, 0.061), 0.03), ((0.003, 0.108, 0.2, 0.288), 0.16)]
)
def test_old_samples_without_versions_are_a_gap_that_has_grown(rise, level):
    """The first step cannot have old ones: its gap, those of the next steps, and that from step 5 on, as in
    real runs one and four updates behind."""
    gap = [*rise, *wave(level, steps=STEPS - 4)]
    series = {K3: [size**2 for size in gap], "sync/rollout_gap_mean": gap}
    found = only(gap_statements(planted(series)))
    assert (found.cause, found.level) == ("grown, cause not separable by metrics", "fault")
    assert "record the version of each token" in found.next_test


def test_a_gap_that_was_nothing_at_the_start_can_grow():
    k3 = [0.0] * 4 + [1e-4] * (STEPS - 4)
    found = only(
        gap_statements(
            planted({K3: k3, K1: k3, PPO_KL: [0.05] * STEPS, "sync/rollout_gap_mean": wave(0.015)})
        )
    )
    assert (found.row, found.level) == (20, "fault")
    assert "from 0.0000 to 0.0100" in found.sentence


def test_without_a_comparison_nothing_is_said():
    gap = [name for name in healthy() if name.startswith("rollout_corr/")]
    found = only(gap_statements(planted({}, without=gap)))
    assert (found.level, found.cause) == ("unknown", "not measured")
    assert (
        "calculate_log_probs" in only(gap_statements(planted({}, without=gap, source=FILE_LOGGER))).sentence
    )


def test_a_mean_gap_alone_is_enough_to_say_how_large_it_is():
    gap = [name for name in healthy() if name.startswith("rollout_corr/")]
    found = only(gap_statements(planted({"sync/rollout_gap_mean": wave(0.015)}, without=gap)))
    assert found.evidence["gap"] == pytest.approx(0.015, rel=0.05)


# ---- What must never happen.


def heavy_tailed_z(chance: random.Random, tokens: int = 50) -> float:
    """The mean of numbers whose tail has no variance, in its standard errors."""
    values = [chance.gauss(0, 1) / math.sqrt(chance.random()) for _ in range(tokens)]
    return math.fsum(values) / math.sqrt(math.fsum(value**2 for value in values))


def test_no_healthy_run_is_called_faulty():
    """Heavy tails, and a gap that wanders by half."""
    for seed in range(60):
        chance = random.Random(seed)
        steps, level, k3, z, moved = 250, 0.0, [], [], []
        for _ in range(steps):
            level = 0.95 * level + chance.gauss(0, 0.08)
            k3.append(2e-4 * math.exp(level))
            z.append(heavy_tailed_z(chance))
            moved.append(10 ** chance.uniform(-4, -2.5))
        run = planted({K3: k3, K1: k3, Z: z, PPO_KL: moved})
        assert [found.cause for found in gap_statements(run) if found.level == "fault"] == [], seed


@pytest.mark.parametrize(
    ("survival", "is_named"),
    [
        ([0.1, 0.4, 0.9], True),  # the median is 0.4
        ([0.1, 0.5, 0.4, 0.9, 1.0], False),  # 0.5
        ([0.1, 0.1], False),  # two may be chance
        ([1.02, 0.97, 1.0], False),
    ],
)
def test_row_26_updates_that_rounding_takes_away(survival, is_named):
    measured = survival + [math.nan] * (STEPS - len(survival))
    (found,) = gap_statements(planted({"sync/update_survival": measured}))
    assert (found.cause == "updates lost in rounding") == is_named
    if is_named:
        assert (found.level, found.confidence, found.row) == ("notice", "named", 26)
        assert found.evidence == {"survival": 0.4, "count": 3}
        assert "leaves 40% of an update" in found.text
        assert found.steps == (1, 3)


@pytest.mark.parametrize(
    ("settings", "override"),
    [
        ({"actor_rollout_ref.model.lora_rank": 8}, "actor_rollout_ref.model.lora.merge=False"),
        (
            {
                "actor_rollout_ref.model.lora_rank": 8,
                "actor_rollout_ref.model.lora.merge": False,
                "actor_rollout_ref.rollout.quantization": "fp8_per_channel",
            },
            "actor_rollout_ref.rollout.quantization=null",
        ),
        ({"actor_rollout_ref.rollout.quantization": "fp8"}, "actor_rollout_ref.rollout.quantization=null"),
        ({}, None),
    ],
)
def test_row_26_says_what_brings_updates_to_the_engine(settings, override):
    (found,) = gap_statements(planted({"sync/update_survival": [0.2] * STEPS}, settings))
    assert found.overrides == (() if override is None else (override,))


NEEDS = {
    "updates lost in rounding": [{"sync/update_survival"}],
    "overflow or empty logits": [
        {"rollout_corr/nonfinite_token_fraction"},
        {"rollout_corr/safety_clamped_fraction"},
    ],
    "sampling filter not mirrored": [{Z}, {K1, K3, CHI2}],
    "sampling filter, banned token or raw log-probs": [{Z}, {K1, K3, CHI2}],
    "not the sampled tokens, or not their log-probs": [{Z}, {K1, K3, CHI2}],
    "staleness": [{"rollout_corr/age_0_k3_kl", "rollout_corr/age_1_k3_kl"}],
    "weights never arrive": [{PPO_KL, K3}, {PPO_KL, "sync/rollout_gap_mean"}],
    "an update was missed": [{"rollout_corr/logit_noise"}, {"sync/rollout_gap_mean"}],
    "large from the start, cause not separable by metrics": [{"rollout_corr/logit_noise"}],
    BEYOND_ROUNDING.name: [{"sync/rollout_gap_mean"}],
    "one version late": [{PPO_KL, K3}, {PPO_KL, "sync/rollout_gap_mean"}],
    "grown, cause not separable by metrics": [{K3}, {"sync/rollout_gap_mean"}],
    "rounding": [{K3}, {"sync/rollout_gap_mean"}],
    "not measured": [set()],
}
WRONG = {
    "sync/update_survival": [0.1] * STEPS,
    **with_mean_ratio(0.9),
    **aged({0: 0.014, 1: 0.06}),
    Z: [-30.0] * STEPS,
    "rollout_corr/nonfinite_token_fraction": [0.1] * STEPS,
    "sync/rollout_gap_mean": ramp(0.01, 0.5),
    PPO_KL: [5e-4] * STEPS,
}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_cause_is_claimed_from_absent_data(data):
    kept = data.draw(st.sets(st.sampled_from(sorted({*healthy(), *WRONG}))))
    steps = data.draw(st.integers(1, STEPS))
    metrics = {name: values[:steps] for name, values in {**healthy(), **WRONG}.items() if name in kept}
    run = planted(metrics, without=[name for name in healthy() if name not in kept]) if metrics else None
    for found in gap_statements(run) if run is not None else ():
        assert any(needed <= kept for needed in NEEDS[found.cause]), found


# ---- Signatures.


def signed(steps: range, changed: dict[str, float]) -> dict[str, list[float]]:
    """A run's healthy signatures, with others in ``steps``."""
    return {
        f"{PREFIX}{name}": [
            changed.get(name, value) if step in steps else value for step in range(1, STEPS + 1)
        ]
        for name, value in SIGNS.items()
    }


def test_signatures_name_a_cause_in_neighbouring_steps():
    found = only(
        gap_statements(planted(signed(range(7, 12), COOLER), {"actor_rollout_ref.rollout.temperature": 0.9}))
    )
    assert (found.cause, found.level, found.confidence, found.row, found.steps) == (
        "temperature",
        "fault",
        "named",
        8,
        (7, 11),
    )
    assert "samples at temperature 0.81, the trainer scores at 0.90" in found.text  # 0.9 / (1 + 0.111)
    assert only(gap_statements(planted(signed(range(7, 8), COOLER)))).row == 11


@pytest.mark.parametrize(
    ("slopes", "is_one"),
    [
        (ramp(0.0, 0.024), False),
        (ramp(-0.1, -0.13), False),
        (ramp(-0.1, -0.11), True),  # 9 % of itself, as that of half the trainer's temperature may
        (ramp(0.01, 0.0125), True),  # smaller differences count for nothing
        ([0.001] * 20 + [-0.111] * 20, True),  # another temperature from a step on
    ],
)
def test_a_temperature_has_one_slope(slopes, is_one):
    metrics = signed(range(STEPS + 1), COOLER) | {f"{PREFIX}temperature_slope": slopes}
    found = only(gap_statements(planted(metrics)))
    assert (found.row, found.level, found.cause == "temperature") == (8, "fault", is_one)
    if not is_one:
        assert f"grows from {slopes[0]:.3f} to {slopes[-1]:.3f} over the run" in found.text
        assert "--digests" in found.next_test


@pytest.mark.parametrize(
    ("bend", "is_one"), [((-21.0, 0.08), False), ((-5.0, 0.08), True), ((-21.0, 0.01), True)]
)
def test_a_temperature_is_a_straight_line(bend, is_one):
    run = planted(signed(range(STEPS + 1), COOLER))
    run.tokens = TokenData([1], (), 0, (), None, {}, bend=Bend(*bend))
    found = only(gap_statements(run))
    assert (found.row, found.cause == "temperature") == (8, is_one)
    assert ("its bend explains 8% more, z -21" in found.text) is not is_one


def test_two_causes_one_after_the_other_are_both_named():
    metrics = {
        name: [*first[:20], *last[20:]]
        for (name, first), last in zip(
            signed(range(3, 9), {"lag": 1.0}).items(), signed(range(30, 35), COOLER).values(), strict=True
        )
    }
    assert [(found.row, found.steps) for found in gap_statements(planted(metrics))] == [
        (2, (3, 8)),
        (8, (30, 34)),
    ]


def test_what_cannot_be_told_names_the_key_that_records_it():
    key = "algorithm.rollout_correction.diagnostics=full"
    assert key in only(gap_statements(planted({}))).text
    assert "verl_rc would record" in only(gap_statements(planted({}, source=FILE_LOGGER))).text
    assert "cannot be told" not in only(gap_statements(planted(signed(range(0), {})))).text


def test_what_was_looked_at_depends_on_what_was_recorded():
    with_signatures, without = planted(signed(range(0), {})), planted({})
    assert "temperature" in checked_rules(with_signatures)
    assert "temperature" not in checked_rules(without)
    assert "temperature" in invisible_causes(without)
    assert "temperature" not in invisible_causes(with_signatures)
