"""``verl-rc diagnose``: recorded tokens through models again; beside export the only tools that load some."""
