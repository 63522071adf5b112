"""Token records from inside another trainer: one module a trainer, which docs/token_record.md shows."""
