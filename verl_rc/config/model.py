"""Which model is trained, and how its forward pass runs."""

from pathlib import Path

from pydantic import Field

from verl_rc.config.schema import StrictModel, UserPath


class ModelConfig(StrictModel):
    """``actor_rollout_ref.model.*``."""

    path: UserPath
    """Hugging Face model folder or hub id."""
    use_remove_padding: bool = True
    """Pack the real tokens of a micro-batch instead of padding every row to the longest."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Off unless you trust its author."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters; 0 trains all parameters. The reference policy is then the actor without its adapters."""
    lora_alpha: int = Field(16, ge=1)
    """Scale of the adapters: their product counts lora_alpha / lora_rank times."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get an adapter: names, a regular expression, or ``all-linear`` (every linear layer but the output)."""
    exclude_modules: str | list[str] | None = None
    """Modules that get none: names or a regular expression."""


def model_source(path: str) -> str:
    """``path`` as transformers takes it: that of a folder with ``~`` written out, a hub id as it is."""
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else path
