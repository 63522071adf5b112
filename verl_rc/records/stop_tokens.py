"""The tokens that end a response."""

from contextlib import suppress
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from verl_rc.config.models import model_source


def stop_token_ids(tokenizer: Any, path: str) -> tuple[int, ...]:
    """The tokenizer's EOS token, and the others that end a response of the model at ``path``: vLLM stops at
    every ``eos_token_id`` of its ``generation_config.json`` or, without that file, of its ``config.json``."""
    listed = _listed(model_source(path))
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *(token for token in ids if token is not None)]))


def _listed(source: str) -> Any:
    with suppress(OSError):
        return GenerationConfig.from_pretrained(source).eos_token_id
    with suppress(OSError):
        fields, _ = PretrainedConfig.get_config_dict(source)
        of_text = fields.get("text_config", fields)
        return of_text.get("eos_token_id", fields.get("eos_token_id"))
    return None
