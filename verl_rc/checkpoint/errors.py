"""The error of everything that is wrong with a checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or used; the message says what must hold, what was found and what to do."""
