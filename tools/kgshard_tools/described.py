"""What `kgshard info` finds, as Python objects, JSON and lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kgshard_tools.artefacts import Kind
from kgshard_tools.terminal import shown

MAX_LINES = 20
"""Rows of a list that people are shown; --json has all."""

_WHAT: dict[Kind, str] = {
    "run": "a run",
    "checkpoint": "a checkpoint of a run",
    "data": "a prepared dataset",
    "index": "FAISS indexes of a run",
    "overlay": "an overlay: entities beside a run that were not trained",
    "model": "a merged model",
    "export": "an export",
    "weight map": "a list of safetensors files",
    "safetensors": "a safetensors file",
    "npy": "a numpy array",
    "parquet": "a Parquet file",
    "faiss": "a FAISS index",
    "torch": "a file of torch.save: a zip archive with a pickle, which kgshard does not open",
    "pickle": "a pickle, which can hold code; kgshard does not open it",
}


@dataclass(frozen=True, slots=True)
class FileLine:
    """A file that a record names, or that lies there."""

    path: str
    bytes: int
    sha256: str | None = None
    """As the record has it; None where nothing says."""


@dataclass(frozen=True)
class Info:
    """What lies at a path."""

    path: str
    kind: Kind
    format: str
    """Its version, as it says itself: "kgshard.run/1"; or the name of a foreign format."""
    details: dict[str, Any]
    files: list[FileLine] = field(default_factory=list)
    readable_by: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Say it in aligned lines."""
        rows = [("format", self.format), *_rows(self.details), *self._file_rows()]
        rows.append(("readable by", ", ".join(self.readable_by)))
        width = max(len(name) for name, _ in rows)
        told = (f"{shown(name):<{width}}  {shown(words)}".rstrip() for name, words in rows)
        return [shown(f"{self.path}: {_WHAT[self.kind]}"), *told]

    def _file_rows(self) -> Iterator[tuple[str, str]]:
        size = f"{sum(file.bytes for file in self.files):,} bytes"
        if [file.path for file in self.files] == [self.path]:
            yield "size", size
        elif self.files:
            yield "files", f"{len(self.files):,}, {size}"
            words = (_file_words(file, self.path) for file in self.files)
            yield from (("", line) for line in _first(words, len(self.files)))


def _rows(details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in details.items():
        name = key.replace("_", " ")
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield name, f"{len(value):,}"
            yield from (("", words) for words in _first(map(_item_words, value), len(value)))
        else:
            yield name, _words(value)


def _item_words(item: Mapping[str, Any]) -> str:
    """Say one entry of a list: what it is called, and the rest of it."""
    (_, called), *rest = item.items()
    return f"{called}  {_words(dict(rest))}"


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(each)}" for key, each in value.items() if each is not False)
    if isinstance(value, list):
        return (" x " if value and isinstance(value[0], int) else ", ").join(map(_words, value)) or "none"
    return "-" if value is None else str(value)


def _first(words: Iterable[str], count: int) -> Iterator[str]:
    for number, line in enumerate(words):
        if number == MAX_LINES:
            yield f"and {count - MAX_LINES:,} more; --json has them all"
            return
        yield line


def _file_words(file: FileLine, folder: str) -> str:
    name = file.path.removeprefix(f"{folder}/")
    return f"{name}  {file.bytes:,} bytes" + (f"  {file.sha256}" if file.sha256 else "")
