"""Lets the torchvision of ``.venv/torchvision-for-tests`` load beside a CPU build of torch.

It is a CUDA build, whose two operators for a GPU are asked for when it is imported: they are declared, and
never called. Processes with this folder in ``PYTHONPATH`` import it, those of Ray and vLLM among them.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(sys.prefix) / "torchvision-for-tests"


class _Declares(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """None: another finder knows the module."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", arguments)
        return None


if FOLDER.is_dir():
    sys.path.append(str(FOLDER))
    sys.meta_path.insert(0, _Declares())
