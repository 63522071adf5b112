"""Damaged and forged checkpoints by the hundred: nothing but tensors, plain values and refusals result.

``VERL_RC_FUZZ=10000 python -m pytest tests/unit/runtime/checkpoint/test_fuzzed_checkpoint.py -s`` tries as
many, and prints what became of them.
"""

import importlib
import io
import json
import os
import pickletools
import random
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small_learner import small_learner
from torch import Tensor

from verl_rc.algorithm.supply.group_book import BookState
from verl_rc.runtime.checkpoint import (
    CheckpointError,
    RunState,
    SavedRun,
    SupplyState,
    load_full_state_dict,
    shard_folder,
    shards,
)
from verl_rc.runtime.checkpoint.checksums import FileSum, write_checksums
from verl_rc.runtime.checkpoint.shards import collect_shards, load_shards, write_shards

COUNT = int(os.environ.get("VERL_RC_FUZZ", "400"))
SHARDS = (".metadata", "__0_0.distcp", "random_state_0.pt", "shards.json", "checksums.json")
DRIVER = ("data.pt", "groups.pt", "run_state.json", "checksums.json")
NAMES = (
    *shard_folder.read_description.__globals__["_NAMES"],
    "torch._utils._rebuild_tensor_v2",
    "torch.FloatStorage",
    "collections.OrderedDict",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.serialization._load",
    "builtins.getattr",
    "builtins.eval",
    "builtins.bytearray",
    "os.system",
    "posix.system",
    "subprocess.Popen",
    "pathlib.Path",
)
EDGES = (0, 1, -1, 3, 255, 2**31 - 1, 2**31, 2**62, 2**63, 2**70, -(2**63))
TEXTS = (
    "model.weight",
    "__0_0.distcp",
    "../x",
    "/etc/passwd",
    "a/b",
    "..",
    "",
    "\0",
    "__bases__",
    "__class__",
)
WATCHED = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "import"}
WATCHED |= {
    "exec",
    "pickle.find_class",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.chmod",
    "ctypes.dlopen",
}
WATCHED |= {"socket.connect", "os.symlink", "os.link", "os.rmdir", "shutil.rmtree", "marshal.loads"}


class Watch:
    """What the interpreter does while something is read. A hook stays for good; it is switched on and off."""

    events: ClassVar[list[str]] = []
    is_on = False

    @classmethod
    def hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if not cls.is_on:
            return
        if event == "open":
            _, mode, flags = arguments
            if set(str(mode or "")) & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                cls.events.append(f"open {arguments}")
        elif event in WATCHED:
            cls.events.append(f"{event} {arguments!r}"[:200])

    @classmethod
    @contextmanager
    def on(cls) -> Iterator[None]:
        cls.events, cls.is_on = [], True
        try:
            yield
        finally:
            cls.is_on = False


@pytest.fixture(scope="module", autouse=True)
def watched() -> None:
    for codec in ("cp437", "raw_unicode_escape", "unicode_escape", "ascii", "latin_1"):
        importlib.import_module(f"encodings.{codec}")  # which readers of text import when they need them
    sys.addaudithook(Watch.hook)


class Runs:
    """Runs a program where it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.system, ("exit 7",))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "global_step_1"
    write_shards(folder / "actor", collect_shards(*small_learner(3, 2), {"scheduler": {"num_steps": 1}}))
    groups = {"groups": [], "token_ids": torch.tensor([3], dtype=torch.int32)}
    supply = SupplyState(BookState(1, 1, {}, balance=1), groups=lambda: groups)
    state = RunState(1, prompts={"row": torch.arange(9), "epoch": [0, 1.5, None, "x"]}, supply=supply)
    SavedRun(state, {}, num_ranks=1).save(folder)
    return folder


# --- forged pickles


def packed(kind: str, rng: random.Random) -> bytes:
    """An argument of an instruction, by pickletools' name of its kind."""
    number, word = rng.choice(EDGES), rng.choice(TEXTS)
    full = rng.choice(NAMES)
    text = rng.choice([word, full]).encode()
    lengths = {"1": "<B", "4": "<I", "8": "<Q"}
    if kind in ("uint1", "uint2", "int4", "uint4", "uint8"):
        size = int(kind[-1])
        return (
            (number % 2 ** (8 * size)).to_bytes(size, "little")
            if rng.random() < 0.3
            else bytes([rng.randrange(8)]).ljust(size, b"\0")
        )
    if kind in ("long1", "long4"):
        body = number.to_bytes(10, "little", signed=True)
        return struct.pack(lengths[kind[-1]], len(body)) + body
    if kind == "float8":
        return struct.pack(">d", rng.choice([0.0, float("nan"), 1e308]))
    if kind[-1] in lengths and kind.rstrip("148") in ("string", "bytes", "unicodestring", "bytearray"):
        length = len(text) if rng.random() < 0.9 else rng.choice([255, 2**31, 2**40]) % 256 ** int(kind[-1])
        return struct.pack(lengths[kind[-1]], length) + text
    lines = {
        "stringnl": repr(word),
        "stringnl_noescape": word,
        "unicodestringnl": word,
        "stringnl_noescape_pair": full.rpartition(".")[0] + "\n" + full.rpartition(".")[2],
        "decimalnl_short": str(number),
        "decimalnl_long": f"{number}L",
        "floatnl": "1e400",
    }
    return (lines[kind] + "\n").encode("utf-8", "replace")


