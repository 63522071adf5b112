"""The heat map of log-ratios as bytes: steps across, log-ratio up, one byte a cell for the logarithm of its
count."""

import base64
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from verl_rc.insight.page.encode import packed
from verl_rc.insight.run_folder import HeatMap

_PERCENTS = (1, 50, 99)
_THRESHOLD, _LEVEL = (
    "algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_correction.rollout_is",
)


def heat_map_data(heat_map: HeatMap, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The data of the script: cells by column, lowest row first; edges, percentiles and bounds of token
    weights."""
    largest = max((count for column in heat_map.counts for count in column), default=0.0)
    scale = 255 / math.log1p(largest) if largest > 0 else 0.0
    cells = bytes(
        round(math.log1p(max(count, 0.0)) * scale) for column in heat_map.counts for count in column
    )
    return {
        "columns": len(heat_map.steps),
        "rows": len(heat_map.edges) - 1,
        "steps": packed(float(step) for step in heat_map.steps),
        "edges": packed(heat_map.edges),
        "cells": base64.b64encode(cells).decode("ascii"),
        "largest": largest,
        "percentiles": {
            str(percent): packed(float(_percentile_row(column, percent)) for column in heat_map.counts)
            for percent in _PERCENTS
        },
        "bounds": _bounds(settings),
    }


def _percentile_row(column: Sequence[float], percent: float) -> int:
    cumulative = list(accumulate(column))
    target = cumulative[-1] * percent / 100
    return next((row for row, count in enumerate(cumulative) if count >= target and count > 0), 0)


def _bounds(settings: Mapping[str, Any]) -> list[float]:
    """Log-ratios at which token weights are cut."""
    if settings.get(_LEVEL) != "token":
        return []
    parts = str(settings.get(_THRESHOLD, "")).split("_")
    try:
        return [math.log(float(part)) for part in parts if float(part) > 0]
    except ValueError:
        return []
