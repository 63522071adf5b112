"""Checks for parts of a prompt that are not read: entries of rows, arguments of the chat template."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from verl_rc.config.verl.refused_leaves import IMAGES

MEDIA: Mapping[str, str] = dict.fromkeys(
    (
        *("image", "images", "video", "videos", "audio", "audios"),
        *("multi_modal_data", "multi_modal_inputs"),
    ),
    IMAGES,
)
"""Names of columns, and of entries of a message, that hold more than text; with reason and remedy."""
UNREAD: Mapping[str, str] = {
    **MEDIA,
    "tools": "tools are those of the run, the same for all rows; write "
    "actor_rollout_ref.rollout.multi_turn.tools or .tool_config_path, and drop it",
    **dict.fromkeys(
        ("chat_template_kwargs", "apply_chat_template_kwargs", "enable_thinking"),
        "arguments of the chat template are the same for all rows; write data.apply_chat_template_kwargs, "
        "and drop it",
    ),
}
"""The same for the columns of a row."""


def refuse_unread(record: Mapping[str, Any], location: str, names: Collection[str] = UNREAD.keys()) -> None:
    """Raise ``ValueError`` at the first entry of ``record`` that has one of ``names`` and is not empty."""
    for name in names:
        value = record.get(name)
        if value is not None and not (hasattr(value, "__len__") and len(value) == 0):
            raise ValueError(f"{name!r} in {location} is refused and must be empty: {UNREAD[name]}.")


def unread_arguments(template: str | Mapping[str, str], arguments: Collection[str]) -> list[str]:
    """The names of ``arguments`` that a chat template, or none of several, mentions."""
    text = template if isinstance(template, str) else "\n".join(template.values())
    return [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", text)]
