"""Token records as JSON lines. This file needs the standard library alone: copy it into any trainer.

with TokenLines(folder / "step_000007.rank_0.jsonl", trainer="mine", temperature=1.0) as lines:
    lines.write(7, response_mask, rollout_log_probs, old_log_probs, prompt_ids=ids, score=1.0)
"""

import json
import math
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VERSION = 1


class TokenLines:
    """Writes one file: a line of facts, then a line for each row. Lists, arrays and tensors are taken.

    The file appears under its name when it is complete. ``facts``: ``temperature``, ``top_p``, ``top_k``,
    ``logprobs_mode``, ``engine_dtype``, ``trainer_dtype``, and others.
    """

    def __init__(self, path: Path, trainer: str, **facts: Any) -> None:
        self._path = Path(path)
        self._beside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}.partial")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._beside.open("x")
        self._line({"token_record": VERSION, "trainer": trainer, **facts})

    def write(
        self, step: int, response_mask: Any, rollout_log_prob: Any, old_log_prob: Any = None, **fields: Any
    ) -> None:
        """Append a row: values ``[R]``, nats, of all tokens behind the first prompt.

        Args:
            step: of the training, from 1.
            response_mask: 1 where the policy sampled the token.
            rollout_log_prob: of the engine.
            old_log_prob: of the trainer before the update; None where it was not computed.
            fields: others of docs/token_record.md.
        """
        self._line(
            {
                "step": step,
                "response_mask": [int(marked) for marked in _plain(response_mask)],
                "rollout_log_prob": rollout_log_prob,
                "old_log_prob": old_log_prob,
                **fields,
            }
        )

    def close(self, keep: bool = True) -> None:
        """End the file; ``keep`` False removes it."""
        self._file.close()
        if keep:
            os.replace(self._beside, self._path)
        else:
            os.unlink(self._beside)

    def __enter__(self) -> "TokenLines":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(keep=kind is None)

    def _line(self, record: Mapping[str, Any]) -> None:
        plain = {name: _plain(value) for name, value in record.items()}
        self._file.write(json.dumps(plain, separators=(",", ":"), allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """An array or a tensor as lists and numbers; None for numbers that are not finite, which JSON lacks."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
