"""``verl-rc diagnose``: recorded tokens through models again.

Beside export the only tools that load models and engines. Nothing is imported here: ``foreign`` runs where
the trainer's packages are not installed.
"""
