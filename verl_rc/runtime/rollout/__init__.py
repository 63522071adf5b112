"""Engines: their protocol, sampling with the log-prob of every token, collection into batches, checks of
versions."""
