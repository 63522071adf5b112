"""Runs of a report whose series are written by hand; and the folders that such runs would have left."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_rc.insight.run_folder.records import OWN_RUN, RunData, Series
from verl_rc.metrics.sinks.local import JsonlSink

STEPS = 40
SETTINGS: dict[str, Any] = {
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "algorithm.rollout_correction.rollout_is": "token",
    "data.max_response_length": 64,
}

SIGNS = {
    "missing_mass": 1e-5,
    "missing_mass_z": 0.4,
    "lag": 0.0,
    "rounded_fraction": 1e-4,
    "concentration": 0.5,
    "temperature_slope": 1e-3,
    "temperature_r2": 0.01,
    "temperature_z": 1.5,
    "surprisal_excess": 0.005,
    "surprisal_excess_bound": 0.03,
    "logit_noise": 0.035,
    "noisiest_engine": 1.0,
    "noisiest_engine_ratio": 1.1,
    "noisiest_engine_z": -9.0,
}
"""Signatures of a step without a fault, by their names below rollout_corr/."""
COOLER = {"temperature_slope": -0.111, "temperature_r2": 0.97, "temperature_z": -500.0}
"""What an engine at temperature 0.9 changes of them."""


def wave(mean: float, share: float = 0.03, steps: int = STEPS) -> list[float]:
    """Values around a mean that do not repeat and have no trend."""
    return [mean * (1 + share * math.sin(2.4 * step + 1)) for step in range(steps)]


def ramp(first: float, last: float, steps: int = STEPS) -> list[float]:
    return [first + (last - first) * step / (steps - 1) for step in range(steps)]


def healthy(steps: int = STEPS) -> dict[str, list[float]]:
    """A run that learns, with the gap of an engine in bf16."""
    k3 = [value**2 / 2 for value in wave(0.02, steps=steps)]
    return {
        "critic/score/mean": [
            score + 0.01 * math.sin(3.1 * step) for step, score in enumerate(ramp(0.2, 0.6, steps))
        ],
        "response_length/mean": wave(100.0, steps=steps),
        "prompt_length/mean": [20.0] * steps,
        "response_length/clip_ratio": wave(0.05, steps=steps),
        "actor/entropy": ramp(0.8, 0.5, steps),
        "actor/grad_norm": wave(1.0, steps=steps),
        "actor/pg_loss": wave(-0.01, steps=steps),
        "actor/ppo_kl": wave(1e-3, steps=steps),
        "actor/pg_clipfrac": wave(0.01, steps=steps),
        "actor/lr": [1e-5] * steps,
        "rollout_corr/kl": [value + 1e-6 * math.sin(step) for step, value in enumerate(k3)],
        "rollout_corr/k3_kl": k3,
        "rollout_corr/chi2_token": [2 * value for value in k3],
        "rollout_corr/nonfinite_token_fraction": [0.0] * steps,
        "rollout_corr/safety_clamped_fraction": [0.0] * steps,
        "rollout_corr/rollout_is_eff_sample_size": wave(0.97, 0.005, steps),
        "ledger/sampled_tokens": [10_000.0] * steps,
        "timing_s/step": wave(10.0, steps=steps),
        "timing_s/gen": wave(6.0, steps=steps),
        "timing_s/update_actor": wave(3.0, steps=steps),
        "perf/overhead_fraction": wave(0.05, steps=steps),
        "perf/throughput": wave(1200.0, steps=steps),
    }


def planted(
    changed: Mapping[str, Sequence[float]],
    settings: Mapping[str, Any] | None = None,
    source: str = OWN_RUN,
    without: Sequence[str] = (),
) -> RunData:
    """A healthy run with some metrics replaced; the first step is 1."""
    metrics = {name: values for name, values in {**healthy(), **changed}.items() if name not in without}
    longest = max(len(values) for values in metrics.values())
    return RunData(
        "planted",
        Path("planted"),
        source,
        steps=range(1, longest + 1),
        series={
            name: Series(list(range(1, len(values) + 1)), list(values)) for name, values in metrics.items()
        },
        settings={**SETTINGS, **(settings or {})},
        total_steps=longest,
    )


def write_run(
    folder: Path, metrics: Mapping[str, Sequence[float]], samples: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """A run's folder with these metrics and samples, written as a run writes them."""
    sink = JsonlSink(folder)
    longest = max(len(values) for values in metrics.values())
    for index in range(longest):
        sink.log({name: values[index] for name, values in metrics.items() if index < len(values)}, index + 1)
    for sample in samples:
        sink.log_table("val/generations", list(sample), [list(sample.values())], longest)
    sink.close()
    correction = {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}}
    config = {"trainer": {"seed": 1, "total_training_steps": longest}, "algorithm": correction}
    (folder / "resolved_config.yaml").write_text(json.dumps(config))
    (folder / "plan.txt").write_text(f"Batch\n  training steps: {longest} (at most 1 epochs)\n")
    return folder
