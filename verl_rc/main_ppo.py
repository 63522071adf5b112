"""``python -m verl_rc.main_ppo key=value …``: train a policy with PPO and rollout correction."""

from contextlib import ExitStack
from pathlib import Path

from verl_rc.config.errors import ConfigError
from verl_rc.config.folder_owner import FolderClaim
from verl_rc.config.load import run_with_config
from verl_rc.config.paths import output_folders
from verl_rc.config.run import RunConfig
from verl_rc.printable import write_error
from verl_rc.runtime.distributed.child_process import importing
from verl_rc.trainer.log import log, log_to_stdout
from verl_rc.trainer.stop import ending_on_sigterm


def train(config: RunConfig) -> None:
    """Hand a valid configuration over, once its folders belong to this process."""
    log_to_stdout()
    with ExitStack() as owned, ending_on_sigterm(owned.close):
        for key, folder in output_folders(config).items():
            owned.enter_context(FolderClaim(Path(folder), f"run by {key}", key))
        _train(config)


def _train(config: RunConfig) -> None:
    with importing():
        # ray loads only once the configuration is valid
        from verl_rc.trainer.cluster.ray_session import RayStartError, start_ray_in_background  # noqa: PLC0415

        if config.actor_rollout_ref.rollout.converses:
            _check_chat_template(config)
        log("loading ray and torch, starting Ray …")
        ray_started = start_ray_in_background(config.ray_kwargs.ray_init, config.num_processes)
        from verl_rc.runtime.checkpoint import CheckpointError  # noqa: PLC0415  (torch loads while Ray starts)
        from verl_rc.trainer.train import main as run_training  # noqa: PLC0415  (as above)

    try:
        run_training(config, ray_started)
    except (CheckpointError, RayStartError) as error:  # a matter of the disk or the machine, not of the code
        write_error(f"the run ended: {error}\n")
        raise SystemExit(1) from None


def _check_chat_template(config: RunConfig) -> None:
    """Raise ``ConfigError`` when the chat template cannot hold the run's conversations."""
    from verl_rc.runtime.rollout.chat_template import check_chat_template  # noqa: PLC0415  (torch loads)

    try:
        for note in check_chat_template(config):
            log("chat template: %s", note)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def main() -> None:
    """Entry point."""
    run_with_config(RunConfig, train, prog="verl_rc.main_ppo")


if __name__ == "__main__":
    main()
