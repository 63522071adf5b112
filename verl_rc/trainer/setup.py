"""Setting up a run: processes start and import first, then ranks load their models, then engines start."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from verl_rc.algorithm.advantage import resolve_advantage_estimator
from verl_rc.algorithm.losses import resolve_policy_loss
from verl_rc.algorithm.ppo.choices import policy_loss_name
from verl_rc.config.distillation import DistillationConfig
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import save_resolved_config
from verl_rc.config.run import RunConfig, TrainerConfig, remote_code_keys
from verl_rc.config.schema import public_values
from verl_rc.config.task import DataConfig
from verl_rc.metrics.sinks import Tracker, open_tracker, require_installed
from verl_rc.metrics.trace import TRACE, TRACE_FILE
from verl_rc.plan.explain import add_to_plan, plan_text, write_plan
from verl_rc.plan.machine import refuse_too_little_memory
from verl_rc.plan.memory import ModelShape, choose_gradient_sums, model_paths
from verl_rc.records.dataset import (
    PromptDataset,
    PromptRow,
    PromptStream,
    build_train_loader,
    build_validation_rows,
    describe_lengths,
    require_ground_truths,
)
from verl_rc.records.image_reader import ImageReader
from verl_rc.records.stop_tokens import stop_token_ids
from verl_rc.records.tokenize import load_tokenizer, require_same_vocabulary
from verl_rc.records.unread import unread_arguments
from verl_rc.runtime.checkpoint import RunState
from verl_rc.runtime.distributed.child_process import RemoteError
from verl_rc.runtime.rollout.conversation import LocalHosts
from verl_rc.runtime.rollout.engine import EngineFacts, EngineOptions, engine_options
from verl_rc.runtime.rollout.environment_host import Hosts, open_host
from verl_rc.runtime.rollout.tool_environment import template_arguments
from verl_rc.runtime.weight_sync.proof import GapLimit
from verl_rc.runtime.workers.host import usable_cores
from verl_rc.runtime.workers.supported_models import unsupported_model
from verl_rc.trainer import checkpoints
from verl_rc.trainer.cluster.engine_group import EngineGroup
from verl_rc.trainer.cluster.environment_hosts import RayHosts
from verl_rc.trainer.cluster.model_groups import ActorGroup, CriticGroup, FrozenGroup, ReferenceGroup
from verl_rc.trainer.cluster.placement import plan_placement
from verl_rc.trainer.cluster.rank_group import RankGroup
from verl_rc.trainer.cluster.rank_processes import RankProcesses
from verl_rc.trainer.cluster.ray_session import ask_ray
from verl_rc.trainer.cluster.remote import Pending, wait_for_all
from verl_rc.trainer.cluster.watchdog import WATCHDOG
from verl_rc.trainer.cluster.weight_transport import open_transport
from verl_rc.trainer.evaluate import open_for_validation
from verl_rc.trainer.log import log, log_wait
from verl_rc.trainer.openings import Openings
from verl_rc.trainer.profiling import require_steps
from verl_rc.trainer.scoring import open_scorer
from verl_rc.trainer.services import Services
from verl_rc.trainer.step_record import stages_with_flops
from verl_rc.trainer.stop import StopRequest


@contextmanager
def open_run(
    config: RunConfig, ray_started: "Future[None]", close_tracker: Callable[[Tracker], None] = Tracker.close
) -> Iterator[tuple[Services, RunState]]:
    """Set up a new or a resumed run, and close it at the end, also after an error."""
    torch.set_num_threads(
        min(torch.get_num_threads(), usable_cores())
    )  # PyTorch knows no CPU limits of containers
    folder = Path(str(config.trainer.default_local_dir))
    folder.mkdir(parents=True, exist_ok=True)
    refuse_too_little_memory(config)
    store, resumed, state = checkpoints.choose(config, folder)
    _check_what_is_named(config)
    _write_plan_of_run(config, folder)
    with closing(store), ExitStack() as stack:
        stack.callback(ray.shutdown)
        with log_wait("Ray"):
            ray_started.result()
        log("Ray's state: %s", ask_ray())
        stack.enter_context(WATCHDOG.watching(config.trainer.hang_timeout_seconds, folder))
        stack.enter_context(TRACE.writing(folder / TRACE_FILE if config.async_training.trace else None))
        placement = plan_placement(config)
        processes = RankProcesses(
            placement,
            config.sequence_parallel_sizes,
            config.actor_rollout_ref.shares_prefixes,
            config.trainer.balance_batch,
        )
        actor = ActorGroup(processes)
        critic = CriticGroup(processes) if config.needs_critic else None
        frozen = {
            role: (ReferenceGroup if role == "reference" else FrozenGroup)(processes, role)
            for role in config.frozen_policies
        }
        engines = EngineGroup(placement, processes.visible_devices() if placement.device == "cuda" else ())
        environment = config.actor_rollout_ref.rollout.environment
        # Without processes of their own, environments run in those of the engines.
        hosts = RayHosts.start(environment) if environment.hosts else None
        options = engine_options(config, placement.device, hosts)
        imports = engines.prepare(options)
        with log_wait("data and tokenizer"), _as_config_errors():
            _check_models(config)
            tokenizer, reader = _load_tokenizer(config)
            data, openings = _with_environment(config, hosts, tokenizer)
            loader = build_train_loader(data, tokenizer, reader)
            validation_rows = open_for_validation(
                build_validation_rows(data, tokenizer, reader), openings, config.trainer.seed
            )
            prompts = PromptStream(loader, None if resumed is None else state.prompts)
            _describe_prompts(config, loader.dataset, validation_rows)
            sources = _scored_sources(config, loader.dataset, validation_rows)
            scorer = stack.enter_context(
                open_scorer(config.reward, sources, config.trainer.ready_timeout_seconds)
            )
        total_steps = _steps_of_run(config, len(loader), state.step)
        learners: list[ActorGroup | CriticGroup] = [actor] if critic is None else [actor, critic]
        config = _with_gradient_sums(config, processes, placement.device, folder)
        tracker = _open_tracker(config, folder, total_steps, state)
        stack.callback(close_tracker, tracker)
        _build_ranks(processes, [*learners, *frozen.values()], config, total_steps)
        stack.enter_context(_close_at_end(processes))
        if resumed is not None:
            with log_wait(f"checkpoint {resumed}"), _as_config_errors():
                _load(resumed, [*learners, *frozen.values()])
        engine = _build_engines(engines, imports, config, options, folder)
        with log_wait("the transport of weights"):
            transport = open_transport(actor, engines, placement, config.actor_rollout_ref.rollout)
        services = Services(
            config=config,
            folder=folder,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids(tokenizer, config.actor_rollout_ref.model.path),
            prompts=prompts,
            openings=openings,
            validation_rows=validation_rows,
            scorer=scorer,
            actor=actor,
            critic=critic,
            frozen=frozen,
            engines=engines,
            placement=placement,
            transport=transport,
            checkpoints=store,
            # Measured while engines and other ranks have nothing to do.
            flops=stages_with_flops(config, {group.role: group.count_flops() for group in learners}),
            gap_limit=GapLimit.from_config(config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor),
            stop=StopRequest(),
            tracker=tracker,
            total_steps=total_steps,
            block_size=engine.block_size,
        )
        yield services, replace(state, tracker_run_id=tracker.run_id)  # a resumed run goes on in W&B's run


def _load(checkpoint: Path, groups: Sequence[RankGroup]) -> None:
    """Load every group that the checkpoint has a part of: those that learn, and a refreshed reference."""
    parts = [group for group in groups if (checkpoint / group.role).is_dir()]
    wait_for_all([pending for group in parts for pending in group.load(checkpoint / group.role)])


def _steps_of_run(config: RunConfig, steps_per_epoch: int, steps_done: int) -> int:
    total_steps = steps_of_run(config.trainer, steps_per_epoch)
    require_steps(config.global_profiler, total_steps, steps_done)
    return total_steps


def _open_tracker(config: RunConfig, folder: Path, total_steps: int, state: RunState) -> Tracker:
    """The sinks of ``trainer.logger``, which go on where ``state`` stopped."""
    with _as_config_errors():
        return open_tracker(
            config.trainer,
            folder,
            public_values(config),
            total_steps,
            steps_done=state.step,
            run_id=state.tracker_run_id,
        )


def _write_plan_of_run(config: RunConfig, folder: Path) -> None:
    """Write the resolved configuration and the plan of the run into its folder, and log the plan."""
    save_resolved_config(config, folder)
    write_plan(config, folder)
    log("%s", plan_text(config))
    for key, path in remote_code_keys(config).items():
        log("%s=True: Python code that comes with %s runs with your rights", key, path)


def _describe_prompts(config: RunConfig, training: PromptDataset, validation_rows: list[PromptRow]) -> None:
    """Log the lengths of the prompts and the columns that are not read; raises ``ValueError`` when one of the
    prompts looked at is too long for the run, or rows and teachers do not belong together."""
    _require_teachers(config.distillation, training)
    limit = config.data.max_prompt_length
    log("training: %s", training.describe_lengths())
    if training.unread_columns():
        log("training: columns that are not read: %s", ", ".join(training.unread_columns()))
    lengths = [len(row.prompt_token_ids) for row in validation_rows]
    log("validation: %s", describe_lengths(lengths, len(lengths), limit) if lengths else "none")


def _check_models(config: RunConfig) -> None:
    """Raise ``ConfigError``, before models are loaded, when one cannot be had, or the trainer cannot compute
    it."""
    for path, trusted in model_paths(config).items():
        try:
            problem = unsupported_model(config, path, trusted)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"a model must be a folder, or a hub id in the cache or within reach, got {path!r}: "
                f"{str(error).strip().splitlines()[0]} Download it where there is a network (hf download), "
                "or pass its folder."
            ) from error
        if problem is not None:
            raise ConfigError(f"{path} cannot be trained: {problem}. Or take another model.")


def _load_tokenizer(config: RunConfig) -> tuple[Any, ImageReader | None]:
    """The policy's tokenizer, and its reader of pictures if it reads some.

    Raises ``ValueError`` when one cannot be read, or a teacher has another tokenizer.
    """
    model = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, config.data.trust_remote_code)
    given = config.data.apply_chat_template_kwargs
    unread = unread_arguments(tokenizer.chat_template, given) if given else []
    if unread:
        log("data.apply_chat_template_kwargs: the chat template does not read %s", ", ".join(unread))
    target = config.algorithm.adaptive_entropy.target_entropy
    if target is not None and target >= math.log(len(tokenizer)):
        raise ValueError(
            "algorithm.adaptive_entropy.target_entropy must be below "
            f"{math.log(len(tokenizer)):.2f} nats, the entropy of a token that is drawn evenly from the "
            f"{len(tokenizer)} of the vocabulary, got {target}."
        )
    for teacher in config.distillation.teachers.values():
        require_same_vocabulary(tokenizer, teacher.model_path, model.trust_remote_code)
    return tokenizer, ImageReader.of(
        model.path, config.data.mm_processor_kwargs, config.actor_rollout_ref.rollout.limit_images
    )


def _with_environment(
    config: RunConfig, hosts: Hosts | None, tokenizer: Any
) -> tuple[DataConfig, Openings | None]:
    """The data's configuration with the arguments of the chat template, which with ``multi_turn`` describe
    tools, and what environments open episodes with.

    Raises ``ValueError`` when the tools or the environment cannot be made.
    """
    rollout, data = config.actor_rollout_ref.rollout, config.data
    allow_special_tokens = rollout.allow_special_tokens
    if not rollout.converses:
        return data, None
    arguments = template_arguments(rollout.multi_turn, data.apply_chat_template_kwargs)
    data = data.model_copy(update={"apply_chat_template_kwargs": arguments})
    host = open_host(rollout)  # wherever environments run, a mistake in their keys is seen here
    if rollout.environment.name is None:
        return data, None
    return data, Openings(hosts or LocalHosts(host), tokenizer, data, allow_special_tokens)


def _scored_sources(
    config: RunConfig, training: PromptDataset, validation_rows: Sequence[PromptRow]
) -> dict[str, str]:
    """The data sources whose samples the reward function scores, each with the place of its first row.

    Raises ``ValueError`` when a row lacks the ground truth that its built-in scorer needs.
    """
    environment = config.actor_rollout_ref.rollout.environment
    if environment.name is not None and environment.reward == "turns":
        return {}
    if config.reward.uses_built_in_scorers:
        without = [
            f"row {row.row_index} of data.val_files" for row in validation_rows if row.ground_truth is None
        ]
        require_ground_truths(next(iter(without), None) or training.without_ground_truth())
    return {
        **{row.data_source: f"row {row.row_index} of data.val_files" for row in validation_rows},
        **training.data_sources(),
    }


def _require_teachers(distillation: DistillationConfig, training: PromptDataset) -> None:
    """Raise ``ValueError`` unless each row has a teacher, and each teacher a row."""
    keys = {teacher.key for teacher in distillation.teachers.values()}
    if not keys or None in keys:
        return
    sources = training.data_sources()
    if idle := sorted(str(key) for key in keys - sources.keys()):
        raise ValueError(
            "each teacher needs rows of data.train_files with its key as their data_source, but no row has "
            f"{', '.join(idle)}; the sources are {', '.join(sorted(sources))}."
        )
    for source in sources.keys() - keys:
        raise ValueError(
            f"each row of data.train_files needs a teacher, but {sources[source]} has "
            f"data_source={source!r}; the keys of distillation.teacher_models are "
            f"{', '.join(sorted(map(str, keys)))}."
        )


def steps_of_run(trainer: TrainerConfig, steps_of_epoch: int) -> int:
    """The number of training steps: ``total_training_steps``, but not more than the prompts last for."""
    available = steps_of_epoch * trainer.total_epochs
    requested = trainer.total_training_steps or available
    if requested > available:
        log(
            "the prompts last for %d steps, fewer than trainer.total_training_steps=%d: raise "
            "trainer.total_epochs",
            available,
            requested,
        )
    return min(requested, available)


def _with_gradient_sums(config: RunConfig, processes: RankProcesses, device: str, folder: Path) -> RunConfig:
    """Return ``config`` with a choice of how gradients are added up, which the estimate of memory makes where
    the user made none; log the choice."""
    shapes, gpu_bytes = {}, None
    if device == "cuda" and config.num_ranks > 1:
        with _as_config_errors():
            shapes = {
                path: ModelShape.from_model_folder(path, trusted)
                for path, trusted in model_paths(config).items()
            }
            gpu_bytes = processes.gpu_bytes()
    config, choices = choose_gradient_sums(config, shapes, gpu_bytes)
    for choice in choices:
        log("%s", choice)
        add_to_plan(folder, "Decided by the estimate of memory", str(choice))
    return config


def _build_ranks(
    processes: RankProcesses, groups: Sequence[RankGroup], config: RunConfig, total_steps: int
) -> None:
    """Load and shard the models of all roles."""
    building = processes.build({group.role: group.worker for group in groups}, config, total_steps)
    roles = ", ".join(group.role for group in groups)
    with (
        log_wait(f"{groups[0].num_ranks} trainer rank(s) of {roles}: torch, model, shards"),
        _as_config_errors(),
    ):
        wait_for_all(building, config.trainer.ready_timeout_seconds)


def _build_engines(
    engines: EngineGroup,
    imports: Sequence[Pending],
    config: RunConfig,
    options: EngineOptions,
    folder: Path,
) -> EngineFacts:
    """Build the engines, which sleep until the first weights come, and add what they measured to the plan in
    ``folder``; returns their properties.

    Call it when the ranks have loaded everything: an engine on their GPU measures the free memory, and would
    count as its own what they allocate or free meanwhile.
    """
    limit = config.trainer.ready_timeout_seconds
    with log_wait(f"{engines.num_engines} vLLM engine(s): import and model"), _as_config_errors():
        wait_for_all(imports, limit)
        wait_for_all(engines.build(options, config.trainer.hang_timeout_seconds), limit)
        engines.sleep()
    facts = engines.facts()
    for name, text in facts.measured.items():
        log("%s on this machine: %s", name, text)
        add_to_plan(folder, "Measured when the engine started", f"{name}: {text}")
    return facts


@contextmanager
def _close_at_end(processes: RankProcesses) -> Iterator[None]:
    """Let the ranks leave their process group at the end; after an error the watchdog kills them instead."""
    try:
        yield
    except SystemExit:
        processes.close()
        raise
    processes.close()


@contextmanager
def _as_config_errors() -> Iterator[None]:
    """Turn errors in data, models or checkpoint into configuration errors: one message, no traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    except RemoteError as error:
        if isinstance(error.cause, (ValueError, OSError)):
            raise ConfigError(str(error.cause)) from error
        raise


@_as_config_errors()
def _check_what_is_named(config: RunConfig) -> None:
    """Look for trackers, and import estimator and loss, before anything starts. Raises ``ConfigError`` when
    one of them does not exist."""
    require_installed(config.trainer.logger)
    resolve_advantage_estimator(config.algorithm.adv_estimator)
    resolve_policy_loss(policy_loss_name(config.actor_rollout_ref.actor, config.algorithm.rollout_correction))
