"""Loading a Python file of the user's own."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load_user_module(path: str, key: str) -> ModuleType:
    """The module in the file ``path``, which ``key`` of the configuration names; its code runs.

    Raises ``ValueError`` when there is no such file, or when importing it fails.
    """
    file = Path(path).expanduser()
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"{key} must be an existing Python file, got {path!r}.")
    specification = importlib.util.spec_from_file_location(f"verl_rc_user_{file.stem}", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key} must be a file that can be imported; {path!r} raised {error!r}.") from error
    return module
