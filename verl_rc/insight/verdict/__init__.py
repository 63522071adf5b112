"""The verdict: what the metrics of a run say about learning, gap, correction and speed, in words."""

from verl_rc.algorithm.health.statement import Statement
from verl_rc.insight.verdict.verdict import Verdict, verdict_of

__all__ = ["Statement", "Verdict", "verdict_of"]
