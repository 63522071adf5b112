"""The weights that a run kept, each as a model folder that trainer and engine can load."""

from pathlib import Path

from verl_rc.checkpoint import CheckpointStore
from verl_rc.config.load import load_run_config
from verl_rc.config.run import RunConfig
from verl_rc.workers.export import export_checkpoint


def config_of(folder: Path) -> RunConfig:
    """The configuration of the run in ``folder``. Raises ``ConfigError``."""
    return load_run_config([f"--config-dir={folder.absolute()}", "--config-name=resolved_config"])


class KeptWeights:
    """Weights by version: 0 is the model that the run began with, n what the checkpoint of step n holds."""

    def __init__(self, config: RunConfig, folder: Path, scratch: Path) -> None:
        """``scratch``: a folder for exported checkpoints, as large as a model each."""
        steps = {
            int(path.name.rpartition("_")[2]): path
            for path in CheckpointStore(folder, keep=None).newest_first()
        }
        self._checkpoints, self._scratch = steps, scratch
        self._start = str(config.actor_rollout_ref.model.path)

    @property
    def versions(self) -> list[int]:
        """All that are kept, ascending."""
        return sorted({0, *self._checkpoints})

    def folder(self, version: int) -> str:
        """A model folder with these weights, in float32. Raises ``ExportError``."""
        if version == 0:
            return self._start
        place = self._scratch / f"version_{version}"
        if not place.is_dir():
            export_checkpoint(self._checkpoints[version], place, dtype_name="float32")
        return str(place)
