"""The mathematics of a step: pure."""
