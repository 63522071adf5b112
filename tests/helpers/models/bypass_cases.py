"""The golden bypass losses as batches and configurations of this project."""

import json
from pathlib import Path
from typing import Any

import torch
from batches_of_ones import ones_tokens

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.records.batches import TrainBatch

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "bypass_losses.json").read_text()
)["cases"]


def case_id(case: dict[str, Any]) -> str:
    config = case["config"]
    return f"{case['preset'] or config['loss_type']}-{config['rollout_rs']}-{case['loss_agg_mode']}"


def case_config(case: dict[str, Any]) -> RolloutCorrectionConfig:
    """The case's correction; without a rule nothing is rejected, and both denominators are the same."""
    fields = dict(case["config"])
    if fields["rollout_rs"] is not None:
        fields["rejection_denominator"] = case["rejection_denominator"]
    return RolloutCorrectionConfig.model_validate(fields)


def with_verl_names(metrics: dict[str, float], config: RolloutCorrectionConfig) -> dict[str, float]:
    """verl's extremes of sequence weights are raw; here those of its name are of applied weights."""
    if config.rollout_is != "sequence":
        return metrics
    name = "rollout_corr/rollout_is"
    return {**metrics, **{f"{name}_{end}": metrics[f"{name}_raw_{end}"] for end in ("min", "max")}}


def case_batch(case: dict[str, Any]) -> TrainBatch:
    """The case's numbers; the masks may have holes, so lengths are those of the widest row."""
    mask = torch.tensor(case["response_mask"]).bool()
    rows, width = mask.shape
    rollout_log_probs, advantages = torch.tensor(case["rollout_log_probs"]), torch.tensor(case["advantages"])
    return TrainBatch(
        tokens=ones_tokens(torch.full((rows,), width), width),
        response_mask=mask,
        loss_mask=mask,
        advantages=advantages,
        old_log_probs=rollout_log_probs,
        rollout_log_probs=rollout_log_probs,
        policy_versions=torch.where(mask, 0, -1),
        scores=torch.zeros(rows),
        batch_size=[rows],
    )
