"""open-instruct has no hook: ``--save_traces`` writes the engine's side alone, which ``verl-rc report``
reads, and no option writes the trainer's.

The functions that have both log-probs are given packs of several sequences without their token ids, took
other arguments in each of three versions read, and belong to no release whose number could be checked: rows
that a hook cut out of them would be guesses. Whoever needs them calls ``TokenLines``
(verl_rc/data/token_lines.py) where the trainer has computed ``new_logprobs``. Read at its sources of November
2026.
"""
