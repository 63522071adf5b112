"""Requirements of a machine with GPUs before anything is installed: a driver, a C compiler, Python's headers.

The standard library alone, as ``scripts/install.sh`` calls ``python -m verl_rc.plan.gpu_host`` before
it downloads.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from verl_rc.plan.finding import Finding

CUDA_OF_WHEELS = "13.0"
"""The CUDA version of the PyTorch build that the ``gpu`` extra installs."""
NEEDED_DRIVERS = {12: 525, 13: 580}
"""The oldest driver by the major version of CUDA (docs.nvidia.com/deploy/cuda-compatibility)."""


def check_driver(cuda: str = CUDA_OF_WHEELS) -> Iterator[Finding]:
    """Check that PyTorch, built for ``cuda``, can work with NVIDIA's driver; nothing where there is no
    driver, as where an image is built."""
    driver = driver_version()
    if driver is None:
        return
    major, supported = int(cuda.partition(".")[0]), _cuda_of_driver_library()
    oldest = NEEDED_DRIVERS.get(major, max(NEEDED_DRIVERS.values()))
    is_compatible = supported is not None and supported[0] >= major
    library = "" if supported is None else f", whose libcuda supports CUDA {supported[0]}.{supported[1]}"
    package = f"cuda-compat-{cuda.replace('.', '-')}"
    yield Finding.from_condition(
        is_compatible or int(driver.partition(".")[0]) >= oldest,
        "driver",
        f"NVIDIA {driver}{library}; PyTorch is built for CUDA {cuda}",
        f"CUDA {cuda} needs driver {oldest} or newer, or on data-centre GPUs {package} beside an older one",
        f"update the driver to {oldest}, or install {package} and put /usr/local/cuda-{cuda}/compat first in "
        "LD_LIBRARY_PATH, or run docker/Dockerfile.gpu, which has it",
    )


def check_compiler() -> Iterator[Finding]:
    """Check that Triton can compile its launcher at first use; the engine samples with Triton's kernels."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"sudo apt install build-essential {version}-dev (or the same of your distribution)"
    compiler = os.environ.get("CC") or "gcc"
    path = shutil.which(compiler) or ("CC" not in os.environ and shutil.which("clang")) or None
    yield Finding.from_condition(
        path is not None,
        "C compiler",
        path or f"no {compiler} in PATH",
        "Triton compiles with $CC, gcc or clang when a run starts",
        remedy,
    )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    yield Finding.from_condition(
        header.is_file(),
        "Python.h",
        str(header) if header.is_file() else f"no {header}",
        "Triton compiles against the headers of Python when a run starts",
        remedy,
    )


def driver_version() -> str | None:
    """The version of NVIDIA's driver, e.g. 580.65.06. None without a driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.split()[0] if answer.split() else None


def _cuda_of_driver_library() -> tuple[int, int] | None:
    """Major and minor version of CUDA that ``libcuda`` supports: the library that the loader finds, of the
    driver or of cuda-compat. None without a library."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def main() -> int:
    """Print what is missing; the exit status is 1 when anything is."""
    failed = [finding for finding in [*check_driver(), *check_compiler()] if finding.status == "failed"]
    sys.stdout.write("".join(f"{line}\n" for finding in failed for line in finding.lines()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
