"""Pickles and torch's files are data: what pickle and torch wrote comes back, and nothing ever runs.

`pickle` is imported to write only; the audit hook sees that reading looks nothing up and imports nothing.
"""

from __future__ import annotations

import collections
import io
import pathlib
import pickle
import random
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.importers import pickles
from kgshard_tools.importers.pickles import Object, Symbol, module_tensors, read_pickle, read_torch

from kgshard.errors import DataError

_watched: list[list[str]] = []
"""Where audit events go; empty while nobody watches (an audit hook cannot be removed)."""


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if _watched and event in (
        "pickle.find_class",
        "import",
        "exec",
        "os.system",
        "subprocess.Popen",
        "marshal.loads",
    ):
        _watched[-1].append(f"{event} {arguments[:2]}")


sys.addaudithook(_audit)


@pytest.fixture
def events() -> Iterator[list[str]]:
    """What audit hooks saw since the test began: lookups, imports, execution."""
    _watched.append([])
    yield _watched[-1]
    _watched.pop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pickles")


def written(folder: Path, content: bytes) -> Path:
    path = folder / "file.bin"
    path.write_bytes(content)
    return path


def same(found: Any, expected: Any) -> bool:
    """Whether two trees are equal, type by type; dicts of any kind are read as dicts."""
    if isinstance(expected, dict):
        return type(found) is dict and same(list(found.items()), list(expected.items()))
    if type(found) is not type(expected):
        return False
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return repr(found) == repr(expected) if isinstance(expected, float | complex) else bool(found == expected)


hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
leaves = st.integers() | st.text() | st.binary() | st.complex_numbers(allow_nan=False) | hashable
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner, inner, inner)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict)
        | st.sets(hashable, max_size=4)
        | st.binary().map(bytearray)
        | inner.map(lambda value: [value, value])
    ),
    max_leaves=12,
)


@given(tree=trees, protocol=st.integers(0, 5))
@settings(max_examples=300, deadline=None)
def test_what_pickle_wrote_is_read(tree: Any, protocol: int, folder: Path) -> None:
    assert same(read_pickle(written(folder, pickle.dumps(tree, protocol))), tree)


@pytest.mark.parametrize("protocol", range(6))
def test_shapes_that_are_data_are_understood(protocol: int, folder: Path) -> None:
    tree = {
        "path": pathlib.PurePosixPath("/a/b"),
        "counter": collections.Counter("abca"),
        "default": collections.defaultdict(list, a=[1]),
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "text": np.array(["a", "bc"]),
        "objects": np.array([None, "x"], object),
        "scalar": np.float32(0.1),
        "flag": np.bool_(True),
        "size": torch.Size([2, 3]),
    }
    found: Any = read_pickle(written(folder, pickle.dumps(tree, protocol)))
    for name in ("array", "fortran", "big", "text", "objects"):
        assert np.array_equal(found[name], tree[name]), name  # type: ignore[arg-type]
        assert found[name].dtype.newbyteorder("=") == tree[name].dtype.newbyteorder("="), name  # type: ignore[attr-defined]
    assert found["path"] == tree["path"]
    assert found["counter"] == {"a": 2, "b": 1, "c": 1}
    assert found["default"] == {"a": [1]}
    assert (found["scalar"], found["flag"], found["size"]) == (float(np.float32(0.1)), True, (2, 3))


def test_an_array_that_occurs_twice_is_one_array(folder: Path) -> None:
    array = np.arange(3)
    first, second = read_pickle(written(folder, pickle.dumps([array, array], 2)))  # type: ignore[misc]
    assert first is second
    assert first.tolist() == [0, 1, 2]


def test_what_is_stored_by_number_is_recalled_by_number(tmp_path: Path) -> None:
    # pickle counts from 0; others leave numbers out.
    found: Any = read_pickle(written(tmp_path, opcodes(b"]q\x07Nq\x03h\x07\x87")))
    assert found == ([], None, [])
    assert found[0] is found[2]


class Plain:
    def __init__(self) -> None:
        self.options = {"a": 1}
        self.me = self


@pytest.mark.parametrize("protocol", range(6))
def test_an_object_is_its_class_by_name_and_its_state(protocol: int, folder: Path) -> None:
    found = read_pickle(written(folder, pickle.dumps([Plain()], protocol)))
    [made] = found  # type: ignore[misc]
    assert made.symbol == Symbol(__name__, "Plain") or made.args[0] == Symbol(__name__, "Plain")
    assert made.state["options"] == {"a": 1}
    assert made.state["me"] is made


# --- Hostile pickles -----------------------------------------------------------------------------------


