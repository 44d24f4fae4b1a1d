"""Pickles are data: what pickle wrote comes back, and nothing ever runs.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_files import mutated, outcome, watched, written
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.importers import pickles
from kgshard_tools.importers.pickled_objects import Object, Symbol
from kgshard_tools.importers.pickles import read_pickle

from kgshard.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pickles")


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
    found: Any = read_pickle(written(folder, pickle.dumps([array, array], 2)))
    first, second = found
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
    found: Any = read_pickle(written(folder, pickle.dumps([Plain()], protocol)))
    [made] = found
    assert made.symbol == Symbol(__name__, "Plain") or made.args[0] == Symbol(__name__, "Plain")
    assert made.state["options"] == {"a": 1}
    assert made.state["me"] is made


# --- Hostile pickles -----------------------------------------------------------------------------------


class Evil:
    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_a_malicious_pickle_runs_nothing(tmp_path: Path) -> None:
    import os

    marker = tmp_path / "was-here"
    path = written(tmp_path, pickle.dumps({"weights": Evil(os.system, f"touch {marker}")}))
    with watched() as events:
        found: Any = read_pickle(path)
    assert events == []
    assert not marker.exists()
    made = found["weights"]
    assert isinstance(made, Object)
    assert (made.symbol, made.args) == (Symbol("posix", "system"), (f"touch {marker}",))
    # The negative control: pickle itself runs it.
    subprocess.run(
        [sys.executable, "-c", f"import pickle; pickle.load(open({str(path)!r}, 'rb'))"], check=True
    )
    assert marker.exists()


@pytest.mark.parametrize("protocol", range(6))
def test_no_name_in_a_pickle_is_imported_or_called(protocol: int, tmp_path: Path) -> None:
    import importlib

    evils = [
        Evil(eval, "1/0"),
        Evil(exec, "1/0"),
        Evil(importlib.import_module, "this"),
        Evil(getattr, "", "x"),
    ]
    path = written(tmp_path, pickle.dumps(evils, protocol))
    with watched() as events:
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
    "5,000 keys of two parts": (pickle.dumps({(i, -i): None for i in range(5000)}, 2), "too many keys"),
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
    "an array of any size without a byte": (
        pickle.dumps(np.array([b"a"]), 2)
        .replace(b"K\x01K\x01\x85", b"K\x01J\xff\xff\xff\x7f\x85")
        .replace(b"S1", b"S0")
        .replace(b"X\x01\x00\x00\x00a", b"X\x00\x00\x00\x00"),
        "neither numbers nor text",
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


def test_bytes_of_a_pickle_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_PICKLE_BYTES", 1 << 20)
    path = written(tmp_path, opcodes(b"X" + (1 << 20).to_bytes(4, "little") + b"a" * (1 << 20)))
    with pytest.raises(DataError, match="more than 1 MiB"):
        read_pickle(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.pkl: No such file"):
        read_pickle(tmp_path / "none.pkl")


def test_a_thousand_damaged_pickles_are_errors_or_results(tmp_path: Path) -> None:
    value = [{"a": 1, ("b", 2): [1.5, None, True]}, {1, 2}, np.arange(4), b"bytes", "text" * 20, Plain()]
    random_bits = random.Random(8)
    with watched() as events:
        for number in range(1000):
            content = io.BytesIO()
            pickle.Pickler(content, number % 6).dump(value)
            path = written(tmp_path, mutated(content.getvalue(), random_bits))
            outcome(read_pickle, path)
    assert events == []
