"""A checkpoint of somebody else: reading it makes tensors and plain values, or is refused, for any bytes."""

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from verl_rc.runtime.checkpoint import shard_folder, shards
from verl_rc.runtime.checkpoint.checksums import FileSum, write_checksums
from verl_rc.runtime.checkpoint.saved_files import read_tensors
from verl_rc.runtime.checkpoint.shard_folder import load_full_state_dict, shards_problem
from verl_rc.runtime.checkpoint.shards import collect_shards, load_shards, write_shards
from verl_rc.runtime.checkpoint.store import CheckpointError

METADATA = "torch.distributed.checkpoint.metadata"
STORAGE = "torch.distributed.checkpoint.filesystem"


class Runs:
    """Calls ``function`` where it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def mapping(*pairs: tuple[bytes, bytes]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def made(module: str, name: str, state: bytes) -> bytes:
    """An object without arguments and with a state."""
    return named(module, name) + b")\x81" + state + b"b"


def size(*dims: int) -> bytes:
    return named("torch", "Size") + b"(" + b"".join(map(number, dims)) + b"t\x85R"


def chunk(offsets: bytes, sizes: bytes) -> bytes:
    return made(METADATA, "ChunkStorageMetadata", mapping((text("offsets"), offsets), (text("sizes"), sizes)))


PROPERTIES = made(
    METADATA,
    "TensorProperties",
    b"("
    + named("torch", "float32")
    + named("torch.serialization", "_get_layout")
    + text("torch.strided")
    + b"\x85R\x89"
    + named(METADATA, "_MEM_FORMAT_ENCODING")
    + number(0)
    + b"\x85R\x89t",
)
TENSOR = mapping(
    (text("properties"), PROPERTIES),
    (text("size"), size(3)),
    (text("chunks"), b"](" + chunk(size(0), size(3)) + b"e"),
)


def description(entry: bytes, place: bytes, offset: bytes = b"N") -> bytes:
    """A file ``.metadata`` with one entry, ``model.bias``, and where it lies."""
    key = made(
        METADATA,
        "MetadataIndex",
        mapping((text("fqn"), text("model.bias")), (text("offset"), offset), (text("index"), b"N")),
    )
    return (
        b"\x80\x02"
        + made(
            METADATA,
            "Metadata",
            mapping(
                (text("state_dict_metadata"), mapping((text("model.bias"), entry))),
                (text("planner_data"), b"N"),
                (text("storage_data"), mapping((key, place))),
                (text("storage_meta"), b"N"),
                (text("version"), b"N"),
            ),
        )
        + b"."
    )


def stored(path: str, offset: int, length: int) -> bytes:
    return made(
        STORAGE,
        "_StorageInfo",
        mapping(
            (text("relative_path"), text(path)),
            (text("offset"), number(offset)),
            (text("length"), number(length)),
        ),
    )


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = Biased()
    folder = tmp_path / "actor"
    write_shards(folder, collect_shards(model, SGD(model.parameters()), {}))
    return folder


def sign(folder: Path) -> None:
    """What an attacker does: checksums that fit."""
    names = [path.name for path in folder.iterdir() if path.name != "checksums.json"]
    write_checksums(folder, {name: FileSum.of(folder / name) for name in names})


def resume(folder: Path) -> None:
    model = Biased()
    load_shards(folder, model, SGD(model.parameters()))


READERS = [load_full_state_dict, resume]


@pytest.mark.parametrize("read", READERS)
def test_an_entry_that_is_a_tensor_for_us_and_an_object_for_torch_runs_nothing(
    folder: Path, tmp_path: Path, read: Any
) -> None:
    trace = tmp_path / "trace"
    torch.save(Runs(os.mkdir, str(trace)), folder / "__0_0.distcp")
    length = (folder / "__0_0.distcp").stat().st_size
    bases = named(METADATA, "TensorStorageMetadata") + named(METADATA, "BytesStorageMetadata") + b"\x86"
    encoding = named(METADATA, "_MEM_FORMAT_ENCODING")
    two_faced = (
        (encoding + number(0) + b"\x85Rq\x010")  # a member of the enum, kept as number 1
        + (TENSOR + b"q\x020")
        + (encoding + b"N" + mapping((text("__bases__"), bases)) + b"\x86b0")  # BUILD: its class is both
        + b"h\x01h\x02b"
    )
    (folder / ".metadata").write_bytes(description(two_faced, stored("__0_0.distcp", 0, length)))
    sign(folder)
    with pytest.raises(CheckpointError):
        read(folder)
    assert not trace.exists()
    assert shards_problem(folder) is not None


@pytest.mark.parametrize(
    ("read", "seam"), [(load_full_state_dict, "require_whole"), (resume, "_differences")]
)
def test_files_that_are_exchanged_after_they_were_checked_run_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any, seam: str
) -> None:
    module = shards if seam == "_differences" else shard_folder
    true, trace = getattr(module, seam), tmp_path / "trace"

    def exchange(*arguments: Any) -> Any:
        result = true(*arguments)
        torch.save(Runs(os.mkdir, str(trace)), folder / "__0_0.distcp")
        length = (folder / "__0_0.distcp").stat().st_size
        of_an_object = made(METADATA, "BytesStorageMetadata", mapping())
        (folder / ".metadata").write_bytes(description(of_an_object, stored("__0_0.distcp", 0, length)))
        return result

    monkeypatch.setattr(module, seam, exchange)
    with pytest.raises(CheckpointError):
        read(folder)
    assert not trace.exists()


def tampered(
    folder: Path, entry: bytes = TENSOR, path: str = "__0_0.distcp", length: int | None = None
) -> Path:
    """The folder with a description of one tensor of three numbers, or of ``entry``."""
    size_of_file = (folder / "__0_0.distcp").stat().st_size
    true_entry = made(METADATA, "TensorStorageMetadata", entry)
    place = stored(path, 0, size_of_file if length is None else length)
    (folder / ".metadata").write_bytes(description(true_entry, place, size(0)))
    sign(folder)
    return folder


def tensor_of(shape: bytes, *chunks: bytes) -> bytes:
    return mapping(
        (text("properties"), PROPERTIES),
        (text("size"), shape),
        (text("chunks"), b"](" + b"".join(chunks) + b"e"),
    )


@pytest.mark.parametrize("read", READERS)
def test_a_description_by_hand_is_read_as_torch_s_own(folder: Path, read: Any) -> None:
    before = load_full_state_dict(folder)
    assert torch.equal(load_full_state_dict(tampered(folder))["bias"], before["bias"])
    read(folder)


LARGE = b"\x8a\x06" + (10**12).to_bytes(6, "little")
FORGED: list[tuple[dict[str, Any], str]] = [
    ({"path": "../actor/__0_0.distcp"}, "outside its folder"),
    ({"path": "/etc/hostname"}, "outside its folder"),
    ({"path": "a\\b"}, "outside its folder"),
    ({"path": ".."}, "outside its folder"),
    ({"path": ""}, "outside its folder"),
    ({"path": "gone"}, "No such file"),
    ({"length": 2**31 - 1}, "must have 2147483647 bytes"),
    ({"length": 11}, "fewer bytes"),
    ({"entry": tensor_of(size(3))}, "hold 0 numbers instead of 3"),
    ({"entry": tensor_of(size(3), chunk(size(0), size(2)))}, "hold 2 numbers instead of 3"),
    ({"entry": tensor_of(size(3), chunk(size(1), size(3)))}, "lies outside"),
    ({"entry": tensor_of(size(3), chunk(size(0, 0), size(3, 1)))}, "lies outside"),
    ({"entry": tensor_of(size(3), chunk(size(2), size(1)))}, "fewer bytes"),  # it lies nowhere
    (
        {
            "entry": tensor_of(
                size(3).replace(number(3), LARGE), chunk(size(0), size(3).replace(number(3), LARGE))
            )
        },
        "fewer bytes",
    ),
    ({"entry": tensor_of(size(-3), chunk(size(0), size(3)))}, "no whole number"),
    ({"entry": tensor_of(size(*[2] * 70), chunk(size(*[0] * 70), size(*[2] * 70)))}, "no tensor has"),
    ({"entry": tensor_of(b"(" + number(3) + b"t", chunk(size(0), size(3)))}, "where a size must be"),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("forged", "said"), FORGED)
def test_a_description_that_cannot_be_true_is_refused(
    folder: Path, forged: Any, said: str, read: Any
) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(tampered(folder, **forged))


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", ".metadata", "shards.json", "checksums.json", "random_state_0.pt"]
)
def test_no_file_is_read_through_a_link_that_leaves_the_folder(
    folder: Path, tmp_path: Path, name: str
) -> None:
    """Nor does a pipe block its reader. A link within the folder is followed, and so is one to the folder."""
    alias, whole = tmp_path / "alias", load_full_state_dict(folder)["bias"]
    alias.symlink_to(folder)
    assert torch.equal(load_full_state_dict(alias)["bias"], whole)
    (folder / name).rename(folder / "inner")
    (folder / name).symlink_to("inner")
    assert torch.equal(load_full_state_dict(folder)["bias"], whole)
    resume(folder)
    (folder / "inner").rename(tmp_path / "outer")
    for target in ("../outer", str(tmp_path / "outer"), "../actor/../outer", "nothing", name):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        with pytest.raises(CheckpointError):
            load_full_state_dict(folder)
        is_absent = name == "random_state_0.pt" and target in ("nothing", name)
        if name != "checksums.json" and not is_absent:  # a rank needs neither
            with pytest.raises(CheckpointError):
                resume(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError):
        load_full_state_dict(folder)


def test_checksums_name_files_of_their_folder_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    write_checksums(folder, {"../secret": FileSum(6, 0)})
    with pytest.raises(CheckpointError, match="must name files of its folder alone") as caught:
        load_full_state_dict(folder)
    assert f"{FileSum.of(tmp_path / 'secret').crc32:08x}" not in str(caught.value)


def archive(pickled: bytes, storages: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as writer:
        writer.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        writer.writestr("archive/version", b"3")
        for key, content in storages.items():
            writer.writestr(f"archive/data/{key}", content)
    return file.getvalue()


def tensor(count: int, offset: int, shape: bytes, stride: bytes, kind: str = "FloatStorage") -> bytes:
    storage = b"(" + text("storage") + named("torch", kind) + text("0") + text("cpu") + number(count) + b"tQ"
    hooks = named("collections", "OrderedDict") + b")R"
    rebuild = named("torch._utils", "_rebuild_tensor_v2")
    return rebuild + b"(" + storage + number(offset) + shape + stride + b"\x89" + hooks + b"tR"


def dims(*numbers: int) -> bytes:
    return b"(" + b"".join(map(number, numbers)) + b"t"


def in_mapping(value: bytes) -> bytes:
    return mapping((text("a"), value))


EIGHT = {"0": struct.pack("<8f", *range(8))}


def test_an_archive_by_hand_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(archive(in_mapping(tensor(8, 1, dims(2, 3), dims(4, 1))), EIGHT))
    assert read_tensors(path, "x")["a"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert read_tensors(path, "x")["a"].tolist() == torch.load(path, weights_only=True)["a"].tolist()


FORGED_ARCHIVES = [
    archive(in_mapping(tensor(8, 0, dims(9), dims(1))), EIGHT),  # past its end
    archive(in_mapping(tensor(8, 6, dims(2, 2), dims(1, 1))), EIGHT),
    archive(in_mapping(tensor(8, 0, dims(10**9), dims(0))), EIGHT),  # larger than its storage
    archive(in_mapping(tensor(8, -1, dims(1), dims(1))), EIGHT),
    archive(in_mapping(tensor(8, 0, dims(2), dims(-1))), EIGHT),
    archive(in_mapping(tensor(8, 0, dims(2), dims(1, 1))), EIGHT),
    archive(in_mapping(tensor(2**31 - 1, 0, dims(1), dims(1))), EIGHT),
    archive(in_mapping(tensor(8, 0, dims(8), dims(1))), {"0": bytes(32)}, zipfile.ZIP_DEFLATED),
    archive(in_mapping(tensor(8, 0, dims(8), dims(1), "QInt8Storage")), EIGHT),
    archive(in_mapping(named("torch", "float32")), {}),  # a name is no value
    archive(in_mapping(named("torch", "FloatStorage")), {}),
    archive(in_mapping(named("builtins", "bytearray") + number(10**9) + b"\x85R"), {}),
    archive(in_mapping(named("torch", "Tensor") + number(10**9) + b"\x85R"), {}),
    archive(in_mapping(named("collections", "OrderedDict") + b"(" + in_mapping(b"N") + b"tR"), {}),
    archive(b"}q\x00" + b"(" + text("a") + b"h\x00u", {}),  # it holds itself
    archive(in_mapping(b"]" * 200 + b"a" * 199), {}),
    archive(mapping((b"N", b"N")), {}),
    archive(mapping((b"]", b"N")), {}),
    archive(in_mapping(b"B\xff\xff\xff\x7f"), {}),  # bytes that are not there
    archive(b"}r\xff\xff\xff\xff.", {})[:-1],
    archive(in_mapping(text("x") + b"N\x86b"), {}),  # attributes of a text
    archive(in_mapping(b"N"), {"../../x": b"", "0": b""}).replace(b"data.pkl", b"data.pk1"),
]


@pytest.mark.parametrize("content", FORGED_ARCHIVES, ids=range(len(FORGED_ARCHIVES)))
def test_an_archive_of_anything_else_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"must hold x, but reading it gave RefusedPickleError: "):
        read_tensors(tmp_path / "a.pt", "x")


def test_records_that_lie_on_each_other_are_refused(tmp_path: Path) -> None:
    """A thousand storages that are one and the same bytes of the file, a bomb without compression."""
    content = archive(in_mapping(b"N"), {"0": bytes(10_000)})
    directory = content.find(b"PK\x01\x02", content.find(b"archive/data/0") + 10_000)
    entries = content[directory:-22]
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 2000, 2000, len(entries) * 1000, directory, 0)
    (tmp_path / "a.pt").write_bytes(content[:directory] + entries * 1000 + end)
    with pytest.raises(CheckpointError, match="each once"):
        read_tensors(tmp_path / "a.pt", "x")


def test_a_message_has_no_control_characters_of_a_file(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x02\x8c\x07a\x1b[31mb\x8c\x02\n\r\x93.")
    said = str(shards_problem(folder))
    assert "names 'a\\x1b[31mb.\\n\\r', which no checkpoint needs; do not trust it" in said
    assert said.isprintable()
