"""The weights that a run saved, each as a model folder that trainer and engine can load."""

from pathlib import Path

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.config.run import RunConfig
from verl_rc.runtime.checkpoint import CheckpointStore
from verl_rc.runtime.workers.export import export_checkpoint


def config_of(folder: Path, trust_remote_code: bool = False) -> RunConfig:
    """The configuration of the run in ``folder``.

    Raises ``ConfigError``, also where it lets code of a model run and ``trust_remote_code`` does not: the
    folder may be somebody else's.
    """
    config = load_run_config([f"--config-dir={folder.absolute()}", "--config-name=resolved_config"])
    if not trust_remote_code and (
        config.data.trust_remote_code or config.actor_rollout_ref.model.trust_remote_code
    ):
        raise ConfigError(
            f"the run in {folder} lets code of its model run (trust_remote_code). Pass --trust-remote-code "
            "if you trust the model."
        )
    return config


class SavedWeights:
    """Weights by version: 0 is the model that the run began with, if it began without adapters; n what the
    checkpoint of step n holds."""

    def __init__(self, config: RunConfig, folder: Path, scratch: Path) -> None:
        """``scratch``: a folder for exported checkpoints, as large as a model each."""
        steps = {
            int(path.name.rpartition("_")[2]): path
            for path in CheckpointStore(folder, most=None).newest_first()
        }
        self._checkpoints, self._scratch = steps, scratch
        self._trusts_code = config.actor_rollout_ref.model.trust_remote_code
        self._start = str(config.actor_rollout_ref.model.path)
        self._first = () if config.actor_rollout_ref.model.lora_adapter_path else (0,)

    @property
    def versions(self) -> list[int]:
        """All saved versions, ascending."""
        return sorted({*self._first, *self._checkpoints})

    def folder(self, version: int) -> str:
        """A model folder with these weights, in float32. Raises ``ExportError``."""
        if version == 0:
            return self._start
        place = self._scratch / f"version_{version}"
        if not place.is_dir():
            export_checkpoint(
                self._checkpoints[version],
                place,
                dtype_name="float32",
                trust_remote_code=self._trusts_code,
            )
        return str(place)
