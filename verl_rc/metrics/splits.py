"""What rollout correction tells apart in its metrics: percentiles, ages, turns, lengths; parts of their
names."""

import math

PERCENTS = (1, 5, 25, 50, 75, 95, 99)
NUM_AGES = NUM_TURNS = 5
"""Ages and turns are told apart up to the last of these, which stands for all above it, too."""
TURN_COUNTS = {"1": (1, 1), "2": (2, 2), "3_to_4": (3, 4), "5_up": (5, math.inf)}
"""Bounds, inclusive, of the numbers of turns by which weights of whole sequences are told apart."""
LENGTHS = {
    "length_le_16": (1, 16),
    "length_le_64": (17, 64),
    "length_le_256": (65, 256),
    "length_le_1024": (257, 1024),
    "length_le_4096": (1025, 4096),
    "length_le_16384": (4097, 16384),
    "length_gt_16384": (16385, math.inf),
}
"""Bounds, inclusive, of the lengths of responses, in tokens, by which kept tokens are told apart."""
SIGNS = ("positive_advantage", "negative_advantage")
ANSWERS = ("correct", "wrong")
