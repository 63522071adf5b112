"""Token records: what was computed for each token of a few rows."""
