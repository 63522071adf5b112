"""The same rows as the files of each trainer: their formats written by hand, tensors by torch and pickle."""

import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

Row = dict[str, Any]
STEPS = (1, 2, 3)


def planted_rows(step: int, count: int = 8, gap: float = 0.02, **changed: Any) -> list[Row]:
    """Rows of lengths 3, 4, 5, …; two rows a prompt; token 1 of every row but the first is of a tool."""
    generator = np.random.default_rng(step)
    rows = []
    for index in range(count):
        length = 3 + index % 3
        rollout = -generator.exponential(1.0, length).astype("float32") - 0.2
        mask = np.ones(length, "int64")
        mask[1] = index == 0
        row = {
            "prompt_ids": [7, index // 2, 9],
            "response_ids": generator.integers(10, 90, length).tolist(),
            "response_mask": mask.tolist(),
            "rollout_log_prob": rollout.tolist(),
            "old_log_prob": (rollout + gap * generator.standard_normal(length)).astype("float32").tolist(),
            "advantage": [1.0 - 2.0 * (index % 2)] * length,
            "score": float(index % 2),
        }
        rows.append({**row, **changed})
    return rows


def _lines(path: Path, objects: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


def _sequence(row: Row, name: str, filler: float) -> list[Any]:
    return [filler] * len(row["prompt_ids"]) + list(row[name])


def prime_rl(folder: Path, step: int, rows: Sequence[Row]) -> None:
    """``token_exports``, a file for each of two ranks."""
    for rank in (0, 1):
        lines = [
            {
                "schema_version": 1,
                "step": step,
                "rank": rank,
                "env_name": "math",
                "token_ids": row["prompt_ids"] + row["response_ids"],
                "loss_mask": [bool(one) for one in _sequence(row, "response_mask", 0)],
                "inference_logprobs": _sequence(row, "rollout_log_prob", 0.0),
                "trainer_logprobs": _sequence(row, "old_log_prob", 0.0),
                **({"entropy": _sequence(row, "entropy", 0.0)} if "entropy" in row else {}),
                "advantages": _sequence(row, "advantage", 0.0),
            }
            for row in rows[rank::2]
        ]
        _lines(folder / f"token_exports/step_{step}/rank_{rank}.jsonl", lines)


def nemo_rl(folder: Path, step: int, rows: Sequence[Row]) -> None:
    """``train_data_stepN.jsonl``, batches of one."""
    width = max(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)

    def padded(values: list[Any]) -> list[list[Any]]:
        return [values + [0] * (width - len(values))]

    lines = [
        {
            "token_ids": padded(row["prompt_ids"] + row["response_ids"]),
            "token_loss_mask": padded(_sequence(row, "response_mask", 0)),
            "generation_logprobs": padded(_sequence(row, "rollout_log_prob", 0.0)),
            "prev_logprobs": padded(_sequence(row, "old_log_prob", 0.0)),
            "advantages": padded(_sequence(row, "advantage", 0.0)),
            "input_lengths": [len(row["prompt_ids"]) + len(row["response_ids"])],
            "rewards": [9.0],
            "filtered_rewards": [row["score"]],
            "sample_loss_mask": [1.0],
            "idx": [index],
        }
        for index, row in enumerate(rows)
    ]
    _lines(folder / f"train_data_step{step}.jsonl", lines)


def _sample(row: Row) -> dict[str, Any]:
    return {
        "tokens": torch.tensor(row["prompt_ids"] + row["response_ids"]),
        "response_lengths": len(row["response_ids"]),
        "loss_masks": torch.tensor(row["response_mask"], dtype=torch.int32),
        "rollout_log_probs": torch.tensor(row["rollout_log_prob"]),
        "log_probs": torch.tensor(row["old_log_prob"]),
        "advantages": torch.tensor(row["advantage"]),
        "truncated": int(not row.get("finished", True)),
        **({"entropy": torch.tensor(row["entropy"])} if "entropy" in row else {}),
    }


def slime(folder: Path, step: int, rows: Sequence[Row]) -> None:
    """A train dump of format 2, and the rollout dump beside it."""
    for name in ("train_data", "rollout_data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    order = range(len(rows))[::-1]  # the train dump's order is another than the rollout dump's
    samples = [{**_sample(rows[place]), "rollout_position": place} for place in order]
    dump = {"format_version": 2, "samples": samples, "raw_reward": [row["score"] for row in rows]}
    torch.save(dump, folder / f"train_data/{step}.pt")
    sampled = [
        {
            "group_index": 100 + row.get("group", place // 2),
            "weight_versions": ["1", str(row.get("version", step))],
        }
        for place, row in enumerate(rows)
    ]
    torch.save({"samples": sampled}, folder / f"rollout_data/{step}.pt")


def miles(folder: Path, step: int, rows: Sequence[Row], cp_size: int = 1) -> None:
    """Train dumps of two ranks, of which the second repeats rows."""
    (folder / "train_data").mkdir(parents=True, exist_ok=True)
    for rank, shard in enumerate((rows, rows[:2])):  # the second rank repeats rows of the first
        samples = [_sample(row) for row in shard]
        columns = {name: [one[name] for one in samples] for name in samples[0]}
        columns |= {"sample_indices": list(range(len(shard))), "raw_reward": [row["score"] for row in shard]}
        dump = {"rollout_id": step, "rank": rank, "cp_rank": 0, "cp_size": cp_size, "rollout_data": columns}
        torch.save(dump, folder / f"train_data/{step}_{rank}.pt")


class TrainingInputBatch(dict[str, Any]):
    """Pickles as SkyRL's class of this name: its items, and a state of tensors that ``torch.save`` wrote."""

    boundaries: Sequence[tuple[int, int]] = ()
    """First row and row after the last of each prompt."""

    def __getstate__(self) -> dict[str, Any]:
        def saved(tensor: torch.Tensor) -> dict[str, Any]:
            buffer = BytesIO()
            torch.save(tensor, buffer)
            return {"type": "tensor", "data": buffer.getvalue()}

        return {
            "batch_dict": {name: saved(tensor) for name, tensor in self.items()},
            "batch_size": len(self["sequences"]),
            "device": torch.device("cpu"),
            "metadata": {
                "pad_size": 1,
                "policy_prompt_boundaries": self.boundaries,
            },
        }


def skyrl(folder: Path, step: int, rows: Sequence[Row]) -> None:
    """A pickled batch of padded tensors."""
    groups = [row.get("group", place // 2) for place, row in enumerate(rows)]
    firsts = [place for place, group in enumerate(groups) if place == 0 or group != groups[place - 1]]
    rows = [*rows, rows[0]]  # the last one pads the batch
    width = max(len(row["response_ids"]) for row in rows)
    longest = max(len(row["prompt_ids"]) for row in rows) + width

    def responses(name: str, kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([[0] * (width - len(row[name])) + row[name] for row in rows], dtype=kind)

    sequences = [row["prompt_ids"] + row["response_ids"] for row in rows]
    batch = TrainingInputBatch(
        sequences=torch.tensor([[0] * (longest - len(ids)) + ids for ids in sequences]),
        attention_mask=torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in sequences]),
        response_mask=torch.tensor(
            [[0] * (width - len(row["response_ids"])) + [1] * len(row["response_ids"]) for row in rows]
        ),
        loss_mask=responses("response_mask", torch.int64),
        rollout_logprobs=responses("rollout_log_prob", torch.float32),
        action_log_probs=responses("old_log_prob", torch.float32),
        advantages=responses("advantage", torch.float32),
    )
    batch.boundaries = list(pairwise([*firsts, len(groups)]))
    module = ModuleType("skyrl_train.training_batch")
    module.TrainingInputBatch = TrainingInputBatch  # type: ignore[attr-defined]
    home, TrainingInputBatch.__module__ = TrainingInputBatch.__module__, module.__name__
    sys.modules |= {"skyrl_train": ModuleType("skyrl_train"), module.__name__: module}
    try:
        pickled = pickle.dumps(batch)
    finally:
        TrainingInputBatch.__module__ = home
        del sys.modules["skyrl_train"], sys.modules[module.__name__]
    path = folder / f"dumped_data/global_step_{step}_training_input.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickled)


WRITERS: Mapping[str, Callable[[Path, int, Sequence[Row]], None]] = {
    "prime-rl": prime_rl,
    "NeMo-RL": nemo_rl,
    "slime": slime,
    "miles": miles,
    "SkyRL": skyrl,
}


def write_layout(folder: Path, trainer: str, steps: Sequence[int] = STEPS, **changed: Any) -> Path:
    """A folder as the trainer leaves it."""
    for step in steps:
        WRITERS[trainer](folder, step, planted_rows(step, **changed))
    return folder
