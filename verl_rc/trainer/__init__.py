"""The driver: the training loop and its stages, set-up, validation, timing."""
