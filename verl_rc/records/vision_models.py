"""Which models read pictures. Apart from their image processors, whose import loads Triton."""

from transformers import AutoConfig

from verl_rc.config.models import model_source

VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Values of ``model_type`` whose engine and trainer were compared on pictures."""


def reads_pictures(path: str) -> bool:
    """Whether the model at ``path`` is of a family in ``VISION_FAMILIES``; False where there is no model."""
    try:
        kind: str = AutoConfig.from_pretrained(model_source(path), trust_remote_code=False).model_type
    except (OSError, ValueError):
        return False
    return kind in VISION_FAMILIES
