"""The table of causes: each row on signatures that the specification gives for it, silence beside its bounds,
words, alerts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_series import COOLER, planted
from planted_series import SIGNS as HEALTHY

from verl_rc.algorithm.health.cause_table import CAUSES
from verl_rc.algorithm.health.causes import (
    PREFIX,
    SIGNATURE_METRICS,
    NamedCauses,
    cause_of,
    name_causes,
    signature_statement,
)
from verl_rc.algorithm.health.ranges import CauseEpisode, CauseHistory
from verl_rc.algorithm.health.signature_causes import OTHER_TOKENS, SIGNATURE_CAUSES
from verl_rc.correction import compute_rollout_correction
from verl_rc.insight.verdict.gap import gap_statements
from verl_rc.metrics.catalog import CATALOG

FILTER = {"missing_mass": 0.038, "missing_mass_z": 80.0}  # top-p 0.95
BANNED = FILTER | {"temperature_r2": 0.5}
RAW = {
    "missing_mass": -0.2,
    "missing_mass_z": -60.0,
    "temperature_slope": 0.3,
    "temperature_r2": 0.97,
    "temperature_z": 400.0,
}
PLANTED = {
    2: {"lag": 1.0},
    3: {"rounded_fraction": 1.0},
    4: RAW,
    5: FILTER,
    6: BANNED,
    7: {"missing_mass": -0.05, "missing_mass_z": -9.0},
    8: COOLER,
    10: {"surprisal_excess": -0.28},
    12: {"concentration": 0.999, "logit_noise": 0.8},
    13: {"noisiest_engine_z": 4.0},
}


NO_ENTROPIES = {
    name: value
    for name, value in HEALTHY.items()
    if not name.startswith(("temperature", "surprisal", "logit_noise"))
} | {"logit_noise_least": 0.03, "logit_noise_most": 0.042}
BEHIND_PREFIXES = {"prefix_slope": 1e-3, "prefix_r2": 0.01, "prefix_z": 1.5, "prefix_spread": 0.6}
EVEN = BEHIND_PREFIXES | {"prefix_spread": 0.1}
WARMER = {"prefix_slope": 0.3, "prefix_r2": 0.97, "prefix_z": 60.0, "prefix_spread": 0.6}
MORE_MASS = {"missing_mass": -0.05, "missing_mass_z": -9.0}
PLANTED_WITHOUT_ENTROPIES = [
    (BEHIND_PREFIXES, None),
    (FILTER, "sampling filter, banned token or raw log-probs"),
    (FILTER | EVEN, "sampling filter or banned token"),
    (FILTER | EVEN | {"prefix_spread": 0.49}, "sampling filter or banned token"),
    (FILTER | EVEN | {"prefix_spread": 0.51}, "sampling filter, banned token or raw log-probs"),
    (MORE_MASS, "raw log-probs, or not those of the sampled tokens"),
    (MORE_MASS | BEHIND_PREFIXES, "not the sampled tokens, or not their log-probs"),
    (MORE_MASS | WARMER, "raw log-probs at another temperature"),
    (WARMER, "temperature"),
    ({"concentration": 0.999, "logit_noise_least": 0.6}, "few tokens are others than sampled"),
    ({"concentration": 0.999, "logit_noise_most": 0.6}, None),
]


@pytest.mark.parametrize(("changed", "name"), PLANTED_WITHOUT_ENTROPIES)
def test_what_is_named_without_entropies(changed: dict[str, float], name: str | None) -> None:
    cause = cause_of(NO_ENTROPIES | changed)
    assert (cause and cause.name) == name
    if cause is not None:
        said = signature_statement(cause, [NO_ENTROPIES | changed], 1.0)
        assert said.confidence == ("named" if cause.is_specific else "likely")


def test_a_name_leads_to_the_first_of_its_rows() -> None:
    assert CAUSES[OTHER_TOKENS.name] is OTHER_TOKENS
    assert {cause.name for cause in SIGNATURE_CAUSES} <= CAUSES.keys()


@pytest.mark.parametrize(
    ("behind", "holds"),
    [(BEHIND_PREFIXES, True), (WARMER, False), (WARMER | {"prefix_slope": 0.95}, True)],
)
def test_other_tokens_without_entropies_are_no_temperature(behind: dict[str, float], holds: bool) -> None:
    (rule,) = [one for one in SIGNATURE_CAUSES if one.name == OTHER_TOKENS.name and one is not OTHER_TOKENS]
    seen = rule.evidence_in(NO_ENTROPIES | MORE_MASS | behind)
    assert seen is not None
    assert rule.holds(seen) is holds
    assert "R² ≤ 0.9 or slope ≥ 0.9" in rule.condition


def test_the_slope_of_other_tokens_is_no_temperature() -> None:
    """Log-probs of other tokens say nothing of those that were sampled: l varies with log p, slope 1."""
    assert row_of(RAW | {"temperature_slope": 0.95}) == 7
    assert row_of(COOLER | {"temperature_slope": 0.95}) is None
    # A prefix behind which all is alike does not make them a filter where entropies are known.
    assert row_of(RAW | FILTER | EVEN | {"temperature_slope": 0.95}) == 7


def row_of(changed: dict[str, float]) -> int | None:
    cause = cause_of(HEALTHY | changed)
    return None if cause is None else cause.row


@pytest.mark.parametrize("row", PLANTED)
def test_every_row_is_named_where_it_is_planted(row: int) -> None:
    assert row_of(PLANTED[row]) == row


@pytest.mark.parametrize("changed", [HEALTHY | FILTER, NO_ENTROPIES | FILTER | EVEN, NO_ENTROPIES | FILTER])
def test_no_filter_is_blamed_where_the_trainer_has_the_supports(changed: dict[str, float]) -> None:
    """Of such a run the fault lies elsewhere, and stays one."""
    blamed, found = cause_of(changed), cause_of(changed, mirrors_filter=True)
    assert blamed is not None
    assert found is not None
    assert (blamed.row, found.row) == (5, 7)
    metrics = {f"{PREFIX}{name}": value for name, value in changed.items()}
    named = name_causes(metrics, 1, CauseHistory(), 1.0, mirrors_filter=True)
    assert list(named.history.episodes) == [found.name]


def test_every_cause_is_planted_and_healthy_is_silent() -> None:
    assert sorted(PLANTED) == sorted({cause.row for cause in SIGNATURE_CAUSES})
    named = {cause_of(HEALTHY | changed) for changed in PLANTED.values()}
    named |= {cause_of(NO_ENTROPIES | changed) for changed, _ in PLANTED_WITHOUT_ENTROPIES}
    assert named == {*SIGNATURE_CAUSES, None}
    assert row_of({}) is None
    assert all(CATALOG.find(f"{PREFIX}{name}") is not None for name in SIGNATURE_METRICS)
    assert set(SIGNATURE_METRICS) == {*HEALTHY, *NO_ENTROPIES, *BEHIND_PREFIXES}


@pytest.mark.parametrize(
    ("inside", "outside", "row"),
    [
        ({"rounded_fraction": 0.98}, {"rounded_fraction": 0.995}, 3),
        (RAW | {"temperature_r2": 0.85}, RAW | {"temperature_r2": 0.95}, 4),
        (FILTER | {"missing_mass_z": 5.0}, FILTER | {"missing_mass_z": 7.0}, 5),
        (FILTER | {"missing_mass": 0.0008}, FILTER | {"missing_mass": 0.0012}, 5),
        (FILTER | {"concentration": 0.95}, FILTER | {"concentration": 0.8}, 5),
        (FILTER | {"temperature_r2": 0.25}, FILTER | {"temperature_r2": 0.35}, 6),
        (FILTER | {"temperature_r2": 0.95}, FILTER | {"temperature_r2": 0.85}, 6),
        (BANNED | {"temperature_slope": -0.01}, BANNED | {"temperature_slope": 0.01}, 6),
        (BANNED | {"temperature_slope": 0.01}, BANNED | {"temperature_slope": -0.01}, 5),
        (
            {"missing_mass": -0.0008, "missing_mass_z": -9.0},
            {"missing_mass": -0.0012, "missing_mass_z": -9.0},
            7,
        ),
        (COOLER | {"temperature_r2": 0.25}, COOLER | {"temperature_r2": 0.35}, 8),
        (COOLER | {"temperature_z": -25.0}, COOLER | {"temperature_z": -35.0}, 8),
        (COOLER | {"temperature_slope": -0.002}, COOLER | {"temperature_slope": -0.004}, 8),
        (
            COOLER | {"temperature_r2": 0.89, "logit_noise": 3.0},
            COOLER | {"temperature_r2": 0.91, "logit_noise": 3.0},
            8,
        ),
        # Of R² 0.51 a share of 0.7 of the noise is left.
        (
            COOLER | {"temperature_r2": 0.51, "logit_noise": 0.72},
            COOLER | {"temperature_r2": 0.51, "logit_noise": 0.71},
            8,
        ),
        ({"surprisal_excess": 0.029}, {"surprisal_excess": 0.031}, 10),
        ({"surprisal_excess": -0.029}, {"surprisal_excess": -0.031}, 10),
        ({"concentration": 0.97, "logit_noise": 0.8}, {"concentration": 0.99, "logit_noise": 0.8}, 12),
        ({"concentration": 0.99, "logit_noise": 0.49}, {"concentration": 0.99, "logit_noise": 0.51}, 12),
        ({"noisiest_engine_z": 2.9}, {"noisiest_engine_z": 3.1}, 13),
    ],
)
def test_the_bounds(inside: dict[str, float], outside: dict[str, float], row: int) -> None:
    assert row_of(outside) == row
    assert row_of(inside) != row


@settings(max_examples=200)
@given(kept=st.sets(st.sampled_from(sorted(HEALTHY))), row=st.sampled_from(sorted(PLANTED)))
def test_nothing_is_claimed_from_absent_metrics(kept: set[str], row: int) -> None:
    found = cause_of({name: value for name, value in (HEALTHY | PLANTED[row]).items() if name in kept})
    assert found is None or set(found.needs) <= kept


def test_sentences_name_the_temperature_and_the_kept_mass() -> None:
    steps = [HEALTHY | COOLER | {"temperature_slope": slope} for slope in (-0.1, -1 / 9, -0.2)]
    cause = cause_of(steps[0])
    assert cause is not None
    said = signature_statement(cause, steps, temperature=1.0, steps=(3, 5))
    assert said.text == (
        "The engine samples at temperature 0.90, the trainer scores at 1.00: slope -0.111, which explains "
        "97% of the gap (named) [steps 3 to 5]"
    )
    raw = cause_of(HEALTHY | RAW)
    assert raw is not None
    assert (
        "samples at temperature 0.70 and reports log-probs at 1.00"
        in signature_statement(raw, [HEALTHY | RAW], 0.7).sentence
    )
    dropped = cause_of(HEALTHY | FILTER)
    assert dropped is not None
    assert "96.2%" in signature_statement(dropped, [HEALTHY | FILTER], 1.0).text
    for row, changed in PLANTED.items():
        found = cause_of(HEALTHY | changed)
        assert found is not None
        assert (found.row, signature_statement(found, [HEALTHY | changed], 1.0).level) == (row, "fault")


# ---- While a run trains.


def follow(steps: list[dict[str, float]], temperature: float = 1.0) -> list[dict[str, str]]:
    """What is said in each step; the floor comes from the run itself."""
    history, texts = CauseHistory(), []
    for step, changed in enumerate(steps, 1):
        metrics = {f"{PREFIX}{name}": value for name, value in (HEALTHY | changed).items()}
        named = name_causes(metrics, step, history, temperature)
        history = named.history
        assert named.has_cause == any(one.is_told and one.last == step for one in history.episodes.values())
        assert named.metrics["alerts/cause"] == named.has_cause
        texts.append({name: message.text for name, message in named.messages.items()})
    return texts


def test_a_cause_is_said_in_its_second_step_once_and_again_when_it_has_ended() -> None:
    said = follow([{}, COOLER, COOLER, COOLER, {}, COOLER, {}, {}, {}, {}])
    assert [list(texts) for texts in said] == [
        [],
        [],
        ["temperature"],
        [],
        [],
        [],
        [],
        [],
        ["temperature"],
        [],
    ]
    assert "samples at temperature 0.90" in said[2]["temperature"]
    assert "(since step 2)" in said[2]["temperature"]
    assert said[8]["temperature"] == "ended: seen from step 2 to 6"


def test_the_report_says_what_the_alert_said() -> None:
    alert = follow([{}, COOLER, COOLER])[2]["temperature"]
    metrics = {f"{PREFIX}{name}": [HEALTHY[name], *[{**HEALTHY, **COOLER}[name]] * 2] for name in HEALTHY}
    (said,) = gap_statements(planted(metrics))
    assert alert == f"{said.sentence} (since step 2). {said.next_test}"


def test_single_steps_say_nothing() -> None:
    said = follow([COOLER, {}, COOLER, {}, {}, {}, {}, FILTER, COOLER, FILTER])
    assert not any(said)


def test_the_floor_is_that_of_the_first_two_steps() -> None:
    metrics = {f"{PREFIX}missing_mass": 0.0, f"{PREFIX}logit_noise": 0.04}
    named = name_causes(metrics, 2, CauseHistory(first_noise=(0.02,)), 1.0)
    assert named.metrics[f"{PREFIX}logit_noise_floor"] == pytest.approx(0.03)
    without = name_causes({f"{PREFIX}logit_noise": 9.0}, 2, CauseHistory(), 1.0)  # no signatures
    assert without == NamedCauses(CauseHistory())
    later = name_causes({**metrics, f"{PREFIX}logit_noise": 9.0}, 3, named.history, 1.0)
    assert later.history.first_noise == (0.02, 0.04)


def test_causes_are_followed_over_a_resume() -> None:
    history = CauseHistory({"temperature": CauseEpisode(4, 5)}, (0.02, 0.02))
    metrics = {f"{PREFIX}{name}": value for name, value in (HEALTHY | COOLER).items()}
    named = name_causes(metrics, 6, history, 1.0)
    message = named.messages["temperature"]
    assert "(since step 4)" in message.text
    assert message.since_step == 4
    assert message.evidence == pytest.approx(
        {**COOLER, "logit_noise": 0.035, "temperature": 1.0, "other": 1 / 1.111}
    )
    assert named.has_cause


# ---- What must never happen.


def healthy_batch(seed: int, rows: int = 64, width: int = 12, vocabulary: int = 16) -> dict[str, float]:
    """Signatures of tokens from a policy whose logits the engine knows with noise, from float32's to that of
    an fp8 cache."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.rand(2, generator=generator).tolist()
    sharpness, noise = 1 + 5 * first, 10 ** (-6 + 4.9 * second)
    logits = sharpness * torch.randn(rows, width, vocabulary, generator=generator)
    engine = (logits + noise * torch.randn(logits.shape, generator=generator)).log_softmax(-1)
    train = logits.log_softmax(-1)
    tokens = torch.multinomial(engine.exp().flatten(0, 1), 1, generator=generator).view(rows, width, 1)
    entropies = -(train.exp() * train).sum(-1)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    found = compute_rollout_correction(
        *(policy.gather(-1, tokens)[..., 0] for policy in (train, engine)),
        mask,
        {"diagnostics": "full"},
        entropies=entropies,
        sum_pi_squared=train.exp().square().sum(-1),
        varentropies=(train.exp() * (train + entropies[..., None]).square()).sum(-1),
        engines=torch.arange(rows) % 3,
    ).metrics()
    return {name.removeprefix(PREFIX): value for name, value in found.items()} | {"logit_noise_floor": noise}


def test_healthy_batches_name_no_cause() -> None:
    """Single steps name no cause; a run says one only when two in a row agree."""
    found = [cause_of(healthy_batch(seed)) for seed in range(150)]
    assert [(seed, cause.name) for seed, cause in enumerate(found) if cause is not None] == []
    assert math.isfinite(healthy_batch(0)["logit_noise"])
