"""torch's files are data: what torch.save wrote comes back as arrays, and nothing ever runs."""

from __future__ import annotations

import collections
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_files import mutated, outcome, watched, written
from kgshard_tools.importers.pickled_objects import Object, Symbol
from kgshard_tools.importers.torch_files import module_tensors, read_torch

from kgshard.errors import DataError

LEGACY = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])


def saved(value: object, path: Path, *, legacy: bool = False) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.bool,
    ),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]
NEWER_DTYPES = [torch.uint16, torch.uint32, torch.uint64]


@LEGACY
@pytest.mark.parametrize("dtype", [*DTYPES, *NEWER_DTYPES], ids=str)
def test_tensors_of_every_type_are_arrays(dtype: torch.dtype, legacy: bool, tmp_path: Path) -> None:
    tensor = torch.tensor([[0.0, 1.5, 2.0], [100.0, 3.0, 1.0]]).to(dtype)
    found = read_torch(saved(tensor, tmp_path / "t.pt", legacy=legacy))
    expected = (tensor.float() if dtype == torch.bfloat16 else tensor).numpy()
    assert isinstance(found, np.ndarray)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


def test_bfloat16_is_widened_exactly(tmp_path: Path) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    found: Any = read_torch(saved(bits.view(torch.bfloat16), tmp_path / "t.pt"))
    assert np.array_equal(found.view(np.uint32) >> 16, np.arange(1 << 16))
    assert np.array_equal(found, bits.view(torch.bfloat16).float().numpy(), equal_nan=True)


def test_widened_copies_are_limited(tmp_path: Path) -> None:
    base = torch.zeros(1 << 20, dtype=torch.bfloat16)
    few: Any = read_torch(saved([base.view(1024, 1024) for _ in range(4)], tmp_path / "few.pt"))
    assert len(few) == 4
    with pytest.raises(DataError, match="copies more than 16 times its file"):
        read_torch(saved([base.view(1024, 1024) for _ in range(100)], tmp_path / "many.pt"))


@LEGACY
def test_views_are_views_of_one_storage(legacy: bool, tmp_path: Path) -> None:
    base = torch.arange(24.0)
    tensors = {
        "base": base,
        "transposed": base[3:9].view(2, 3).t(),
        "strided": base[1::2],
        "expanded": base[5:6].expand(4, 3),
        "parameter": torch.nn.Parameter(base[2:4]),
        "scalar": base[7],
        "empty": base[:0].view(0, 3),
        "none of many": torch.zeros(0, 5),
    }
    found: Any = read_torch(saved(tensors, tmp_path / "t.pt", legacy=legacy))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape), name
        assert np.array_equal(found[name], tensor.detach().numpy()), name
    assert np.shares_memory(found["base"], found["transposed"])
    assert not found["base"].flags.writeable


def test_types_that_numpy_lacks_stay_objects(tmp_path: Path) -> None:
    values = {
        "float8": torch.zeros(3).to(torch.float8_e4m3fn),
        "sparse": torch.eye(2).to_sparse(),
        "plain": torch.ones(1),
    }
    found: Any = read_torch(saved(values, tmp_path / "t.pt"))
    assert isinstance(found["float8"], Object)
    assert isinstance(found["sparse"], Object)
    assert found["plain"].tolist() == [1.0]


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)])
        self.tied = self.layers[0]
        self.scale = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_parameter("none", None)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.arange(3), persistent=False)


@LEGACY
def test_a_pickled_module_has_the_tensors_of_its_state_dict(legacy: bool, tmp_path: Path) -> None:
    network = Network()
    path = saved(network, tmp_path / "m.pt", legacy=legacy)
    with watched() as events:
        found = module_tensors(read_torch(path))
    assert events == []
    expected = network.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor.float().numpy()), name


def test_a_state_dict_is_a_dict_of_arrays(tmp_path: Path) -> None:
    network = Network()
    found: Any = read_torch(saved(network.state_dict(), tmp_path / "m.pt"))
    assert type(found) is dict
    assert list(found) == list(network.state_dict())


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no torch\.nn\.Module"):
        module_tensors({"weight": np.ones(3)})


