"""AReaL's PPO actor, which runs in worker processes. Read at AReaL 1.0.4.

``python -m verl_rc.insight.hooks.areal`` is AReaL's own worker with the hook, for ``scheduling_spec.cmd``; a
script of its SPMD mode imports this module. ``VERL_RC_TOKENS`` names the folder.
"""

import functools
import os
import runpy
from collections.abc import Iterator, Mapping
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

VERSIONS = ("1.0.4", "1.0.5")
SIGNATURES = {"_compute_advantages": ("self", "data")}
_WORKER = "areal.infra.rpc.rpc_server"
_COPIED = (
    "input_ids",
    "attention_mask",
    "loss_mask",
    "logprobs",
    "prox_logp",
    "ref_logp",
    "versions",
    "rewards",
)
"""Copied before the advantages, whose computation changes some of them: ``[B, T]``, ``rewards`` ``[B]``."""
_SHIFTED = ("prox_logp", "ref_logp", "advantages")
"""Place j is of token j + 1."""


def _attach(module: ModuleType) -> None:
    actor: Any = getattr(module, "PPOActor", None)
    if not attaches("AReaL", "areal", VERSIONS, actor, SIGNATURES):
        return
    rank = int(os.environ.get("RANK", "0"))
    records, stock = Recorder(os.environ[FOLDER_VARIABLE], "AReaL", rank), actor._compute_advantages

    @functools.wraps(stock)
    def compute_advantages(self: Any, data: Any) -> Any:
        copies: dict[str, Any] = {}
        with records:
            step = self.engine.get_version() + 1
            # Ranks of one sequence's shards have the same rows.
            if records.takes(step) and self.engine.is_data_parallel_head():
                copies = {name: data[name].clone() for name in _COPIED if data.get(name) is not None}
        result = stock(self, data)
        with records:
            if copies:
                records.facts["temperature"] = self.temperature
                records.write(step, _rows({**copies, "advantages": result["advantages"]}))
                records.close()
        return result

    actor._compute_advantages = compute_advantages


def _rows(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    shifted = {name: data[name].roll(1, dims=1) for name in _SHIFTED if name in data}
    keep, prompts = behind_prompt(data["loss_mask"], data["attention_mask"])
    return rows_of(
        keep,
        {
            "response_mask": data["loss_mask"],
            "response_ids": data["input_ids"],
            "rollout_log_prob": data["logprobs"],
            "old_log_prob": shifted.get("prox_logp"),
            "ref_log_prob": shifted.get("ref_logp"),
            "advantage": shifted["advantages"],
            "version": data.get("versions"),
        },
        prompt_ids=masked_rows(data["input_ids"], prompts),
        score=data["rewards"],
    )


if FOLDER_VARIABLE in os.environ:
    when_imported("areal.trainer.ppo.actor", _attach)
if __name__ == "__main__":
    runpy.run_module(_WORKER, run_name="__main__", alter_sys=True)
