"""Preflight checks before a run starts: models, tokenizer, data and reward function."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_rc.algorithm.rewards import RewardError, RewardSample, build_reward, score_on_timeout
from verl_rc.config.errors import ConfigError
from verl_rc.config.run import RunConfig
from verl_rc.plan.finding import Finding
from verl_rc.plan.machine import (
    check_devices,
    check_disk,
    check_driver,
    check_float16,
    check_folder,
    check_fp8,
    check_memory,
    check_packages,
    check_ports,
    check_step,
)
from verl_rc.plan.memory import ModelShape, model_paths
from verl_rc.records.dataset import (
    PromptDataset,
    PromptRow,
    describe_lengths,
    evenly_spread,
    require_ground_truths,
)
from verl_rc.records.image_reader import ImageReader
from verl_rc.records.tokenize import encode_prompt, load_tokenizer
from verl_rc.runtime.rollout.chat_template import check_chat_template
from verl_rc.runtime.workers.reward_pool import RewardPool
from verl_rc.runtime.workers.supported_models import unsupported_model

SAMPLED_PROMPTS = 1000
"""Number of prompts whose lengths are counted, evenly spaced over all files."""
SCORED_ROWS = 3
"""Number of rows on which the reward function is tried."""


@dataclass
class Inputs:
    """Results of checks that later checks use."""

    shapes: dict[str, ModelShape] = field(default_factory=dict)
    """Shapes of the readable models by path."""
    tokenizer: Any = None
    rows: list[PromptRow] = field(default_factory=list)
    """The first training prompts."""
    without_ground_truth: str | None = None
    """The location of a row that lacks the ground truth that its built-in scorer needs. None if no row does.
    """


def check_models(config: RunConfig, inputs: Inputs) -> Iterator[Finding]:
    """Check that transformers can read every model's ``config.json``; fills ``inputs.shapes``."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    for path, trusted in model_paths(config).items():
        try:
            if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
                raise ValueError("there is no such folder")
            shape = ModelShape.from_model_folder(path, trusted)
        except (OSError, ValueError) as error:
            yield Finding(
                "failed",
                "model",
                f"{path}: {_first_line(error)}",
                "it must be a Hugging Face model",
                "pass a folder with a config.json, or a hub id that can be reached "
                "(actor_rollout_ref.model.path)",
            )
            continue
        problem = unsupported_model(config, path, trusted)
        if problem is not None:
            yield Finding(
                "failed",
                "model",
                f"{path}: {problem}",
                "trainer and engine must compute the same model",
                "do what it names, or take another model",
            )
        inputs.shapes[path] = shape
        active = (shape.parameters - shape.idle_parameters) / 1e6
        active_text = f" ({active:.2f} M for a token)" if shape.idle_parameters else ""
        summary = (
            f"{path}: {shape.parameters / 1e6:.2f} M weights{active_text}, {shape.layers} layers of width "
            f"{shape.width}"
        )
        if path == config.reward.reward_model.model_path:
            yield Finding("ok", "reward model", summary)
            continue
        yield Finding.from_condition(
            shape.positions >= longest,
            "model",
            f"{summary}, {shape.positions} positions",
            f"it must have {longest} positions, for data.max_prompt_length + data.max_response_length tokens",
            "lower data.max_prompt_length or data.max_response_length, or take a model with a longer context",
        )


def check_tokenizer(config: RunConfig, inputs: Inputs) -> Iterator[Finding]:
    """Check that the tokenizer has a chat template and an EOS token and fits the model; fills
    ``inputs.tokenizer``."""
    path = config.actor_rollout_ref.model.path
    if path not in inputs.shapes and not Path(path).expanduser().is_dir():
        yield Finding("note", "tokenizer", f"not checked: there is no model {path}")
        return
    try:
        tokenizer = load_tokenizer(path, config.data.trust_remote_code)
        messages = [{"role": "user", "content": "1"}]
        token_ids = encode_prompt(tokenizer, messages, config.data.apply_chat_template_kwargs)
    except (OSError, ValueError) as error:
        yield Finding(
            "failed",
            "tokenizer",
            _first_line(error),
            "the model's folder must hold its tokenizer, with a chat template that takes a message of a user",
            "take the instruction-tuned variant of the model",
        )
        return
    inputs.tokenizer = tokenizer
    shape, size = inputs.shapes.get(path), len(tokenizer)
    vocabulary = size if shape is None else shape.vocabulary
    yield Finding.from_condition(
        size <= vocabulary,
        "tokenizer",
        f"{size} tokens, end {tokenizer.eos_token!r}; the chat template makes {len(token_ids)} tokens of the "
        "message '1'",
        f"the model must have an embedding for each of the {size} tokens; it has {vocabulary}",
        "take the tokenizer that belongs to the model",
    )


