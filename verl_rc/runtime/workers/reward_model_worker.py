"""The reward model: judges whole conversations, in a separate process."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from verl_rc.config.task import RewardModelConfig
from verl_rc.records.tokenize import load_tokenizer
from verl_rc.runtime.distributed.process_group import trainer_device
from verl_rc.runtime.workers.language_model import torch_dtype

Conversation = Sequence[dict[str, Any]]
"""Chat messages ``{role, content}``; the last one is the response."""


class RewardModelWorker(ABC):
    """A sequence classifier with one output; its logit is the score."""

    def __init__(self, config: RewardModelConfig, device: torch.device) -> None:
        """Load tokenizer and model; no weights with the device ``meta``.

        Raises ``ValueError`` when the model has not exactly one output, when the folder lacks its trained
        head, or when its tokenizer lacks a chat template.
        """
        self._config, self._device = config, device
        self._tokenizer = load_tokenizer(str(config.model_path), config.trust_remote_code)
        self._model = _load_classifier(config, device)
        self._text_config = self._model.config.get_text_config()
        self._pad_token_id: int | None = self._text_config.pad_token_id
        positions = getattr(self._model.config, "max_position_embeddings", None)
        self._max_length = min(
            length for length in (config.max_length, positions, sys.maxsize) if length is not None
        )

    def score(self, conversations: Sequence[Conversation]) -> list[float | str]:
        """The model's score of each conversation in order, or the reason why it has none: too long, or not
        finite."""
        token_ids: list[list[int]] = [
            self._tokenizer.apply_chat_template(list(conversation), tokenize=True, return_dict=False)
            for conversation in conversations
        ]
        answers: list[float | str] = [
            f"a conversation must have at most {self._max_length} tokens (reward.reward_model.max_length, or "
            f"what the model's positions allow), got {len(ids)}"
            for ids in token_ids
        ]
        fitting = [row for row, ids in enumerate(token_ids) if len(ids) <= self._max_length]
        fitting.sort(key=lambda row: len(token_ids[row]))  # neighbours need little padding
        for row, score in zip(fitting, self._logits([token_ids[row] for row in fitting]), strict=True):
            answers[row] = (
                score if math.isfinite(score) else f"the reward model's score must be finite, got {score}"
            )
        return answers

    @abstractmethod
    def _logits(self, token_ids: Sequence[list[int]]) -> list[float]:
        """What the model gives for each conversation alone, at its last token that is not padding."""


class TransformersRewardModel(RewardModelWorker):
    """The model as transformers computes it."""

    def __init__(self, config: RewardModelConfig) -> None:
        """See ``RewardModelWorker``."""
        super().__init__(config, trainer_device("cuda" if config.n_gpus_per_node else "cpu"))

    def _logits(self, token_ids: Sequence[list[int]]) -> list[float]:
        """See ``RewardModelWorker``."""
        size = self._config.micro_batch_size_per_gpu
        return [
            logit
            for start in range(0, len(token_ids), size)
            for logit in self._logits_of_batch(token_ids[start : start + size])
        ]

    @torch.no_grad()
    def _logits_of_batch(self, token_ids: Sequence[list[int]]) -> list[float]:
        longest = max(len(ids) for ids in token_ids)
        padding = self._pad_token_id
        if padding is None or padding < 0:  # some configurations say -1
            # transformers reads the logit at the last token that is not padding. Without a padding token that
            # is the last token of all, even if it is EOS.
            last_tokens = {ids[-1] for ids in token_ids}
            padding = next(token for token in count() if token not in last_tokens)
            self._text_config.pad_token_id = padding
        input_ids = torch.tensor(
            [[*ids, *[padding] * (longest - len(ids))] for ids in token_ids], device=self._device
        )
        attention_mask = torch.tensor(
            [[position < len(ids) for position in range(longest)] for ids in token_ids]
        )
        logits = self._model(
            input_ids=input_ids, attention_mask=attention_mask.long().to(self._device)
        ).logits
        scores: list[float] = logits[:, 0].float().tolist()
        return scores


def _load_classifier(config: RewardModelConfig, device: torch.device) -> Any:
    """The model in evaluation form. transformers and vLLM would make a missing head up from random numbers:
    that is refused here."""
    path = str(config.model_path)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        path,
        dtype=torch_dtype(config.dtype),
        device_map=device,
        trust_remote_code=config.trust_remote_code,
        output_loading_info=True,
    )
    if loading["missing_keys"]:
        raise ValueError(
            f"reward.reward_model.model_path must be a trained sequence classifier, but {path!r} lacks the "
            f"weights {sorted(loading['missing_keys'])}: it is a model of another kind."
        )
    if model.config.num_labels != 1:
        raise ValueError(
            f"reward.reward_model.model_path must be a classifier with one output (num_labels=1), {path!r} "
            f"has {model.config.num_labels}."
        )
    return model.eval()
