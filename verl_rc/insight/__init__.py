"""After a run, or beside it from its files: what happened, why, and what other corrections would do."""
