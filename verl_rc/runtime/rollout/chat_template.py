"""Whether the policy's chat template can hold the conversations of a run: known before anything starts."""

from collections.abc import Sequence
from typing import Any

from verl_rc.config.rollout import RolloutConfig
from verl_rc.config.run import RunConfig
from verl_rc.records.stop_tokens import stop_token_ids
from verl_rc.records.tokenize import ContinuationEncoder, load_tokenizer
from verl_rc.records.unread import unread_arguments
from verl_rc.runtime.rollout.environment import environment_class
from verl_rc.runtime.rollout.tool_environment import template_arguments, tool_roles

_ROLES = ("user", "tool", "system")
"""Roles that messages of replies may have."""


def check_chat_template(config: RunConfig, tokenizer: Any = None) -> list[str]:
    """Abilities that the chat template lacks and the environment may ask for. Empty where samples have one
    turn.

    ``tokenizer``: the policy's. None if it is loaded.

    Raises ``ValueError`` when tools or environment cannot be made, or the template cannot go on behind a turn
    with what they are known to reply or, where that is unknown, with a message of any role.
    """
    rollout, path = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.path
    if not rollout.converses:
        return []
    if tokenizer is None:
        tokenizer = load_tokenizer(path, config.data.trust_remote_code)
    arguments = template_arguments(rollout.multi_turn, config.data.apply_chat_template_kwargs)
    encoder = ContinuationEncoder(
        tokenizer, arguments, stop_token_ids(tokenizer, path), rollout.allow_special_tokens
    )
    notes = []
    if unread_arguments(tokenizer.chat_template, arguments.keys() & {"tools"}):
        notes.append("it does not read the descriptions of tools: prompts must say what the tools are")
    failures: dict[str, ValueError] = {}
    for kinds in _reply_roles(rollout):
        for roles in [[role] for role in _ROLES] if kinds is None else kinds:
            try:
                encoder.require_roles(roles)
            except ValueError as error:
                if kinds is not None:
                    raise
                failures[roles[0]] = error
    if len(failures) == len(_ROLES):
        raise failures["user"]
    return notes + [f"a reply of the role {role} fails its episode: {failures[role]}" for role in failures]


def _reply_roles(rollout: RolloutConfig) -> list[Sequence[Sequence[str]] | None]:
    """``Environment.reply_roles`` of every environment of the run."""
    environment = rollout.environment
    if environment.name is None:
        return [tool_roles(rollout.multi_turn)]
    named = [(environment.name, environment.arguments)]
    named += [(choice.name, choice.arguments) for choice in environment.choices.values()]
    return [environment_class(name, arguments)().reply_roles() for name, arguments in named]
