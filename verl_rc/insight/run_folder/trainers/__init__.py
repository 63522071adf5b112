"""Files of other trainers, one module a trainer: where they stand, and what their fields mean."""

from verl_rc.insight.run_folder.trainers import prime_rl

LAYOUTS = (prime_rl.LAYOUT,)
"""Trainers that write the log-probs of tokens."""
