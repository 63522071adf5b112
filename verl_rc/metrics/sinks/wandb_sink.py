"""The Weights & Biases sink, with tags from the configuration; offline without credentials or network."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import wandb

from verl_rc.config.paths import why_unwritable
from verl_rc.config.schema import value_at
from verl_rc.metrics.sinks.local import AlertCause, Cell, ExperimentSink, FinalReport

_LOG = logging.getLogger("verl_rc")
_ANSWER_SECONDS = 10.0
"""Time in which W&B's server, or the proxy before it, must accept a connection."""
_LONGEST = 64
"""Characters of a tag that W&B accepts."""


def run_tags(config: Mapping[str, Any]) -> list[str]:
    """Tags of a resolved configuration: model, estimator, loss, correction, engine precision, size. Missing
    sections, as in SFT, give no tags."""
    tags = (tag[:_LONGEST] for part in (_policy, _algorithm, _correction) for tag in part(config))
    return list(dict.fromkeys(tags))


def _policy(config: Mapping[str, Any]) -> Iterator[str]:
    if path := value_at(config, "actor_rollout_ref.model.path"):
        yield PurePath(str(path)).name
    if rank := value_at(config, "actor_rollout_ref.model.lora_rank"):
        yield f"lora-{rank}"
    if dtype := value_at(config, "actor_rollout_ref.rollout.dtype"):
        yield f"engine-{value_at(config, 'actor_rollout_ref.rollout.quantization') or dtype}"
    cache = value_at(config, "actor_rollout_ref.rollout.kv_cache_dtype")
    if cache not in (None, "auto"):
        yield f"kv-cache-{cache}"
    if ranks := value_at(config, "trainer.n_gpus_per_node"):
        yield f"{value_at(config, 'trainer.nnodes') or 1}x{ranks}"


def _algorithm(config: Mapping[str, Any]) -> Iterator[str]:
    if estimator := value_at(config, "algorithm.adv_estimator"):
        yield str(estimator)
    named_loss = value_at(config, "algorithm.rollout_correction.loss_type")
    if named_loss not in (None, "ppo_clip"):
        yield str(named_loss)
    elif mode := value_at(config, "actor_rollout_ref.actor.policy_loss.loss_mode"):
        yield "ppo-clip" if mode == "vanilla" else str(mode)
    if value_at(config, "algorithm.filter_groups.enable"):
        yield "dynamic-sampling"


def _correction(config: Mapping[str, Any]) -> Iterator[str]:
    correction = value_at(config, "algorithm.rollout_correction")
    if not correction:
        return
    bypass = correction.get("bypass_mode")
    yield "bypass" if bypass else "decoupled"
    if correction.get("rollout_is"):
        yield f"is-{correction['rollout_is']}"
    rules = str(correction.get("rollout_rs") or "")
    yield from (f"rs-{rule}" for rule in rules.split(",") if rule)
    has_own_ratio = bypass and correction.get("loss_type") != "reinforce"
    if not (has_own_ratio or correction.get("rollout_is") or rules):
        yield "uncorrected"


_HEADLINE_PREFIX = "val-core/"
_BEST_PREFIX = "best/"


