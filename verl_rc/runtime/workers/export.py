"""A checkpoint as a Hugging Face folder: the policy (LoRA adapters merged in, or alone) or the critic."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForTokenClassification

from verl_rc.config.errors import listed
from verl_rc.config.files import is_outside
from verl_rc.config.models import ModelConfig
from verl_rc.records.tokenize import load_tokenizer
from verl_rc.records.vision_models import VISION_FAMILIES
from verl_rc.runtime.checkpoint import CheckpointError, CheckpointStore, SavedRun, load_full_state_dict
from verl_rc.runtime.checkpoint.shards import is_frozen, named_tensors
from verl_rc.runtime.workers.language_model import language_model_class, load_causal_lm, torch_dtype
from verl_rc.runtime.workers.lora import add_adapters
from verl_rc.runtime.workers.vision import freeze_tower

Part = Literal["policy", "critic", "adapter"]
COPIED_FILES = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "generation_config.json",
    "*processor_config.json",
)
"""Files that training does not change and that go along byte for byte: the tokenizer's, how to sample by
default, and how to read pictures."""
MAX_NAMES = 3
"""Names listed in an error; the rest are counted."""


class ExportError(ValueError):
    """A checkpoint cannot be exported as asked; the message says what must hold, what was found and what to
    do."""


@dataclass(frozen=True)
class _Source:
    """The part of a checkpoint that is exported, and the model that it was trained from."""

    folder: Path
    """The shards."""
    step: int
    model: ModelConfig
    """Configuration of the part's model; ``path`` is where the base model is now."""
    model_config: Any
    """The base model's own configuration (``transformers.PretrainedConfig``)."""
    tokenizer_path: str
    actor_dtype: torch.dtype
    """Precision that the actor's base weights had in training."""
    freezes_tower: bool
    """Whether a vision tower is the base model's."""


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    part: Part = "policy",
    dtype_name: str | None = None,
    model_path: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Write a part of a checkpoint as a model folder; returns a line that says what is in it.

    The folder gets its name once it is complete. Raises ``ExportError`` when the checkpoint, its base model
    or the part asked for is missing or does not fit, and when the folder is not empty or cannot be written.

    Args:
        checkpoint: A folder ``global_step_N``.
        output: The folder to make; may exist if it is empty.
        part: The policy with its LoRA adapters (if any) merged in, the value model, or the LoRA adapters
            alone.
        dtype_name: Precision of the written weights. None means that of the base model.
        model_path: The base model, when it is no longer where the run's configuration says; its tokenizer
            must be there too.
        trust_remote_code: Run code that comes with the base model. What the checkpoint says about it does not
            count: its author may have named a folder with code of his.
    """
    output = output.expanduser().resolve()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ExportError(
            f"--output must name a new or an empty folder, but {output} is neither. Name another one."
        )
    try:
        source = _open_source(checkpoint, part, model_path, trust_remote_code)
        dtype = torch_dtype(dtype_name) if dtype_name else source.model_config.dtype or torch.float32
        model = _build(part, source, load_full_state_dict(source.folder), dtype)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    with _complete_or_absent(output) as folder:
        model.save_pretrained(folder)
        if part != "adapter":
            _copy_tokenizer(source, folder)
    name = "LoRA adapter" if part == "adapter" else type(model).__name__
    return f"{output}: {name} after step {source.step}, {str(dtype).removeprefix('torch.')}"


def _open_source(checkpoint: Path, part: Part, model_path: str | None, trust_remote_code: bool) -> _Source:
    """Find the shards and the base model. Raises ``CheckpointError`` and ``ExportError``."""
    saved = _load_saved_run(checkpoint)
    folder = checkpoint / ("critic" if part == "critic" else "actor")
    if part == "critic" and not folder.is_dir():
        raise ExportError(
            f"--critic needs a run that trains a critic, but {checkpoint} holds none. Leave --critic out."
        )
    if is_outside(checkpoint, folder):
        raise ExportError(f"{folder} must lie in its checkpoint, but is a link to elsewhere. Copy it there.")
    try:
        actor = saved.config["actor_rollout_ref"]
        model = ModelConfig.model_validate(
            {
                **(saved.config["critic"] if part == "critic" else actor)["model"],
                "lora_adapter_path": None,  # the shards have what became of them
            }
        )
        actor_path, actor_dtype = (
            str(actor["model"]["path"]),
            torch_dtype(actor["actor"]["fsdp_config"]["model_dtype"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ExportError(
            f"{checkpoint} must hold the configuration of its run, but reading it gave "
            f"{type(error).__name__}: {' '.join(str(error).split())}. Use another checkpoint."
        ) from error
    model = model.model_copy(update={"trust_remote_code": trust_remote_code})
    if part == "adapter" and model.lora_rank == 0:
        raise ExportError(
            "--adapter needs a run that trains LoRA adapters, but the checkpoint has "
            "actor_rollout_ref.model.lora_rank=0. Leave --adapter out."
        )
    path = _local_path(model_path or model.path)
    return _Source(
        folder,
        saved.state.step,
        model.model_copy(update={"path": path}),
        _read_model_config(path, model.trust_remote_code),
        path if model_path else _local_path(actor_path),
        actor_dtype,
        actor["actor"].get("freeze_vision_tower", True),
    )


def _load_saved_run(checkpoint: Path) -> SavedRun:
    try:
        return SavedRun.load(checkpoint)
    except CheckpointError as error:
        inside = CheckpointStore(checkpoint, most=None).newest_first()
        if inside:
            raise ExportError(
                f"a checkpoint is a folder global_step_N; the newest in {checkpoint} is {inside[0]}."
            ) from error
        raise


def _local_path(path: str) -> str:
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def _read_model_config(path: str, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ExportError(
            f"the model that the run was trained from must be readable, but {path} is not a model folder or "
            f"hub id ({str(error).partition(chr(10))[0]}). If it moved, say where it is with --model; if it "
            "needs code of its own, and you trust that, pass --trust-remote-code."
        ) from error


def _build(part: Part, source: _Source, tensors: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """The trained model in ``dtype``; base weights are read only to merge adapters into them."""
    if part == "policy" and source.model.lora_rank:
        base = load_causal_lm(
            source.model.path, source.actor_dtype, trust_remote_code=source.model.trust_remote_code
        )
        # Merged in float32, as the trainer merges for its engines, and rounded once.
        adapted: Any = add_adapters(base.float(), source.model)
        _fill(adapted, tensors, torch.float32, source)
        return adapted.merge_and_unload().to(dtype)
    if part == "policy" and source.freezes_tower and source.model_config.model_type in VISION_FAMILIES:
        whole = load_causal_lm(source.model.path, dtype)
        freeze_tower(whole)
        _fill(whole, tensors, dtype, source)
        return whole
    # No memory for the model twice: the saved tensors take the place of the meta tensors (assign=True).
    arguments = {"trust_remote_code": source.model.trust_remote_code}
    with torch.device("meta"):
        if part == "critic":
            source.model_config.num_labels = 1
            source.model_config.classifier_dropout = 0.0
            empty = AutoModelForTokenClassification.from_config(source.model_config, **arguments)
        else:
            auto = language_model_class(source.model_config)
            empty = add_adapters(auto.from_config(source.model_config, **arguments), source.model)
    _fill(empty, tensors, dtype, source)
    return empty


def _fill(model: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, source: _Source) -> None:
    """Replace the trained parameters by the saved ones. Raises ``ExportError`` when names or shapes
    differ."""
    expected = {name: tensor.shape for name, tensor in named_tensors(model).items() if not is_frozen(tensor)}
    saved = {name: tensor.shape for name, tensor in tensors.items()}
    different = [name for name in expected.keys() | saved.keys() if expected.get(name) != saved.get(name)]
    if different:
        raise ExportError(
            f"{source.folder} must have been trained from the model in {source.model.path}, but the two "
            f"differ in {listed(different, MAX_NAMES)}. Say with --model where the right one is."
        )
    typed = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    # Not strict: frozen base weights and tied heads are in the model and not in the checkpoint.
    model.load_state_dict(typed, strict=False, assign=True)
    # After assign=True a tied head would still be the meta tensor.
    model.tie_weights()


def _copy_tokenizer(source: _Source, folder: Path) -> None:
    """Put the tokenizer's files beside the model. Raises ``ExportError`` when they do not make one."""
    try:
        path = source.tokenizer_path
        origin = (
            Path(path)
            if Path(path).is_dir()
            else Path(snapshot_download(path, allow_patterns=list(COPIED_FILES)))
        )
        for pattern in COPIED_FILES:
            for file in filter(Path.is_file, origin.glob(pattern)):
                shutil.copyfile(file, folder / file.name)
        if not any(folder.glob("tokenizer*")):  # transformers would make an empty one up
            raise ValueError("there are no files tokenizer*.")
        load_tokenizer(str(folder), source.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ExportError(
            f"the base model's folder must hold its tokenizer, but {source.tokenizer_path} gave: {error} Say "
            "with --model where a complete one is."
        ) from error


@contextmanager
def _complete_or_absent(output: Path) -> Iterator[Path]:
    """A folder beside ``output`` to write into, which takes its name at the end, and disappears after an
    error."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{output.name}.partial-", dir=output.parent) as partial:
            folder = Path(partial) / output.name
            folder.mkdir()
            yield folder
            # A rename within one folder is atomic: a reader finds the whole model or none.
            folder.rename(output)
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{output} must be writable, but {error}. Free the place or name another one."
        ) from error
