"""Files of other trainers, one module a trainer: where the files are, and what their fields mean."""

from verl_rc.insight.run_folder.trainers import miles, nemo_rl, open_instruct, prime_rl, skyrl, slime

LAYOUTS = (
    prime_rl.LAYOUT,
    nemo_rl.LAYOUT,
    slime.LAYOUT,
    miles.LAYOUT,
    skyrl.LAYOUT,
    open_instruct.LAYOUT,
)
"""Trainers that write the log-probs of tokens."""
