"""Memory of the driver, which holds the tokens of a step and of the groups that wait."""

from verl_rc.config.run import RunConfig

MIB = 1 << 20

_PROCESS_MIB = 500
"""The driver without a batch (torch, transformers, ray: 460 to 476 at the run's peak, up to 620 while it
ends) and W&B's process (35)."""
_STEP_BYTES, _SAMPLE_BYTES = 160, 16
"""Bytes of a token in a step's columns, with what they are computed from and Ray's copies for ranks; and in a
sample that waits, with its text (measured: docs/experiment_log.md)."""


def driver_bytes(config: RunConfig) -> int:
    """The largest memory of the driver, when all responses have ``data.max_response_length``."""
    options, batch = config.async_training, config.data.train_batch_size
    waiting = options.groups_in_memory(batch) * config.actor_rollout_ref.rollout.n
    tokens = config.rows_per_step * _STEP_BYTES + waiting * _SAMPLE_BYTES
    return _PROCESS_MIB * MIB + tokens * config.longest_sequence


def too_many_tokens(config: RunConfig, free_bytes: int) -> str | None:
    """The reason why a step does not fit into ``free_bytes`` of the driver's machine, with the keys that
    reduce it. None where it fits."""
    if driver_bytes(config) <= free_bytes:
        return None
    rows, tokens = config.rows_per_step, config.rows_per_step * config.longest_sequence
    return (
        f"{bytes_text(driver_bytes(config))} of memory must be free for the driver, whose step may have "
        f"{rows:,} rows of {config.longest_sequence:,} tokens ({tokens / 1e6:,.0f} million), got "
        f"{bytes_text(free_bytes)}: lower data.train_batch_size, actor_rollout_ref.rollout.n or "
        "data.max_response_length, or take a machine with more."
    )


def bytes_text(number: int) -> str:
    """``number`` of bytes in GiB or MiB."""
    return f"{number / (1 << 30):.2f} GiB" if number >= 1 << 30 else f"{number / MIB:.0f} MiB"