def instruction(rng: random.Random) -> bytes:
    """Any instruction of pickle; half of them name something."""
    if rng.random() < 0.3:
        return b"c" + packed("stringnl_noescape_pair", rng)
    code = rng.choice(pickletools.opcodes)
    return code.code.encode("latin-1") + (packed(code.arg.name, rng) if code.arg else b"")


def instructions_of(data: bytes) -> list[bytes]:
    starts = [place for _, _, place in pickletools.genops(data) if place is not None]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def forged_pickle(data: bytes, rng: random.Random) -> bytes:
    """Instructions replaced, put in, left out, repeated and exchanged; or a pickle of nothing else."""
    if rng.random() < 0.15:
        return b"\x80\x04" + b"".join(instruction(rng) for _ in range(rng.randrange(1, 40))) + b"."
    parts = [part for part in instructions_of(data) if part[:1] != b"\x95"]  # frames would no longer fit
    for _ in range(rng.randrange(1, 5)):
        place, other = rng.randrange(1, len(parts)), rng.randrange(1, len(parts))
        how = rng.randrange(6)
        if how == 0:
            parts[place] = instruction(rng)
        elif how == 1:
            parts.insert(place, instruction(rng))
        elif how == 2 and len(parts) > 2:
            del parts[place]
        elif how == 3:
            parts[place:place] = parts[other : other + rng.randrange(1, 9)]
        elif how == 4:
            parts[place], parts[other] = parts[other], parts[place]
        else:
            numbers = [i for i, part in enumerate(parts) if part[:1] in (b"K", b"M", b"J")]
            parts[rng.choice(numbers or [place])] = b"\x8a" + packed("long1", rng)
    return b"".join(parts)


# --- what is done to a file


def bits(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 9)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    path.write_bytes(rng.choice([data[:a], data[:a] + data[b:], data[:b] + data[a:], data + data, b""]))


END = b"PK\x05\x06"


def first_archive(data: bytes) -> int:
    """Where the first archive of a file ends."""
    return data.find(END) + 22 if END in data else len(data)


def replace_first_archive(path: Path, archive: bytes) -> None:
    """Put another one in its place, where a description of the file says that it is."""
    data = path.read_bytes()
    end = first_archive(data)
    path.write_bytes(archive.rjust(end, b"\0") + data[end:])


def payload(path: Path, rng: random.Random) -> None:
    code = Runs() if rng.random() < 0.5 else {"model.weight": torch.zeros(2, 3), "more": Runs()}
    file = io.BytesIO()
    torch.save(code, file, _use_new_zipfile_serialization=rng.random() < 0.7)
    replace_first_archive(path, file.getvalue())


def pickles(path: Path, rng: random.Random) -> None:
    """The pickle of a file, or of an archive within it, forged."""
    data = path.read_bytes()
    if END not in data:
        try:
            path.write_bytes(forged_pickle(data, rng))
        except ValueError:  # no pickle: JSON
            bits(path, rng)
        return
    how, new_file = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]), io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data[: first_archive(data)])) as old:
            records = {entry.filename: old.read(entry) for entry in old.infolist()}
        with zipfile.ZipFile(new_file, "w", how) as new:
            for name, content in records.items():
                is_pickle = name.endswith("data.pkl")
                new.writestr(name, forged_pickle(content, rng) if is_pickle else content)
    except Exception:  # noqa: BLE001  (damaged already)
        bits(path, rng)
    else:
        replace_first_archive(path, new_file.getvalue())


def values(path: Path, rng: random.Random) -> None:
    """A value of a JSON file, or a number or text of a pickle, exchanged."""
    if path.suffix != ".json":
        pickles(path, rng)
        return
    try:
        tree = json.loads(path.read_bytes())
        holder, key = tree, rng.choice(list(tree))
    except ValueError:  # damaged already
        bits(path, rng)
        return
    while isinstance(holder[key], dict) and holder[key] and rng.random() < 0.7:
        holder = holder[key]
        key = rng.choice(list(holder))
    holder[key] = rng.choice([None, "x", -1, 1e308, True, [], {}, [[]], {"../x": 1}, *EDGES])
    if rng.random() < 0.2:
        holder[rng.choice(TEXTS)] = holder[key]
    path.write_text(json.dumps(tree))


