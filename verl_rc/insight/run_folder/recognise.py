"""Whose files a path holds."""

from pathlib import Path

from verl_rc.insight.run_folder.records import NothingToReadError
from verl_rc.insight.run_folder.token_files import TokenSource, own_source
from verl_rc.insight.run_folder.trainers import LAYOUTS


def token_source(path: Path) -> TokenSource | None:
    """The token records at a path; None where there are none.

    Raises:
        NothingToReadError: two trainers wrote there.
        DamagedRecordError: a single file is none.
    """
    candidates = [own_source(path), *(layout.source(path) for layout in LAYOUTS if path.is_dir())]
    sources = [source for source in candidates if source is not None]
    if len(sources) > 1:
        names = " and ".join(source.trainer for source in sources)
        raise NothingToReadError(
            f"{path} must hold the files of one trainer; it holds token files of {names}. Pass a folder of "
            "one of them."
        )
    return sources[0] if sources else None
