"""The prompts that environments open their episodes with."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_rc.config.task import DataConfig
from verl_rc.records.dataset import PromptRow, fit_prompt
from verl_rc.records.episode import Opening
from verl_rc.records.special_tokens import SpecialTokenError
from verl_rc.records.tokenize import encode_opening
from verl_rc.runtime.distributed.event_loop import EventLoop
from verl_rc.runtime.rollout.conversation import MAX_ATTEMPTS
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.environment_host import Hosts


class OverlongOpeningError(EpisodeFailedError):
    """An episode opens with more tokens than ``data.filter_overlong_prompts`` lets through."""


class Openings:
    """Asks hosts what episodes open with, and encodes it: once for all samples of a prompt."""

    def __init__(
        self, hosts: Hosts, tokenizer: Any, data: DataConfig, allow_special_tokens: bool = False
    ) -> None:
        self.hosts = hosts
        self._tokenizer = tokenizer
        self._data = data
        self._allow_special_tokens = allow_special_tokens
        self._loop = EventLoop("openings")

    def open(self, rows: Sequence[tuple[PromptRow, int]]) -> list[PromptRow | EpisodeFailedError]:
        """Each row with the prompt that its environment opens with, given the environment's seed; or why it
        failed, also when asked again; ``OverlongOpeningError`` where the data's filter leaves it out.

        Raises ``ValueError`` when a prompt is too long, see ``data.truncation``.
        """
        openings: list[Opening | EpisodeFailedError | None] = self._loop.start(self._ask_all(rows)).result()
        return [
            opening if isinstance(opening, EpisodeFailedError) else self._encoded(row, opening)
            for (row, _), opening in zip(rows, openings, strict=True)
        ]

    async def _ask_all(
        self, rows: Sequence[tuple[PromptRow, int]]
    ) -> list[Opening | EpisodeFailedError | None]:
        return await asyncio.gather(*(self._ask(row, seed) for row, seed in rows))

    async def _ask(self, row: PromptRow, seed: int) -> Opening | EpisodeFailedError | None:
        for _ in range(MAX_ATTEMPTS):
            try:
                return await self.hosts.open(row.for_environment(), seed)
            except EpisodeFailedError as error:
                failure = error
        return failure

    def _encoded(self, row: PromptRow, opening: Opening | None) -> PromptRow | EpisodeFailedError:
        if opening is None:
            return row
        try:
            token_ids = encode_opening(
                self._tokenizer, opening, self._data.apply_chat_template_kwargs, self._allow_special_tokens
            )
        except SpecialTokenError as error:
            return EpisodeFailedError(f"the opening of an episode of row {row.row_index}: {error}")
        where, limit = f"the opening of an episode of row {row.row_index}", self._data.max_prompt_length
        if self._data.filter_overlong_prompts and len(token_ids) > limit:
            return OverlongOpeningError(
                f"data.filter_overlong_prompts lets through at most data.max_prompt_length={limit} "
                f"tokens, and {where} has {len(token_ids)} with its tools. Raise the limit to train on it."
            )
        return replace(row, opening=opening, prompt_token_ids=fit_prompt(token_ids, self._data, where))