def check_conversations(config: RunConfig, inputs: Inputs) -> Iterator[Finding]:
    """Check that the chat template can go on behind the policy's turns, where tools or an environment answer
    them."""
    if inputs.tokenizer is None or not config.actor_rollout_ref.rollout.converses:
        return
    try:
        notes = check_chat_template(config, inputs.tokenizer)
    except (OSError, ValueError) as error:
        yield Finding(
            "failed",
            "chat template",
            _first_line(error),
            "what tools or environment reply must reach the policy whole",
            "do what it names, or take another model",
        )
        return
    yield Finding("ok", "chat template", "goes on behind the policy's turns with what answers them")
    for note in notes:
        yield Finding("note", "chat template", note)


def check_data(config: RunConfig, inputs: Inputs) -> Iterator[Finding]:
    """Check columns, prompt lengths and the number of prompts of the data files; fills ``inputs.rows``."""
    if inputs.tokenizer is None:
        yield Finding("note", "data", "not checked: there is no tokenizer")
        return
    data = config.data
    sources = {
        "data.train_files": (data.train_files, data.train_batch_size, data.train_max_samples),
        "data.val_files": (data.val_files, 1, data.val_max_samples),
    }
    for key, (files, min_prompts, max_samples) in sources.items():
        if not files and key == "data.val_files":
            yield Finding("note", key, "none: nothing is validated")
            continue
        try:
            lengths, total, rows, without = _read_prompts(config, inputs.tokenizer, files)
        except (OSError, ValueError) as error:
            yield Finding(
                "failed",
                key,
                _first_line(error),
                "files must hold chat messages, data_source and reward_model",
                "correct the file; docs/tasks.md makes one",
            )
            continue
        inputs.rows = inputs.rows or rows
        inputs.without_ground_truth = inputs.without_ground_truth or without
        total = min(total, max_samples) if max_samples >= 0 else total
        yield _length_finding(config, key, lengths, total)
        num_usable = (
            total * sum(length <= config.data.max_prompt_length for length in lengths) // len(lengths)
        )
        usable = num_usable if config.data.filter_overlong_prompts else total
        steps = _steps_text(config, usable) if key == "data.train_files" else ""
        yield Finding.from_condition(
            usable >= min_prompts,
            f"{key}, size",
            f"{usable} prompts{steps}",
            f"there must be at least {min_prompts} prompts (data.train_batch_size)",
            "lower data.train_batch_size, or add data",
        )


def _steps_text(config: RunConfig, prompts: int) -> str:
    """The steps that so many prompts suffice for; empty where it is unknown (mixture, dynamic sampling)."""
    trainer, per_draw = config.trainer, config.data.gen_batch_size
    draws_more = config.algorithm.filter_groups.enable or config.algorithm.max_refills
    if config.data.train_weights is not None or draws_more or prompts < per_draw:
        return ""
    steps, limit = prompts // per_draw * trainer.total_epochs, trainer.total_training_steps
    warning = "" if limit is None or limit <= steps else f", fewer than trainer.total_training_steps={limit}"
    return f", enough for {steps} steps in {trainer.total_epochs} epoch(s){warning}"


def _read_prompts(
    config: RunConfig, tokenizer: Any, files: Sequence[str]
) -> tuple[list[int], int, list[PromptRow], str | None]:
    """Lengths of ``SAMPLED_PROMPTS`` prompts in tokens, the number of all prompts, the first rows, and the
    location of a row that lacks the ground truth that its built-in scorer needs."""
    unlimited = {"max_prompt_length": sys.maxsize, "filter_overlong_prompts": False}
    policy = config.actor_rollout_ref
    reader = ImageReader.of(policy.model.path, config.data.mm_processor_kwargs, policy.rollout.limit_images)
    dataset = PromptDataset(files, tokenizer, config.data.model_copy(update=unlimited), reader=reader)
    rows = [dataset[index] for index in evenly_spread(len(dataset), SAMPLED_PROMPTS)]
    lengths = [len(row.prompt_token_ids) for row in rows]
    without = dataset.without_ground_truth() if config.reward.uses_built_in_scorers else None
    return lengths, len(dataset), rows[:SCORED_ROWS], without