class Evil:
    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_a_malicious_pickle_runs_nothing(tmp_path: Path, events: list[str]) -> None:
    import os

    marker = tmp_path / "was-here"
    path = written(tmp_path, pickle.dumps({"weights": Evil(os.system, f"touch {marker}")}))
    events.clear()
    found = read_pickle(path)
    assert events == []
    assert not marker.exists()
    made = found["weights"]  # type: ignore[index,call-overload]
    assert isinstance(made, Object)
    assert (made.symbol, made.args) == (Symbol("posix", "system"), (f"touch {marker}",))
    # The negative control: pickle itself runs it.
    subprocess.run(
        [sys.executable, "-c", f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"], check=True
    )
    assert marker.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_no_name_in_a_pickle_is_imported_or_called(protocol: int, tmp_path: Path, events: list[str]) -> None:
    import importlib

    evils = [
        Evil(eval, "1/0"),
        Evil(exec, "1/0"),
        Evil(importlib.import_module, "this"),
        Evil(getattr, "", "x"),
    ]
    path = written(tmp_path, pickle.dumps(evils, protocol))
    events.clear()
    found = read_pickle(path)
    assert events == []
    assert all(isinstance(made, Object) for made in found)  # type: ignore[attr-defined]


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


HOSTILE = {
    "empty": (b"", r"bin: empty"),
    "no pickle": (b"\xff\xfe\x00", "damaged"),
    "cut short": (pickle.dumps(list(range(100)))[:-30], "ends early"),
    "a string of 2^62 bytes": (opcodes(b"\x8d" + (1 << 62).to_bytes(8, "little")), "ends early"),
    "bytes of 4 GiB": (opcodes(b"B\xff\xff\xff\xff"), "ends early"),
    "a number of 2 GiB": (opcodes(b"\x8b\xff\xff\xff\x7f"), "ends early"),
    "an empty stack": (opcodes(b"0"), "lacks a mark"),
    "nothing to return": (opcodes(), "empty stack"),
    "no mark": (opcodes(b"t"), "lacks a mark"),
    "a memo never stored": (opcodes(b"h\x07"), "never stored"),
    "an out-of-band buffer": (opcodes(b"\x97"), "NEXT_BUFFER"),
    "an extension": (opcodes(b"\x82\x01"), "EXT1"),
    "a persistent id": (opcodes(b"Nq\x00Q"), "outside of it"),
    "a list for a key": (opcodes(b"}]Ns"), "list for a key"),
    "a key of 80 bits": (opcodes(b"}\x8a\x0a" + b"\xff" * 9 + b"\x7fNs"), "64 bits"),
    "a key of 200,000 tuples": (opcodes(b"})" + b"\x85" * 200_000 + b"Ns"), "too many parts"),
    "a key that doubles 100 times": (opcodes(b"})" + b"2\x86" * 100 + b"Ns"), "too many parts"),
    "an odd number of items": (opcodes(b"}(Nu"), "no value"),
    "appending to a number": (opcodes(b"K\x01Na"), "appends to a int"),
    "items of a list": (opcodes(b"]NNs"), "sets items of a list"),
    "arguments that are no tuple": (opcodes(b"cos\nsystem\nNR"), "no tuple"),
    "a global without a name": (opcodes(b"NN\x93"), "no text"),
    "a number in 5,000 digits": (b"I" + b"9" * 5000 + b"\n.", "damaged"),
    "an array larger than its bytes": (
        pickle.dumps(np.arange(3, dtype="<i4"), 2).replace(b"K\x03\x85", b"M\xff\xff\x85"),
        "fit its shape",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_one_error(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = written(tmp_path, content)
    started = time.perf_counter()
    with pytest.raises(DataError, match=message) as caught:
        read_pickle(path)
    assert time.perf_counter() - started < 5
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_deep_nesting_is_read(tmp_path: Path) -> None:
    depth = 200_000  # C's stack holds some ten thousand calls.
    found = read_pickle(written(tmp_path, opcodes(b"]" * depth, b"a" * (depth - 1))))
    levels = 0
    while found:
        [found] = found  # type: ignore[misc]
        levels += 1
    assert levels == depth - 1


def test_steps_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_STEPS", 1000)
    path = written(tmp_path, opcodes(b"]\x94" * 1000))
    with pytest.raises(DataError, match="more than 1000 steps"):
        read_pickle(path)


COPYING = {
    "bytearray": b"cbuiltins\nbytearray\n",
    "set": b"cbuiltins\nset\n",
    "Counter": b"ccollections\nCounter\n",
    "Size": b"ctorch\nSize\n",
    "encode": b"c_codecs\nencode\n",
}


@pytest.mark.parametrize("name", COPYING)
def test_copies_are_limited(name: str, tmp_path: Path) -> None:
    values = {
        "bytearray": b"B" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20),
        "set": b"](" + b"N" * (1 << 20) + b"e",
        "Counter": b"}("
        + b"".join(b"J%bN" % number.to_bytes(4, "little") for number in range(1 << 18))
        + b"u",
        "Size": b"](" + b"N" * (1 << 20) + b"e",
        "encode": b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20),
    }[name]
    arguments = b"h\x00X\x06\x00\x00\x00latin1\x86" if name == "encode" else b"h\x00\x85"
    path = written(tmp_path, opcodes(values, b"q\x00]", (COPYING[name] + arguments + b"Ra") * 1000))
    with pytest.raises(DataError, match="copies more than 16 times its file"):
        read_pickle(path)


def test_widened_copies_are_limited(tmp_path: Path) -> None:
    base = torch.zeros(1 << 20, dtype=torch.bfloat16)
    few: Any = read_torch(saved([base.view(1024, 1024) for _ in range(4)], tmp_path / "few.pt"))
    assert len(few) == 4
    with pytest.raises(DataError, match="copies more than 16 times its file"):
        read_torch(saved([base.view(1024, 1024) for _ in range(100)], tmp_path / "many.pt"))


def test_bytes_of_a_pickle_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_PICKLE_BYTES", 1 << 20)
    path = written(tmp_path, opcodes(b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20)))
    with pytest.raises(DataError, match="more than 1 MiB"):
        read_pickle(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.pkl: No such file"):
        read_pickle(tmp_path / "none.pkl")


# --- torch's files -------------------------------------------------------------------------------------

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
def test_a_pickled_module_has_the_tensors_of_its_state_dict(
    legacy: bool, tmp_path: Path, events: list[str]
) -> None:
    network = Network()
    path = saved(network, tmp_path / "m.pt", legacy=legacy)
    events.clear()
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
        "from kgshard_tools.importers.pickles import read_torch\n"
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


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    path = repacked(saved(torch.zeros(1000), tmp_path / "t.pt"), lambda members: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match="is compressed"):
        read_torch(path)


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


def mutated(content: bytes, random_bits: random.Random) -> bytes:
    """Change a few bytes, cut, repeat or swap a stretch."""
    changed = bytearray(content)
    kind = random_bits.randrange(5)
    start = random_bits.randrange(len(changed))
    stop = min(len(changed), start + random_bits.randrange(1, 64))
    if kind == 0:
        del changed[start:stop]
    elif kind == 1:
        changed[start:start] = changed[start:stop]
    elif kind == 2:
        del changed[start:]
    else:
        for _ in range(random_bits.randrange(1, 9)):
            values = (0, 1, 0x7F, 0x80, 0xFF, random_bits.randrange(256))
            changed[random_bits.randrange(len(changed))] = random_bits.choice(values)
    return bytes(changed)


def outcome(read: Callable[[Path], object], path: Path) -> str:
    """Read a damaged file: a result or one line, and soon."""
    started = time.perf_counter()
    message = ""
    try:
        read(path)
    except DataError as error:
        message = str(error)
    assert time.perf_counter() - started < 1
    assert "\n" not in message
    return "refused" if message else "read"


@LEGACY
def test_a_thousand_damaged_files_are_errors_or_results(
    legacy: bool, tmp_path: Path, events: list[str]
) -> None:
    value = {"model": (torch.nn.Linear(2, 3), {"meta": 1}), "numpy": np.arange(5.0), "ids": {"a": 0}}
    content = saved(value, tmp_path / "t.pt", legacy=legacy).read_bytes()
    stripped = content.replace(b"\0" * 64, b"")  # Where damage is seen more often than in padding.
    random_bits = random.Random(7)
    outcomes = collections.Counter[str]()
    events.clear()
    for number in range(1000):
        path = written(tmp_path, mutated(content if number % 2 else stripped, random_bits))
        outcomes[outcome(read_torch, path)] += 1
    assert events == []
    assert outcomes["refused"] > 100, outcomes


def test_a_thousand_damaged_pickles_are_errors_or_results(tmp_path: Path, events: list[str]) -> None:
    value = [{"a": 1, ("b", 2): [1.5, None, True]}, {1, 2}, np.arange(4), b"bytes", "text" * 20, Plain()]
    random_bits = random.Random(8)
    events.clear()
    for number in range(1000):
        content = io.BytesIO()
        pickle.Pickler(content, number % 6).dump(value)
        path = written(tmp_path, mutated(content.getvalue(), random_bits))
        outcome(read_pickle, path)
    assert events == []
