"""The profiler of single steps: which ranks and engines begin and end a trace, and when."""

from pathlib import Path

from verl_rc.config.errors import ConfigError
from verl_rc.config.profiler import ProfilerConfig, places
from verl_rc.trainer.cluster.remote import wait_for_all
from verl_rc.trainer.log import log
from verl_rc.trainer.services import Services


def require_steps(profiler: ProfilerConfig, total_steps: int, steps_done: int) -> None:
    """Raise ``ConfigError`` where a step that is to be profiled never comes; log where all are over."""
    if profiler.tool is None or not profiler.steps:
        return
    if max(profiler.steps) > total_steps:
        raise ConfigError(
            f"global_profiler.steps must be among the run's {total_steps} steps, got {profiler.steps}: lower "
            "them, or raise trainer.total_training_steps."
        )
    if max(profiler.steps) <= steps_done:
        log("global_profiler.steps=%s: all of them are done, nothing is profiled", profiler.steps)


def begin(services: Services, step: int) -> None:
    """Begin the traces of ``step``, unless they go on from the step before."""
    if services.config.global_profiler.window(step, services.total_steps) is not None:
        _switch(services, None)


def end(services: Services, step: int) -> None:
    """Write the traces that end with ``step``."""
    config = services.config.global_profiler
    window = config.window(step, services.total_steps)
    if window is not None and window[1] == step:
        folder = Path(config.save_path or services.folder / "profile").absolute()
        name = f"step_{step}" if window[0] == step else f"steps_{window[0]}-{step}"
        _switch(services, folder / name)
        log("profile of %s: %s*.json.gz (https://ui.perfetto.dev)", name.replace("_", " "), folder / name)


def _switch(services: Services, name: Path | None) -> None:
    config, actor, engines = services.config.global_profiler, services.actor, services.engines
    ranks = places(config.ranks, actor.num_ranks)
    wait_for_all([actor.processes.switch_trace(rank, _file(name, f"rank_{rank}")) for rank in ranks])
    for engine in places(config.engines, engines.num_engines):
        engines.switch_trace(engine, _file(name, f"engine_{engine}"))


def _file(name: Path | None, process: str) -> Path | None:
    return None if name is None else name.with_name(f"{name.name}_{process}.json.gz")
