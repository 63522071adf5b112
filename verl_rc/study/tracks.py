"""The tracks of CorrectionBench with engines: fixed conditions, under which a method trains."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from verl_rc.bench.method import LOSS_PREFIX, find_method, read_correction
from verl_rc.config.algorithms import PolicyLossOptions
from verl_rc.config.errors import ConfigError
from verl_rc.config.rollout_correction import PRESETS
from verl_rc.config.user_code import import_attribute
from verl_rc.study.study import QUICKSTART, Study, Task
from verl_rc.study.tasks import ENGINES, FP8_WEIGHTS, LONG, LONG_RUN, SHORT_RUN, UNGUARDED

CONTROL = "control"
"""The arm that methods are measured by: engine in float32, samples of the newest weights, no correction."""
SEEDS = (1, 2, 3)
"""A method must not be tuned on them."""
_RATE = "actor_rollout_ref.actor.optim.lr"
_USUAL_RATE, _HIGH_RATE = f"{_RATE}=5e-5", f"{_RATE}=2e-4"


@dataclass(frozen=True)
class Track:
    """A track of the bench, without a method."""

    common: tuple[str, ...]
    """Overrides of every run."""
    conditions: Mapping[str, tuple[str, ...]]
    """Overrides of a condition, by its name."""
    control: tuple[str, ...]
    """Overrides of the control."""
    minutes: float
    """Of one run."""
    task: Task = QUICKSTART
    planted: Mapping[str, str] = field(default_factory=dict)
    """What the workers do wrong, by condition; see ``scripts/planted_faults/workers.py``."""

    def study(self, methods: Sequence[str]) -> Study:
        """The control and these methods, each under every condition; an arm is ``CONDITION METHOD``.

        Raises ``ValueError`` for a method that does not exist, or that the trainer cannot run.
        """
        pairs = [(name, method) for method in methods for name in self.conditions]
        arms = {f"{name} {method}": (*overrides_of(method), *self.conditions[name]) for name, method in pairs}
        return Study(
            common=self.common,
            arms={CONTROL: ("correction=disabled", *self.control), **arms},
            seeds=SEEDS,
            minutes=self.minutes,
            task=self.task,
            planted={
                f"{name} {method}": self.planted[name] for name, method in pairs if name in self.planted
            },
            code={f"{name} {method}": _hash_of_code(method) for name, method in pairs if ":" in method},
        )


def _ahead(steps: int) -> tuple[str, str]:
    return "async=one_step_off", f"async_training.staleness_threshold={steps}"


TRACKS: Mapping[str, Track] = {
    # Answers of 13 tokens beside an engine with fp8 weights; samples of the newest weights, up to one, four
    # and eight steps old, or all of the first weights (frozen); 4x: at four times the usual learning rate.
    "short": Track(
        common=SHORT_RUN,
        conditions={
            "k0": (FP8_WEIGHTS, _USUAL_RATE),
            "k1": (FP8_WEIGHTS, _USUAL_RATE, *_ahead(1)),
            "k4": (FP8_WEIGHTS, _USUAL_RATE, *_ahead(4)),
            "k8": (FP8_WEIGHTS, _USUAL_RATE, *_ahead(8)),
            "frozen": (FP8_WEIGHTS, _USUAL_RATE, *UNGUARDED),
            "k0-4x": (FP8_WEIGHTS, _HIGH_RATE),
            "k1-4x": (FP8_WEIGHTS, _HIGH_RATE, *_ahead(1)),
        },
        control=(*ENGINES["fp32"], _USUAL_RATE),
        minutes=2.5,
        planted={"frozen": "frozen"},
    ),
    # Answers of 49 tokens beside an engine with fp8 weights and an fp8 cache (emulated).
    "long": Track(
        common=LONG_RUN,
        conditions={"fp8": ENGINES["fp8both"]},
        control=ENGINES["fp32"],
        minutes=7,
        task=LONG,
        planted={"fp8": "fp8_cache"},
    ),
    # Answers of 13 tokens beside an engine in float32, in bf16, and with fp8 weights.
    "noise": Track(
        common=(*SHORT_RUN, _USUAL_RATE),
        conditions={"fp32": ENGINES["fp32"], "bf16": ENGINES["bf16"], "fp8": ENGINES["fp8w"]},
        control=ENGINES["fp32"],
        minutes=2,
    ),
}
"""By name. Conditions that a study of docs/evidence.md has, too, share its runs."""


def _hash_of_code(method: str) -> str:
    """Of the file of a function of the user's own; what that file imports is not looked at."""
    function = import_attribute(method, f"the method {method!r}", "function")
    return sha256(Path(inspect.getfile(function)).read_bytes()).hexdigest()[:16]


def overrides_of(method: str) -> tuple[str, ...]:
    """What lets the trainer run a method of ``verl_rc.bench.method.find_method``.

    Raises ``ValueError`` for a method that does not exist, and for a weight that is a function.
    """
    if method in PRESETS:
        return (f"correction={method}",)
    if method.endswith((".yaml", ".yml")):
        preset, values = read_correction(Path(method))
        keys = (f"algorithm.rollout_correction.{key}={value}" for key, value in values.items())
        return f"correction={preset}", *keys
    bench_method = find_method(method)
    if bench_method.weight is not None:
        raise ConfigError(
            f"a track with an engine needs what the trainer can run; {method} is a weight, which it takes "
            "from correction keys alone: write it as a loss of one argument, PolicyLossInputs"
        )
    actor = "actor_rollout_ref.actor"
    options = (
        f"{actor}.policy_loss.{key}={value}"
        if key in PolicyLossOptions.model_fields
        else f"{actor}.{key}={value}"
        for key, value in bench_method.options.items()
    )
    mode = f"{actor}.policy_loss.loss_mode={method.removeprefix(LOSS_PREFIX).partition(',')[0]}"
    return "correction=bypass_ppo_clip", mode, *options
