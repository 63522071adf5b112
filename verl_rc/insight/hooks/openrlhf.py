"""OpenRLHF's trainer, which runs in an actor of Ray. Read at OpenRLHF 0.11.0 and 0.11.2.

``attach`` is to be Ray's ``worker_process_setup_hook``, with ``VERL_RC_TOKENS`` naming a folder.
"""

import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from verl_rc.insight.hooks.recorder import (
    FOLDER_VARIABLE,
    Recorder,
    attaches,
    behind_prompt,
    masked_rows,
    rows_of,
    when_imported,
)

VERSIONS = ("0.11", "0.12")
SIGNATURES = {"train_step": ("self", "rollout_samples", "global_step")}
FIELDS = {
    "response_mask": "action_mask",
    "rollout_log_prob": "rollout_log_probs",
    "old_log_prob": "action_log_probs",
    "ref_log_prob": "base_action_log_probs",
    "value": "values",
    "advantage": "advantages",
}
"""Their names of our fields, ``[B, T - 1]``: place j is of token j + 1."""


def attach() -> None:
    """Record what the trainer knows of each token before the update, once its module is imported."""
    if FOLDER_VARIABLE in os.environ:
        when_imported("openrlhf.trainer.ppo_trainer", _attach)


def _attach(module: ModuleType) -> None:
    trainer: Any = getattr(module, "BasePPOTrainer", None)
    if not attaches("OpenRLHF", "openrlhf", VERSIONS, trainer, SIGNATURES):
        return
    records = Recorder(os.environ[FOLDER_VARIABLE], "OpenRLHF", logprobs_mode="processed_logprobs")
    stock = trainer.train_step

    @functools.wraps(stock)
    def train_step(self: Any, rollout_samples: Any, global_step: int) -> Any:
        maker = self.experience_maker
        make = maker.make_experience_batch

        def make_experience_batch(samples: Any) -> Any:
            experiences = make(samples)
            with records:
                if records.takes(global_step + 1):
                    rollout = self.args.rollout
                    records.facts |= {"temperature": rollout.temperature, "top_p": rollout.top_p}
                    rows = (row for experience in experiences for row in _rows(experience))
                    records.write(global_step + 1, rows)
                    records.close()
            return experiences

        maker.make_experience_batch = make_experience_batch
        try:
            return stock(self, rollout_samples, global_step)
        finally:
            del maker.make_experience_batch

    trainer.train_step = train_step


def _rows(experience: Any) -> Iterator[dict[str, Any]]:
    columns = {ours: getattr(experience, theirs) for ours, theirs in FIELDS.items()}
    if columns["rollout_log_prob"] is None:
        raise LookupError("--algo.advantage.is_correction_enable must be given")
    keep, _ = behind_prompt(columns["response_mask"], experience.attention_mask[:, 1:])
    ids, truncated = experience.sequences, experience.truncated
    prompts = experience.attention_mask.bool().clone()
    prompts[:, 1:] &= ~keep
    return rows_of(
        keep,
        {"response_ids": ids[:, 1:], **columns},
        prompt_ids=masked_rows(ids, prompts),
        score=experience.rewards,
        finished=None if truncated is None else ~truncated.bool(),
    )
