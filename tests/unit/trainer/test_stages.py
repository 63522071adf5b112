"""What the stages of a step write."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from verl_rc.trainer.stages import write_samples


def test_columns_of_the_reward_function_stand_beside_those_of_a_dump(tmp_path: Path) -> None:
    """Also those that a checkpoint of an older release holds under a name of the dump."""
    row = SimpleNamespace(prompt=[{"role": "user", "content": "12"}], ground_truth="12")
    extras = {"acc": [1.0], "reward/output": ["of the sandbox"], "step": [7]}
    samples = SimpleNamespace(rows=[row], texts=["12"], scores=torch.tensor([1.0]), extras=extras)
    write_samples(str(tmp_path), samples, 3)
    assert json.loads((tmp_path / "3.jsonl").read_text()) == {
        "input": row.prompt,
        "output": "12",
        "gts": "12",
        "score": 1.0,
        "step": 3,
        "acc": 1.0,
        "reward/output": "of the sandbox",
    }
