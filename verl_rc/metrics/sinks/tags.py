"""What a run is about in a few words, for finding it among others."""

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

_LONGEST = 64
"""Characters of a tag that W&B accepts."""


def run_tags(config: Mapping[str, Any]) -> list[str]:
    """Tags of a resolved configuration: model, estimator, loss, correction, precision of the engine, size. Sections that are not
    there give none (a run of SFT has few)."""
    tags = (tag[:_LONGEST] for part in (_policy, _algorithm, _correction) for tag in part(config))
    return list(dict.fromkeys(tags))


def _policy(config: Mapping[str, Any]) -> Iterator[str]:
    policy = _section(config, "actor_rollout_ref")
    model, rollout, trainer = _section(policy, "model"), _section(policy, "rollout"), _section(config, "trainer")
    if model.get("path"):
        yield PurePath(str(model["path"])).name
    if model.get("lora_rank"):
        yield f"lora-{model['lora_rank']}"
    if rollout.get("dtype"):
        yield f"engine-{rollout.get('quantization') or rollout['dtype']}"
    if rollout.get("kv_cache_dtype") not in (None, "auto"):
        yield f"kv-cache-{rollout['kv_cache_dtype']}"
    if "n_gpus_per_node" in trainer:
        yield f"{trainer.get('nnodes', 1)}x{trainer['n_gpus_per_node']}"


def _algorithm(config: Mapping[str, Any]) -> Iterator[str]:
    algorithm = _section(config, "algorithm")
    loss = _section(config, "actor_rollout_ref", "actor", "policy_loss")
    if algorithm.get("adv_estimator"):
        yield str(algorithm["adv_estimator"])
    if loss.get("loss_mode"):
        yield "ppo-clip" if loss["loss_mode"] == "vanilla" else str(loss["loss_mode"])
    if _section(algorithm, "filter_groups").get("enable"):
        yield "dynamic-sampling"


def _correction(config: Mapping[str, Any]) -> Iterator[str]:
    correction = _section(config, "algorithm", "rollout_correction")
    if not correction:
        return
    yield "bypass" if correction.get("bypass_mode") else "decoupled"
    if correction.get("rollout_is"):
        yield f"is-{correction['rollout_is']}"
    rules = str(correction.get("rollout_rs") or "")
    yield from (f"rs-{rule}" for rule in rules.split(",") if rule)
    if not correction.get("rollout_is") and not rules:
        yield "uncorrected"


def _section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """A section below ``config``, empty when it is not there."""
    section: Any = config
    for name in names:
        section = section[name] if isinstance(section, Mapping) and name in section else {}
    return section if isinstance(section, Mapping) else {}