class WandbSink(ExperimentSink):
    """One W&B run. Its files lie in ``<run_dir>/wandb``; upload an offline run with ``wandb sync``."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        resume_id: str | None = None,
    ) -> None:
        """``resume_id``: the ``run_id`` of the run that is continued. None starts a new run."""
        run_dir.mkdir(parents=True, exist_ok=True)
        use_writable_folders(run_dir)
        try:
            self._run = wandb.init(
                project=project_name,
                name=experiment_name,
                dir=str(run_dir),
                config=dict(config),
                tags=run_tags(config),
                id=resume_id,
                resume=None if resume_id is None else "allow",
                mode="offline" if goes_offline() else None,
                settings=wandb.Settings(console="off", quiet=True),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"trainer.logger: W&B must take the run, but: {str(error).rstrip('.')}. Set "
                "WANDB_MODE=offline and upload it later (wandb sync), or leave 'wandb' out."
            ) from error
        self.run_id = str(self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one step; the summary keeps the best value and step of every headline validation
        metric."""
        self._run.log(dict(metrics), step=step)
        for name, value in metrics.items():
            if name.startswith(_HEADLINE_PREFIX):
                self._record_best(name.removeprefix(_HEADLINE_PREFIX), value, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Log a ``wandb.Table``."""
        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Log a ``wandb.Histogram``; neighbouring bins are merged because it holds at most 512."""
        edges, counts = join_bins(edges, counts, max_bins=512)
        self._run.log({name: wandb.Histogram(np_histogram=(list(counts), list(edges)))}, step=step)

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Send an alert by mail or Slack, according to the user's W&B settings; for an offline run, on
        upload."""
        self._run.alert(title=title, text=f"step {step}\n{text}", level=wandb.AlertLevel.WARN)

    def publish(self, report: FinalReport) -> None:
        """Put the verdict into the summary, as text and as a code to filter by, and the page under
        ``report``.

        Raises ``RuntimeError`` when W&B does not take them.
        """
        try:
            self._run.summary.update({"verdict": report.verdict, "verdict_code": report.code})
            # The page brings its own policy, which would not load what W&B adds to a head.
            self._run.log({"report": wandb.Html(report.page, inject=False, data_is_not_path=True)})
        except wandb.errors.Error as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def finish(self, exit_status: int) -> None:
        """Finish the run; W&B shows it as failed unless ``exit_status`` is 0."""
        self._run.finish(exit_code=exit_status)

    def close(self) -> None:
        """Finish the run without saying how it ended."""
        self._run.finish()

    def _record_best(self, name: str, value: float, step: int) -> None:
        """Update the best values in the summary; an online resumed run continues from the best so far, the
        first of ties wins."""
        best = self._run.summary.get(f"{_BEST_PREFIX}{name}")
        if best is None or value > best:
            self._run.summary.update({f"{_BEST_PREFIX}{name}": value, f"{_BEST_PREFIX}{name}/step": step})


def join_bins(
    edges: Sequence[float], counts: Sequence[float], max_bins: int
) -> tuple[list[float], list[float]]:
    """Merge equal numbers of neighbouring bins so that at most ``max_bins`` remain; their counts are
    added."""
    width = -(-len(counts) // max_bins)
    starts = range(0, len(counts), width)
    return [edges[i] for i in starts] + [edges[-1]], [sum(counts[i : i + width]) for i in starts]


def use_writable_folders(run_dir: Path) -> None:
    """Redirect W&B's logs and table copies to the run's folder when the home folder is not writable.

    Otherwise W&B fills the console with errors, and logging the first table raises.
    """
    folders = {wandb.env.CACHE_DIR: wandb.env.get_cache_dir(), wandb.env.DATA_DIR: wandb.env.get_data_dir()}
    for variable, folder in folders.items():
        if why_unwritable(Path(folder)) is not None:
            os.environ[variable] = str(run_dir.absolute() / "wandb" / variable.lower())


def goes_offline() -> bool:
    """Whether a run must be written offline, which is logged where it asks for W&B: without credentials,
    or when W&B does not answer.

    It is found out before ``wandb.init``, which would wait for a minute and a half, and after which an
    offline one can hang. ``WANDB_MODE`` of the environment decides if it is anything but ``online``.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode not in (None, "", "online"):
        return False
    has_key = bool(wandb.login(prompt=False, verify=False))
    problem = (
        _why_unreachable(str(wandb.setup().settings.base_url)) if has_key else "there are no credentials"
    )
    if problem is None:
        return False
    if has_key or mode:
        _LOG.warning(
            "W&B: %s, so the run is written offline; upload it later with wandb sync and its folder "
            "wandb/offline-run-*",
            problem,
        )
    return True


def _why_unreachable(url: str) -> str | None:
    """The reason why no connection to a server, or to the proxy before it, can be opened; None when it
    can."""
    place = urlsplit(url)
    proxy = getproxies().get(place.scheme)
    if proxy and not proxy_bypass(place.hostname or ""):
        place = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    port = place.port or (443 if place.scheme == "https" else 80)
    try:
        socket.create_connection((place.hostname or "", port), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        return f"nothing answers at {place.hostname}:{port} ({error})"
    return None
