"""Token records from inside another trainer: one module a trainer."""