def links(path: Path, rng: random.Random) -> None:
    target = rng.choice(["../../outside", "/dev/zero", "../outside", ".", path.name])
    path.unlink()
    if rng.random() < 0.2:
        os.mkfifo(path)
    elif rng.random() < 0.2:
        path.mkdir()
    else:
        path.symlink_to(target)


HOW: tuple[Callable[[Path, random.Random], None], ...] = (
    bits,
    bits,
    cut,
    payload,
    pickles,
    pickles,
    pickles,
    values,
    links,
)


def sign(folder: Path) -> None:
    if (folder / "checksums.json").is_symlink() or not (folder / "checksums.json").is_file():
        return
    names = [path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    write_checksums(folder, {name: FileSum.of(folder / name) for name in names if name != "checksums.json"})


# --- what is read


def tree_of(value: object, depth: int = 0) -> Iterator[object]:
    """Every leaf; containers must be Python's own."""
    if depth > 60:
        return
    if type(value) in (list, tuple):
        for item in value:  # type: ignore[attr-defined]
            yield from tree_of(item, depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            yield key
            yield from tree_of(item, depth + 1)
    else:
        yield value


def resumed(folder: Path) -> object:
    model, optimizer = small_learner(3, 2)
    extra = load_shards(folder / "actor", model, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    return [extra, rates, [tensor.detach() for tensor in dict(model.state_dict()).values()]]


def of_the_driver(folder: Path) -> object:
    saved = SavedRun.load(folder)
    return [
        saved.config,
        saved.state.prompts,
        None if saved.state.supply is None else saved.state.supply.groups(),
    ]


def exported(folder: Path) -> object:
    return load_full_state_dict(folder / "actor")


@contextmanager
def swapped(folder: Path, rng: random.Random, is_on: bool) -> Iterator[None]:
    """Files exchanged for others after they were checked, before they are loaded."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((shard_folder, "require_whole"), (shards, "_differences")):
            true = getattr(module, name)

            def then_exchange(*arguments: Any, true: Any = true) -> Any:
                result = true(*arguments)
                was_on, Watch.is_on = Watch.is_on, False
                for file in (".metadata", "__0_0.distcp"):
                    payload(folder / "actor" / file, rng)
                Watch.is_on = was_on
                return result

            if is_on:
                patch.setattr(module, name, then_exchange)
        yield


def outcome(folder: Path, read: Callable[[Path], object]) -> str:
    said = ""
    try:
        with Watch.on():
            value = read(folder)
    except CheckpointError as error:
        said = str(error)
        result = "refused"
    else:
        kinds = {type(leaf) for leaf in tree_of(value)}
        assert kinds <= {Tensor, str, int, float, bool, type(None)}, kinds
        result = "values"
    assert Watch.events == []
    assert said.isprintable()
    return result


def test_no_bytes_of_a_checkpoint_make_anything_but_tensors_and_plain_values(
    whole: Path, tmp_path: Path
) -> None:
    rng, outcomes, begin = random.Random(58), Counter[tuple[str, str]](), time.perf_counter()
    (tmp_path / "outside").write_bytes((whole / "actor" / "__0_0.distcp").read_bytes())
    for read in (exported, resumed, of_the_driver):
        assert outcome(whole, read) == "values"  # and modules are imported
    for number in range(COUNT):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        read = rng.choice([exported, resumed, of_the_driver])
        place, names = (folder, DRIVER) if read is of_the_driver else (folder / "actor", SHARDS)
        is_swapped = rng.random() < 0.05
        for _ in range(0 if is_swapped else rng.randrange(1, 3)):
            path = place / rng.choice(names)
            how = rng.choice(HOW)
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                how(path, rng)
        if rng.random() < 0.8:
            sign(place)
        with swapped(folder, rng, is_swapped):
            try:
                outcomes["swapped" if is_swapped else read.__name__, outcome(folder, read)] += 1
            except BaseException:
                print(f"mutation {number}, {read.__name__}, in {folder}", file=sys.stderr)
                raise
        shutil.rmtree(folder)
    seconds = time.perf_counter() - begin
    print(f"\n{COUNT} checkpoints in {seconds:.0f} s: {dict(outcomes)}")
    assert min(Counter(key[1] for key in outcomes.elements()).values()) > COUNT / 50  # some of each


def test_the_watch_sees_what_runs() -> None:
    with Watch.on():
        subprocess.run(["true"], check=True)
        exec("1 + 1")
    assert {event.split()[0] for event in Watch.events} >= {"subprocess.Popen", "exec"}