def test_modules_that_hold_themselves_are_refused() -> None:
    module = Object(Symbol("torch.nn", "Module"), ())
    module.state = {"_parameters": {}, "_buffers": {}, "_modules": {"a": module, "b": module}}
    with pytest.raises(ValueError, match=r"more than (100000 modules|1000 letters)"):
        module_tensors(module)


def test_a_module_of_many_parts_met_again_and_again_is_refused() -> None:
    module = Object(Symbol("torch.nn", "Module"), ())
    children: dict[str, object] = {str(number): module for number in range(1000)}
    module.state = {"_parameters": {}, "_buffers": {}, "_modules": children}
    with pytest.raises(ValueError, match="more than 100000 modules"):
        module_tensors(module)


def test_memory_does_not_grow_with_a_table(tmp_path: Path) -> None:
    path = saved({"table": torch.zeros(1 << 26)}, tmp_path / "big.pt")  # 256 MiB
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from kgshard_tools.importers.torch_files import read_torch\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "table = read_torch(Path(sys.argv[1]))['table']; rows = table[1 << 25 : (1 << 25) + 1000].sum()\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(grown, table.nbytes, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    grown, num_bytes, has_torch = done.stdout.split()
    assert int(num_bytes) == 1 << 28
    assert int(grown) < 16 << 10  # KiB
    assert has_torch == "False"


# --- Hostile files of torch's ---------------------------------------------------------------------------


