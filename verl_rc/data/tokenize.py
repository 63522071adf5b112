"""Tokenizers and chat templates: from messages to prompt token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

Message = Mapping[str, str]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or hub id; it must have a chat template and an end-of-sequence token.

    A folder with a ``tokenizer.json`` is read as it stands: ``AutoTokenizer`` of transformers 5 would replace the file's
    pre-tokenizer by the one of the model's architecture, so that a custom vocabulary is cut in the wrong places.
    Raises ``ValueError`` when a part is missing.
    """
    folder = Path(path).expanduser()
    tokenizer: PreTrainedTokenizerBase
    if (folder / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"actor_rollout_ref.model.path must be a folder or hub id with a tokenizer, got {path!r}: {error}"
            ) from error
    for part, value in {"a chat template": tokenizer.chat_template, "an eos_token": tokenizer.eos_token}.items():
        if not value:
            raise ValueError(f"the tokenizer of {path!r} must have {part}; add it to its tokenizer_config.json.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_prompt(tokenizer: Any, messages: Sequence[Message], template_arguments: Mapping[str, Any]) -> list[int]:
    """Token ids of ``messages`` under the chat template, ending where the assistant's answer begins."""
    return encode_messages(tokenizer, messages, {"add_generation_prompt": True, **template_arguments})


def encode_messages(tokenizer: Any, messages: Sequence[Message], template_arguments: Mapping[str, Any]) -> list[int]:
    """Token ids of ``messages`` under the chat template."""
    token_ids: list[int] = tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=True, return_dict=False, **template_arguments
    )
    return token_ids
