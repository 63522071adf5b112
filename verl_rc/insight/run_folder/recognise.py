"""Whose files a path holds."""

from pathlib import Path

from verl_rc.insight.run_folder.records import NothingToReadError
from verl_rc.insight.run_folder.token_files import OWN_TRAINER, UNKNOWN_TRAINER, TokenSource, own_source
from verl_rc.insight.run_folder.trainers import LAYOUTS, prime_rl

METRICS, CONFIG = "metrics.jsonl", "resolved_config.yaml"


def token_source(path: Path) -> TokenSource | None:
    """The token records at a path; None where there are none.

    Raises:
        NothingToReadError: two trainers wrote there.
        DamagedRecordError: a single file is none.
    """
    candidates = [own_source(path), *(layout.source(path) for layout in LAYOUTS if path.is_dir())]
    sources = [source for source in candidates if source is not None]
    is_foreign = bool(sources) and sources[0].trainer not in ("", OWN_TRAINER, UNKNOWN_TRAINER)
    own_run = "a run of verl_rc and " if is_foreign and is_own_run(path) else ""
    if own_run or len(sources) > 1:
        names = " and ".join(source.trainer for source in sources)
        raise NothingToReadError(
            f"{path} must hold the files of one trainer; it holds {own_run}token files of {names}. Pass a "
            "folder of one of them."
        )
    return sources[0] if sources else None


def is_own_run(path: Path) -> bool:
    """Whether it is a run's folder that verl_rc wrote; prime-rl has a file of metrics with the same name."""
    if (path / CONFIG).is_file():
        return True
    is_prime_rl = prime_rl.has_metrics(path) or bool(prime_rl.LAYOUT.files(path))
    return (path / METRICS).is_file() and not is_prime_rl