def repacked(
    path: Path,
    change: Callable[[dict[str, bytes]], object],
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """Write an archive of torch's anew, after a change to its members."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def put(name: str, content: bytes) -> Callable[[dict[str, bytes]], object]:
    return lambda members: members.update({name: content})


ARCHIVES: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "no pickle": (lambda members: members.pop("t/data.pkl"), "not one of torch.save"),
    "two pickles": (put("u/data.pkl", b""), "not one of torch.save"),
    "code": (put("t/constants.pkl", b""), "TorchScript"),
    "big-endian": (put("t/byteorder", b"big"), "big-endian"),
    "no numbers": (lambda members: members.pop("t/data/0"), "missing or short"),
    "short numbers": (put("t/data/0", b"\0" * 92), "missing or short"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_is_not_as_torch_writes_it_is_refused(name: str, tmp_path: Path) -> None:
    change, message = ARCHIVES[name]
    path = repacked(saved(torch.arange(24.0), tmp_path / "t.pt"), change)
    with pytest.raises(DataError, match=message) as caught:
        read_torch(path)
    assert str(path) in str(caught.value)


def test_a_name_in_a_file_makes_no_error_of_two_lines_or_of_a_megabyte(tmp_path: Path) -> None:
    kind = ("Float\n\x1b" * 100_000).encode()
    named = b"\x8c\x05torchX" + len(kind).to_bytes(4, "little") + kind + b"\x93"
    pickled = b"\x80\x04(\x8c\x07storage" + named + b"\x8c\x010\x8c\x03cpuK\x18tQ."
    path = repacked(saved(torch.arange(24.0), tmp_path / "t.pt"), put("t/data.pkl", pickled))
    with pytest.raises(DataError, match=r"a storage of type 'torch\.Float") as caught:
        read_torch(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(path)) + 200


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    path = repacked(saved(torch.zeros(1000), tmp_path / "t.pt"), lambda members: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match="is compressed"):
        read_torch(path)


def test_members_beyond_4_gib_are_found_by_their_long_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)  # So that a small archive is written as a large one is.
    path = repacked(saved(torch.arange(24.0), tmp_path / "t.pt"), lambda members: None)
    content = bytearray(path.read_bytes())
    [entry, *_] = [at for at in range(len(content)) if content.startswith(b"PK\x01\x02", at)]
    assert content[entry + SIZE : entry + SIZE + 4] == b"\xff" * 4
    end = content.index(b"PK\x05\x06")
    content[end + 12 : end + 20] = b"\xff" * 8  # Where the directory is, which PK66 knows too.
    path.write_bytes(content)
    assert np.array_equal(read_torch(path), np.arange(24.0))  # type: ignore[arg-type]


def test_names_of_members_never_become_paths(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = repacked(saved(torch.arange(3), folder / "t.pt"), put("../../../escaped", b"x"))
    assert read_torch(path).tolist() == [0, 1, 2]  # type: ignore[attr-defined]
    assert sorted(tmp_path.rglob("*")) == [folder, path]


def change_entry(path: Path, member: str, field: int, value: int) -> Path:
    """Change four bytes of a member's entry in the archive's directory."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = content.index(member.encode(), archive.start_dir) - 46
    content[entry + field : entry + field + 4] = value.to_bytes(4, "little")
    path.write_bytes(content)
    return path


PACKED, SIZE, OFFSET = 20, 24, 42


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    path = saved(torch.arange(1000.0), tmp_path / "t.pt")
    with zipfile.ZipFile(path) as archive:
        header = archive.getinfo("t/byteorder").header_offset
        inside = archive.getinfo("t/data/0").header_offset + 1000
    content = bytearray(path.read_bytes())
    content[inside : inside + 150] = content[header : header + 150]  # "byteorder", hidden among the numbers
    path.write_bytes(content)
    with pytest.raises(DataError, match="with members that overlap"):
        read_torch(change_entry(path, "t/byteorder", OFFSET, inside))


def test_members_reach_no_further_than_the_file(tmp_path: Path) -> None:
    path = saved(torch.arange(1000.0), tmp_path / "t.pt")
    for field in (PACKED, SIZE):
        change_entry(path, "t/data/0", field, 1 << 30)
    with pytest.raises(DataError, match="lies beyond the file"):
        read_torch(path)


def test_members_reach_no_further_than_the_directory(tmp_path: Path) -> None:
    path = saved(torch.arange(1000.0), tmp_path / "t.pt")
    for field in (PACKED, SIZE):
        change_entry(path, "t/.data/serialization_id", field, 60)
    with pytest.raises(DataError, match="with members that overlap"):
        read_torch(path)


def test_members_are_where_the_directory_says(tmp_path: Path) -> None:
    path = change_entry(saved(torch.arange(1000.0), tmp_path / "t.pt"), "t/data/0", OFFSET, 0)
    with pytest.raises(DataError, match="not where the directory says"):
        read_torch(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((24.0, "K\x18\x85", "K\x19\x85"), "beyond its storage"),  # one more number
        ((24.0, "K\x01\x85", "K\x02\x85"), "beyond its storage"),  # a longer stride
        ((24.0, "K\x00K\x18", "K\x01K\x18"), "beyond its storage"),  # a later start
    ],
)
def test_a_tensor_reaches_no_further_than_its_storage(
    change: tuple[float, str, str], message: str, tmp_path: Path
) -> None:
    _, old, new = change

    def alter(members: dict[str, bytes]) -> None:
        pickled = members["t/data.pkl"]
        assert pickled.count(old.encode("latin-1")) == 1
        members["t/data.pkl"] = pickled.replace(old.encode("latin-1"), new.encode("latin-1"))

    path = repacked(saved(torch.arange(24.0), tmp_path / "t.pt"), alter)
    with pytest.raises(DataError, match=message):
        read_torch(path)


def test_a_tensor_repeats_its_storage_in_bounds_only(tmp_path: Path) -> None:
    path = saved(torch.zeros(1).expand(1 << 40), tmp_path / "t.pt")
    with pytest.raises(DataError, match="beyond its storage"):
        read_torch(path)


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04" + b"\0" * 500, b"\x80\x02K\x01.", b"not torch's", b"\0" * 1000]
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_torch(written(tmp_path, content))


@LEGACY
def test_a_thousand_damaged_files_are_errors_or_results(legacy: bool, tmp_path: Path) -> None:
    value = {"model": (torch.nn.Linear(2, 3), {"meta": 1}), "numpy": np.arange(5.0), "ids": {"a": 0}}
    content = saved(value, tmp_path / "t.pt", legacy=legacy).read_bytes()
    stripped = content.replace(b"\0" * 64, b"")  # Where damage is seen more often than in padding.
    random_bits = random.Random(7)
    outcomes = collections.Counter[str]()
    with watched() as events:
        for number in range(1000):
            path = written(tmp_path, mutated(content if number % 2 else stripped, random_bits))
            outcomes[outcome(read_torch, path)] += 1
    assert events == []
    assert outcomes["refused"] > 100, outcomes
