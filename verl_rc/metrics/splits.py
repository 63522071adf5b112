"""What rollout correction tells apart in its metrics: percentiles, ages, turns, signs, answers; parts of
their names."""

PERCENTS = (1, 5, 25, 50, 75, 95, 99)
NUM_AGES = NUM_TURNS = 5
"""Ages and turns are told apart up to the last of these, which stands for all above it, too."""
SIGNS = ("positive_advantage", "negative_advantage")
ANSWERS = ("correct", "wrong")
