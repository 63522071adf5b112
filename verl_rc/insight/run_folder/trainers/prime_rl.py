"""prime-rl: ``token_exports/step_N/rank_R.jsonl``, which ``trainer.enable_token_export=true`` writes, and its
``metrics.jsonl``. Read at its sources of November 2026."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from verl_rc.data.token_rows import Row, parse_line
from verl_rc.insight.run_folder.token_files import Layout, read_lines
from verl_rc.insight.run_folder.trainers.sequences import behind_the_prompt

FIELDS = {
    "response_ids": "token_ids",
    "response_mask": "loss_mask",
    "rollout_log_prob": "inference_logprobs",
    "old_log_prob": "trainer_logprobs",
    "entropy": "entropy",
    "advantage": "advantages",
}
"""Their names of the fields of tokens; prompt and response in one list, token t at place t."""
NAMES = {
    "mismatch_kl/all/mean": "rollout_corr/k3_kl",  # k3 of KL(engine || trainer), nats
    "reward/all/mean": "critic/score/mean",
    "optim/grad_norm": "actor/grad_norm",
    "optim/lr": "actor/lr",
    "entropy/all/mean": "actor/entropy",
}
"""Their metrics whose meaning is that of the catalogue's."""


METRICS = "metrics.jsonl"
"""On by default; several lines a step. A run of verl_rc has a file of this name, too."""
_PREFIXES = ("mismatch_kl/", "entropy/all/", "optim/", "progress/")
_LOOKED_AT = 64
"""First lines, of which one must have a metric with such a prefix."""


def _rows(step: int, path: Path, notes: list[str]) -> Iterator[Row]:
    for line in read_lines(path, notes):
        row = behind_the_prompt({ours: line.get(theirs) for ours, theirs in FIELDS.items()})
        if row is not None:
            yield {**row, "step": step, "source": line.get("env_name")}


def has_metrics(path: Path) -> bool:
    """Whether prime-rl wrote the ``metrics.jsonl`` of a folder."""
    file = path / METRICS
    if not file.is_file():
        return False
    with file.open(encoding="utf-8", errors="replace") as lines:
        names = {name for line in islice(lines, _LOOKED_AT) for name in parse_line(line) or ()}
    return any(name.startswith(_PREFIXES) for name in names)


LAYOUT = Layout(
    "prime-rl",
    ("token_exports/step_*/rank_*.jsonl",),
    r"/step_(\d+)/rank_\d+\.jsonl$",
    _rows,
    facts={"logprobs_mode": "processed_logprobs"},
    lacks=("prime-rl's token files hold no reward, no version of the weights and no sum of squares.",),
)
