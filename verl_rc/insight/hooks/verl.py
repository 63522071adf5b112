"""verl's trainer (``verl.trainer.ppo.v1``, its default). Read at verl 0.9.1.

verl imports this module by the entry-point group ``verl.plugins``. It does nothing unless ``VERL_RC_TOKENS``
names a folder.
"""

import functools
import os
import zlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from verl_rc.insight.hooks.recorder import FOLDER_VARIABLE, Recorder, attaches, when_imported

VERSIONS = ("0.9.1", "0.9.2")
SIGNATURES = {"_compute_advantage": ("self", "batch", "metrics")}
FIELDS = {
    "response_mask": "loss_mask",  # their response_mask loses what rollout correction rejects
    "kept": "response_mask",
    "prompt_ids": "prompts",
    "response_ids": "responses",
    "rollout_log_prob": "rollout_log_probs",
    "old_log_prob": "old_log_probs",
    "entropy": "entropy",
    "ref_log_prob": "ref_log_prob",
    "value": "values",
    "advantage": "advantages",
    "weight": "rollout_is_weights",
}
"""Their names of our fields, and of ``prompt_ids``."""
_SCORES = "rm_scores"
_FACTS = ("temperature", "top_p", "top_k", "logprobs_mode")


def attach(module: ModuleType) -> None:
    """Record what verl's trainer knows of each token before the update."""
    trainer: Any = getattr(module, "PPOTrainer", None)
    if not attaches("verl", "verl", VERSIONS, trainer, SIGNATURES):
        return
    records, stock = Recorder(os.environ[FOLDER_VARIABLE], "verl"), trainer._compute_advantage

    @functools.wraps(stock)
    def compute_advantage(self: Any, batch: Any, metrics: Any) -> Any:
        result = stock(self, batch, metrics)
        with records:
            if records.takes(self.global_steps):
                rollout = self.config.actor_rollout_ref.rollout
                records.facts |= {name: rollout.get(name) for name in _FACTS} | {
                    "engine_dtype": rollout.dtype
                }
                data = module.tq.kv_batch_get(batch.keys, batch.partition_id, [*FIELDS.values(), _SCORES])
                records.write(self.global_steps, _rows(data, batch, self.config.algorithm))
                if self.local_trigger_step + 1 == self.parameter_sync_step:
                    records.close()
        return result

    trainer._compute_advantage = compute_advantage


def _rows(data: Any, batch: Any, algorithm: Any) -> Iterator[dict[str, Any]]:
    columns = {ours: data[theirs].unbind() for ours, theirs in FIELDS.items() if theirs in data}
    if "rollout_log_prob" not in columns:
        raise LookupError("actor_rollout_ref.rollout.calculate_log_probs=True must be set")
    if (algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
        del columns["old_log_prob"]  # a copy of the engine's
    scores = data[_SCORES].unbind()
    for index, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        if not tag.get("is_padding", False):
            prompt = key.rsplit("_", 2)[0]  # then come the numbers of the sample and of its output
            yield {name: rows[index] for name, rows in columns.items()} | {
                "score": scores[index].sum(),
                "group": zlib.crc32(prompt.encode()) >> 1,
                "version": tag.get("min_global_steps"),
            }


if FOLDER_VARIABLE in os.environ:
    when_imported("verl.trainer.ppo.v1.trainer_base", attach)
