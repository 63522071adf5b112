"""Ray on this machine or a cluster. Imports no heavy module: it runs while torch loads."""

import ctypes
import os
import secrets
import shlex
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._raylet import Config

from verl_rc.config.run import RayInitConfig
from verl_rc.runtime.distributed.child_process import python_path
from verl_rc.runtime.workers.environment import SLEEP_WHILE_WAITING
from verl_rc.runtime.workers.host import available_memory, usable_cores
from verl_rc.trainer.cluster.watchdog import WATCHDOG

# Ray 2.60 would otherwise phone home, and hide GPUs from actors that reserve none.
_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_DEDUP_LOGS": "0",
}

# A Ray that is started here would otherwise give its workers nice 15, with which they get 3 % of a core
# beside one busy program, and wait no longer than 30 s for its servers and 60 s for a worker, which a busy
# machine may take. (Not much longer for the raylet: if it is not there after 60 s, it has ended, see
# ``ray_session``.) And its server would keep a record of every call: 8 MB in 100 steps.
_LOCAL_RAY = {
    "RAY_task_events_report_interval_ms": "0",
    "RAY_worker_niceness": "0",
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_worker_register_timeout_seconds": "300",
}


def prepare_driver() -> None:
    """Set the variables that ``import ray`` reads; the user's values take precedence."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    for name, value in {**_RAY, **_LOCAL_RAY, **quiet, **SLEEP_WHILE_WAITING}.items():
        os.environ.setdefault(name, value)


_LEAST_OBJECT_STORE = 512 << 20
_ATTEMPTS = 3
"""Attempts to start Ray. On a busy machine its raylet ends when its agents, which are Python programs, need
more than 15 s to write their ports; the limit is fixed (Ray 2.60, ray-project/ray#65983). A retry finds their
modules in the page cache."""
_STARTERS: list[ThreadPoolExecutor] = []
"""Threads that started Ray. They must live as long as Ray, because the kernel kills its processes when the
thread that started them ends (PR_SET_PDEATHSIG)."""


class RayStartError(RuntimeError):
    """Ray did not start, or no cluster answered; the message names the remedy."""


def start_ray_in_background(config: RayInitConfig, processes: int) -> "Future[None]":
    """Start Ray in a thread and return at once; the future's result, or its error, comes when Ray is up."""
    return ThreadPoolExecutor(max_workers=1).submit(start_ray, config, processes)


def start_ray(config: RayInitConfig, processes: int) -> None:
    """Connect to the cluster named in ``ray_kwargs.ray_init.address``, or start Ray here with room for
    ``processes``.

    A local Ray that does not start in time is stopped and retried, at most twice. Raises ``RayStartError``.
    """
    WATCHDOG.forget_all()
    options: dict[str, Any] = dict(config.model_dump(exclude_none=True))
    address = options.pop("address", None)
    starts_here = address in (None, "local")
    _listen_on_loopback(starts_here)
    runtime_env = {key: value for key, value in options.pop("runtime_env", {}).items() if value is not None}
    if (
        "env_vars" in runtime_env
    ):  # a secret that was hidden in a saved configuration, and is not in the environment, is null
        runtime_env["env_vars"] = {
            key: value for key, value in runtime_env["env_vars"].items() if value is not None
        }
    if not starts_here:
        runtime_env["env_vars"] = {"PYTHONPATH": python_path(), **runtime_env.pop("env_vars", {})}
        _require_answer(address)
        _connect({"address": address, "runtime_env": runtime_env, "log_to_driver": True})
        return
    _require_loopback()
    # Ray starts a Python worker per CPU ahead of need, and none of those serves a job with a runtime
    # environment: so just as many CPUs as processes, and the path by inheritance.
    os.environ["PYTHONPATH"] = python_path()
    options.setdefault("num_cpus", processes)
    options.setdefault("object_store_memory", _object_store_bytes())
    if runtime_env:
        options["runtime_env"] = runtime_env
    # "local": without an address Ray would follow RAY_ADDRESS, or its file of the last cluster.
    here = {"address": "local", "include_dashboard": False, "log_to_driver": False}
    _start_here({**here, "_temp_dir": _private_folder(), **options})


def _private_folder() -> str:
    """Make Ray ask for a token of this run, unless the user has set RAY_AUTH_MODE, and keep its sockets and
    logs where no other user can go; returns the folder for them.

    Otherwise every user of this machine can run code in Ray's processes, and read what it logs.
    """
    base = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), f"vrc-{os.getuid()}")
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RayStartError(
            f"{base}, for Ray's sockets, logs and token, must be a folder of yours that is closed to others "
            "(mode 0700), and it is not. Remove it, or set RAY_TMPDIR to another folder."
        )
    if "RAY_AUTH_MODE" not in os.environ:
        token = base / f"token_{os.getpid()}"
        token.unlink(missing_ok=True)
        with os.fdopen(os.open(token, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        os.environ.pop("RAY_AUTH_TOKEN", None)  # of a cluster; it would count more than the file
        Config.initialize("")  # the mode was read from the environment when Ray was imported
    return str(base / "ray")


def ask_ray() -> str:
    """The command that asks the Ray of this process for its state, for the user's shell."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
    settings = "".join(f"{name}={shlex.quote(os.environ[name])} " for name in names if name in os.environ)
    return f"{settings}ray status --address {ray.get_runtime_context().gcs_address}"


def _require_loopback() -> None:
    """Raise ``RayStartError`` where no process can reach another one of this machine; Ray would try for a
    quarter of an hour."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_ANSWER_SECONDS).close()
    except OSError as error:
        raise RayStartError(
            "processes of this machine must reach each other at 127.0.0.1, but: "
            f"{_in_one_line(error)}. In a network namespace or a sandbox: ip link set lo up."
        ) from error


def _object_store_bytes() -> int:
    """The batches of a step may take gigabytes, and Ray writes to disk what does not fit; memory is taken
    only as it is used."""
    try:
        shared = shutil.disk_usage("/dev/shm").free
    except OSError:  # macOS has none
        return _LEAST_OBJECT_STORE
    return max(_LEAST_OBJECT_STORE, min(available_memory() // 10, shared // 2))


_ANSWER_SECONDS = 30.0
"""Time in which a cluster's head must accept a connection; it may be starting just now."""
_CLIENT = "ray://"
_CHANGE_OPTIONS = "It was asked with ray_kwargs.ray_init: change or drop what the message names."


def _require_answer(address: str) -> None:
    """Raise ``RayStartError`` when nothing accepts a connection there; Ray would try for a quarter of an
    hour."""
    try:
        host, port = _host_and_port(address)
    except (OSError, ValueError) as error:
        raise _no_answer(address, error) from error
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=_ANSWER_SECONDS).close()
            return
        except OSError as error:
            if isinstance(error, socket.gaierror) or time.monotonic() > deadline:
                raise _no_answer(address, error, f" at {host}:{port}") from error
        time.sleep(1)


def _host_and_port(address: str) -> tuple[str, int]:
    """The place of a cluster's head. ``auto`` is what RAY_ADDRESS or Ray's own file of this machine says."""
    if address.startswith(_CLIENT):
        host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    else:
        host, port = services.extract_ip_port(services.canonicalize_bootstrap_address_or_die(address))
    return host.strip("[]"), int(port)


def _connect(options: Mapping[str, Any]) -> None:
    try:
        with _keeping_sigterm_handler():
            ray.init(logging_level="ERROR", **options)
    except (ValueError, TypeError) as error:
        raise RayStartError(
            f"the Ray cluster must take this run, but: {_in_one_line(error)}. {_CHANGE_OPTIONS}"
        ) from error
    except Exception as error:  # Ray raises bare exceptions, too
        raise _no_answer(options["address"], error) from error


def _no_answer(address: str, error: BaseException, place: str = "") -> RayStartError:
    return RayStartError(
        f"a Ray cluster must answer at ray_kwargs.ray_init.address={address}, but{place}: "
        f"{_in_one_line(error)}. Start it (scripts/cluster/start_head.sh), or drop the key to start Ray "
        "on this machine."
    )


def _start_here(options: Mapping[str, Any]) -> None:
    for attempts_left in reversed(range(_ATTEMPTS)):
        starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="start-ray")
        try:
            starter.submit(_init_or_shut_down, options).result()
            _STARTERS.append(starter)
            return
        except Exception as error:  # what Ray raises, bare, when its node does not come up in time
            starter.shutdown()  # ends the thread, and with it what Ray had started
            if attempts_left and not isinstance(error, (ValueError, TypeError, OSError)):
                continue
            raise RayStartError(
                f"Ray must start on this machine, but: {_in_one_line(error)}. {_remedy(error)}"
            ) from error


def _remedy(error: Exception) -> str:
    """Advice about an error of ``ray.init``."""
    if isinstance(error, OSError):
        folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        return (
            f"Ray keeps sockets and logs below {folder}, which must be writable, with free space, and no "
            "longer than some 25 characters: set RAY_TMPDIR to another folder, e.g. /tmp."
        )
    if isinstance(error, (ValueError, TypeError)):
        return _CHANGE_OPTIONS
    return (
        f"The load average is {os.getloadavg()[0]:.0f} on {usable_cores()} cores: try again when other "
        "programs leave more of them, or start Ray beforehand (ray start --head) and pass "
        "ray_kwargs.ray_init.address=auto."
    )


def _init_or_shut_down(options: Mapping[str, Any]) -> None:
    try:
        with _keeping_sigterm_handler():
            ray.init(logging_level="ERROR", **options)
    except BaseException:
        ray.shutdown()
        raise


@contextmanager
def _keeping_sigterm_handler() -> Iterator[None]:
    """Take back the handler that ``ray.init`` sets in C++; it prints a stack and ends the process at once,
    which leaves Ray's agents behind. Python's own ``signal`` can do it in the main thread only."""
    api = ctypes.pythonapi
    api.PyOS_getsig.restype, api.PyOS_setsig.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    handler = api.PyOS_getsig(signal.SIGTERM)
    try:
        yield
    finally:
        api.PyOS_setsig(signal.SIGTERM, handler)


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _listen_on_loopback(enabled: bool) -> None:
    """Choose whether the local Ray node uses the address 127.0.0.1, so that all its servers listen only
    there.

    Otherwise they listen on every interface, without authentication. ``_node_ip_address="127.0.0.1"`` does
    not help, because Ray resolves it to the machine's address; this switch, Ray's default on macOS and
    Windows, does (Ray 2.60).
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = str(int(not enabled))
    ray_constants.ENABLE_RAY_CLUSTER = not enabled  # was read from the environment when Ray was imported
