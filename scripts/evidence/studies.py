"""The studies: each question, its arms and its seeds, fixed before anything is run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ACCURACY = "val-core/digits/acc/mean@1"
"""What arms are compared by: greedy accuracy on the validation prompts."""
CORRECTIONS = ("disabled", "decoupled_token_is", "decoupled_seq_is", "bypass_ppo_clip")


@dataclass(frozen=True)
class Task:
    """What the runs of a study start from: problems, and a model after a warm start."""

    folder: str
    """Below the folder of all studies; empty: that folder."""
    settings: Mapping[str, str]
    """Environment of ``scripts/warm_start.sh`` beside its defaults."""


QUICKSTART = Task("", {})


@dataclass(frozen=True)
class Study:
    """Arms that differ in one thing at a time, each run with every seed. All runs start from one model."""

    question: str
    expectation: str
    """What was expected, written before the first run."""
    found: str
    """What the runs say so far, without the numbers, which the table has."""
    common: tuple[str, ...]
    """Overrides of every run."""
    arms: Mapping[str, tuple[str, ...]]
    """Overrides of an arm, by its name."""
    seeds: tuple[int, ...]
    minutes: float
    """Of one run, alone on two cores."""
    figures: tuple[str, ...]
    """A figure for each of these words, with the arms that have it in their name."""
    quick: tuple[str, ...]
    """Arms of ``--quick``, which takes the first seed alone: those that show the sign of the effect."""
    task: Task = QUICKSTART
    planted: Mapping[str, str] = field(default_factory=dict)
    """What the workers do wrong, by arm; see ``scripts/planted_faults/workers.py``."""


def _staleness() -> Study:
    rates = {"lr1": "5e-5", "lr4": "2e-4"}
    arms = {}
    for rate, lr in rates.items():
        for k in (0, 1, 4, 8):
            ahead = ("async=one_step_off", f"async_training.staleness_threshold={k}") if k else ()
            for correction in CORRECTIONS:
                given = (f"correction={correction}", f"actor_rollout_ref.actor.optim.lr={lr}")
                arms[f"k{k} {correction} {rate}"] = (*given, *ahead)
    return Study(
        question="Samples come from weights that are up to k steps old. What does that cost, and what does correction give back?",
        expectation="At the usual learning rate (lr1) all arms learn alike. At four times that rate (lr4) and k = 8 the arm "
        "without correction falls behind or breaks, and token weights keep most of what k = 0 reaches.",
        found="At the usual learning rate accuracy without correction falls with every step of age, from the first one on: the "
        "expectation was wrong there. In step all corrections learn alike, and one step old they keep that but for a few "
        "hundredths. At four steps bypass mode's clip keeps nearly all of it, and weights fall behind; at eight sequence weights "
        "keep nearly all, though their ESS is the lowest, and the run without correction is broken. At four times the rate runs "
        "in step learn little: those with token weights most in each seed, those without correction and with bypass "
        "mode's clip least, and one with sequence weights breaks. One step and more old every run breaks at that rate, but for "
        "bypass mode's at one step.",
        common=(
            *("task=digits", "hardware=cpu", "actor_rollout_ref.rollout.quantization=fp8_per_channel"),
            *("trainer.total_training_steps=60", "trainer.test_freq=10", "trainer.save_freq=-1"),
            *("actor_rollout_ref.actor.optim.lr_scheduler_type=constant", "trainer.report=never"),
        ),
        arms=arms,
        seeds=(1, 2, 3),
        minutes=2.5,
        figures=CORRECTIONS,
        quick=("k0 decoupled_token_is lr4", "k8 disabled lr4", "k8 decoupled_token_is lr4"),
    )


STUDIES: Mapping[str, Study] = {"staleness": _staleness()}
