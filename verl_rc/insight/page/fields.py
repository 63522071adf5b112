"""What a run of another trainer recorded of its tokens, and which of its options would record the rest."""

from verl_rc.insight.page.text import escaped, table
from verl_rc.insight.run_folder import RunData
from verl_rc.insight.run_folder.trainers.options import RECORDINGS, Recording

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
"""What a field of a token record is needed for."""
_UNKNOWN = Recording("token records (docs/token_record.md)", ())


def fields_panel(run: RunData) -> str:
    """A row for each field: our name and the trainer's, whether it is there, and what would record it."""
    recording = RECORDINGS.get(run.trainer, _UNKNOWN)
    row = run.tokens.rows[0] if run.tokens is not None and run.tokens.rows else None
    recorded = {*row.tokens, *row.cells} if row is not None else set()
    rows = [
        (
            escaped(name),
            escaped(recording.names.get(name, "")),
            "yes" if is_there else "<strong>missing</strong>",
            escaped(meaning),
            "" if is_there else _remedy(name, recording),
        )
        for name, meaning in _USES.items()
        for is_there in [name in recorded]
    ]
    trainer = escaped(run.trainer or "its trainer")
    head = ("field", f"in {trainer}", "recorded", "tells", f"to record it in {trainer}")
    return table(head, rows)


def _remedy(name: str, recording: Recording) -> str:
    if name in recording.further:
        return f"<code>{escaped(recording.further[name])}</code>"
    if name in recording.records or recording is _UNKNOWN:
        return f"<code>{escaped(recording.option)}</code>"
    return "no option of it does"
