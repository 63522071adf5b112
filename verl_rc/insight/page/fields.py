"""The token fields that another trainer's run recorded, and how to record the rest."""

from verl_rc.insight.page.text import escaped, table
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.run_folder.foreign import RECORDINGS

_USES = {
    "rollout_log_prob": "the gap of every token, nats",
    "old_log_prob": "the gap of every token, nats",
    "entropy": "another temperature, raw log-probs and filters, each told from the others, nats",
    "sum_pi_squared": "logit noise, which compares between models",
    "varentropy": "samples from another distribution than the one reported, nats²",
    "version": "old weights",
    "engine": "one engine that differs",
    "advantage": "what other corrections would have done",
    "score": "whether what a correction rejects is good",
    "finished": "log-probs or masks that are shifted by a place",
    "weight": "importance weights of the update",
}
"""The use of each field of a token record."""


def fields_panel(run: RunData) -> str:
    """A row for each field: whether it is there, and what it tells; below it, what records fields."""
    row = run.tokens.rows[0] if run.tokens is not None and run.tokens.rows else None
    recorded = {*row.tokens, *row.cells} if row is not None else set()
    rows = [
        (escaped(name), "yes" if name in recorded else "<strong>missing</strong>", escaped(meaning))
        for name, meaning in _USES.items()
    ]
    option = RECORDINGS.get(run.trainer, "its trainer writes token records")
    return (
        table(("field", "recorded", "tells"), rows)
        + f"<p>To record them: <code>{escaped(option)}</code> (docs/token_record.md).</p>"
    )
