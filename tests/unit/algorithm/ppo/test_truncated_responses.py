"""Truncated responses that are masked: the loss is that of the other rows alone, in a float64 loop."""

import math
from dataclasses import replace

import pytest
import torch
from planned_runs import INPUTS, ROWS, config_of, current_scores, loss_of, step_inputs

FINISHED = torch.arange(ROWS) % 3 != 0
MASKED = {"algorithm.mask_truncated_responses": True}


def expected_loss(mode: str, advantages: torch.Tensor, ratios: torch.Tensor, mask: torch.Tensor) -> float:
    """PPO clip (0.2, dual clip 3) over finished rows alone, by their tokens or rows."""
    rows = []
    for row in range(ROWS):
        losses = []
        for token in range(mask.shape[1] if FINISHED[row] else 0):
            if mask[row, token]:
                advantage, ratio = float(advantages[row, token]), float(ratios[row, token])
                clipped = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
                losses.append(min(clipped, -3 * advantage) if advantage < 0 else clipped)
        rows.append(losses)
    if mode == "token-mean":
        return math.fsum(map(math.fsum, rows)) / sum(map(len, rows))
    return math.fsum(math.fsum(row) / len(row) for row in rows if row) / sum(map(bool, rows))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("bypass", [False, True])
def test_the_loss_is_that_of_the_responses_that_ended(mode: str, bypass: bool) -> None:
    given = {
        "actor_rollout_ref.actor.loss_agg_mode": mode,
        "algorithm.rollout_correction.bypass_mode": bypass,
    }
    rollouts = INPUTS.scored.rollouts.clone()
    rollouts.finished = FINISHED
    inputs = replace(INPUTS, scored=replace(INPUTS.scored, rollouts=rollouts))
    config, whole = config_of({**given, **MASKED}), step_inputs(config_of(given)).batch
    batch, current = step_inputs(config, inputs).batch, current_scores()
    assert torch.equal(batch.advantages, whole.advantages)
    assert torch.equal(batch.loss_mask, whole.response_mask & FINISHED[:, None])
    ratios = (current.log_probs.detach().double() - batch.old_log_probs.double()).exp()
    loss = loss_of(config, batch, current)
    assert float(loss) == pytest.approx(
        expected_loss(mode, batch.advantages, ratios, batch.response_mask), rel=1e-5
    )
    loss.backward()
    assert current.log_probs.grad is not None
    assert float(current.log_probs.grad[~FINISHED].abs().max()) == 0.0
    assert float(current.log_probs.grad[FINISHED].abs().max()) > 0.0
