"""Checks of every step: causes of a gap, healthy ranges, and limits that stop a run. Pure."""