def _length_finding(config: RunConfig, key: str, lengths: Sequence[int], total: int) -> Finding:
    data = config.data
    summary = describe_lengths(lengths, total, data.max_prompt_length)
    is_longer = max(lengths) > data.max_prompt_length
    if is_longer and data.filter_overlong_prompts:
        return Finding("note", key, f"{summary}; those are left out")
    if is_longer and data.truncation != "error":
        return Finding("note", key, f"{summary}; those are cut (data.truncation={data.truncation})")
    return Finding.from_condition(
        not is_longer,
        key,
        summary,
        "no prompt may be longer than data.max_prompt_length",
        f"pass data.max_prompt_length={max(lengths)}, data.filter_overlong_prompts=True, or "
        "data.truncation=left",
    )


def check_reward(config: RunConfig, inputs: Inputs) -> Iterator[Finding]:
    """Check that the reward function scores a ground truth and an empty response, in a process where a run
    would use one."""
    function = config.reward.custom_reward_function
    if not inputs.rows and function.path is None:
        yield Finding("note", "reward", "not tried: there are no rows")
        return
    if config.reward.reward_model.enable:
        yield Finding("note", "reward", "not tried: the reward model is not loaded here")
        return
    samples = [
        RewardSample.from_row(row, answer) for row in inputs.rows for answer in (str(row.ground_truth), "")
    ]
    try:
        require_ground_truths(inputs.without_ground_truth)
        scores = _scores(config, samples)
    except (ConfigError, RewardError, ValueError) as error:
        yield Finding(
            "failed",
            "reward",
            _first_line(error),
            "it must give a finite number for every response",
            "correct the function (reward.custom_reward_function), or the data_source of the rows",
        )
        return
    if not samples:
        yield Finding(
            "note",
            "reward",
            f"{function.name} of {function.path} is there, and was not tried: there are no rows",
        )
        return
    pairs = list(zip(scores[::2], scores[1::2], strict=True))
    scores_text = ", ".join(f"{truth:g} / {empty:g}" for truth, empty in pairs)
    summary = f"ground truth / empty response of {len(pairs)} row(s): {scores_text}"
    if any(truth > empty for truth, empty in pairs):
        yield Finding("ok", "reward", summary)
    else:
        yield Finding(
            "note",
            "reward",
            f"{summary}. Equal scores are right only where a ground truth is not an answer by itself",
        )


def _scores(config: RunConfig, samples: Sequence[RewardSample]) -> list[float]:
    """The score of each sample.

    Raises ``RewardError`` at the first failure, also of a call that hangs or kills its process, and
    ``ValueError`` when a function of the user's own cannot be loaded.
    """
    needs_process = config.reward.custom_reward_function.path is not None
    if not needs_process and all(score_on_timeout(sample.data_source) is None for sample in samples):
        reward = build_reward(config.reward)
        return [reward(sample).score for sample in samples]
    one_process = config.reward.model_copy(update={"num_workers": 1})
    scores = []
    with closing(RewardPool(one_process, config.trainer.ready_timeout_seconds)) as pool:
        for sample in samples:
            [(_, result)] = pool.results([sample])
            if isinstance(result, RewardError):
                raise result
            scores.append(result.score)
    return scores


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def examine(config: RunConfig) -> Iterator[Finding]:
    """Run every check on a valid configuration, cheap ones first. Loads no weights, starts at most a process
    for the reward function, leaves no files behind."""
    folder = Path(str(config.trainer.default_local_dir))
    inputs = Inputs()
    yield from check_packages()
    yield from check_driver()
    yield from check_devices(config)
    yield from check_fp8(config)
    yield from check_float16(config)
    yield from check_ports()
    yield from check_step(config)
    yield from check_folder(folder)
    yield from check_models(config, inputs)
    yield from check_tokenizer(config, inputs)
    yield from check_conversations(config, inputs)
    yield from check_data(config, inputs)
    yield from check_reward(config, inputs)
    if set(inputs.shapes) == set(model_paths(config)):
        yield from check_memory(config, inputs.shapes)
        yield from check_disk(config, inputs.shapes, folder)
    else:
        yield Finding("note", "memory and checkpoints", "not estimated: a model could not be read")
