"""prime-rl needs no hook: ``trainer.enable_token_export=true`` writes both log-probs and the entropy of every
token, which ``verl-rc report RUN`` reads.

What its export lacks (reward, version of the weights, sum of squares) no function of its trainer has together
with the tokens. Read at its sources of November 2026; it has no release.
"""
