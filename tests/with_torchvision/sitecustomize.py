"""Lets the torchvision of ``.venv/torchvision-for-tests`` load beside a CPU build of torch.

It is a CUDA build, whose two operators for a GPU are asked for when it is imported: they are declared, and
never called. Processes with this folder in ``PYTHONPATH`` import it, those of Ray and vLLM among them.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(sys.prefix) / "torchvision-for-tests"


class _Finder(MetaPathFinder):
    """Knows torchvision whatever ``sys.path`` is: a process may take that of another one."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        return PathFinder.find_spec(name, [str(FOLDER)])

    def find_distributions(self, context: DistributionFinder.Context) -> list[Distribution]:
        if context.name != "torchvision":
            return []
        here = DistributionFinder.Context(name="torchvision", path=[str(FOLDER)])
        return list(MetadataPathFinder.find_distributions(here))


class _Declares(MetaPathFinder):
    """Declares the operators before the module that asks for them."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> None:
        if name == "torchvision.extension":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                torch.library.define(f"torchvision::{operator}", arguments)


if FOLDER.is_dir():
    sys.meta_path[:0] = [_Declares(), _Finder()]
