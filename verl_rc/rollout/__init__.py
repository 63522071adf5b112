"""vLLM engines: sampling with the log-prob of every token, collection into batches, weight-version checks."""
