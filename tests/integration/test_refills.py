"""Groups of which rejection keeps no token are replaced: the batch is full, and the books balance."""

from pathlib import Path

import pytest
from real_runs import metrics_of, train
from small_runs import run_overrides, share_of_digits

CORRECTION = "algorithm.rollout_correction"


@pytest.mark.slow
def test_a_step_is_full_though_rejection_leaves_nothing_of_some_groups(
    task: dict[str, Path], tmp_path: Path
) -> None:
    """An engine in bfloat16, and bounds so tight that about every second row is rejected, in pairs."""
    run = tmp_path / "run"
    result = train(
        [
            *run_overrides(task, run),
            share_of_digits(tmp_path),
            "actor_rollout_ref.rollout.dtype=bfloat16",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            f"{CORRECTION}.rollout_rs=seq_mean_k3",
            f"{CORRECTION}.rollout_rs_threshold=3e-7",
            "algorithm.max_refills=20",
            "trainer.total_training_steps=3",
            "trainer.test_freq=-1",
        ]
    )
    assert result.returncode == 0, result.stderr[-3000:]
    steps = [metrics_of(run)[step] for step in (1, 2, 3)]
    assert [step["ledger/prompts_in_batch"] for step in steps] == [4, 4, 4]
    assert sum(step["ledger/prompts_rejected"] for step in steps) > 0
    for step in steps:
        assert step["ledger/prompts_sampled"] == 4 + step["ledger/prompts_rejected"]
        assert step["rollout_corr/rollout_rs_seq_masked_fraction"] <= 1 / 2  # a row of each pair is kept
        parts = sum(step[f"ledger/{name}_tokens"] for name in ("trained", "rejected"))
        assert parts == step["ledger/sampled_tokens"]
