"""slime and miles need no hook: ``--dump-details FOLDER`` writes both log-probs of every token, and
``--use-rollout-entropy`` the entropy in slime, which ``verl-rc report FOLDER`` reads.

Their own door, ``--rollout-data-postprocess-path``, is given what the dump holds. Read at their sources of
November 2026.
"""
