"""The work of one process: a trainer rank, an engine, an environment's host."""
