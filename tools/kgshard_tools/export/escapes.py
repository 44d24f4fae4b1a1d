"""Labels that a format cannot say: refused, or written in a way that it can.

Percent escapes are reversible: each character that cannot be said, and each %, becomes % and two hexadecimal
digits for each byte of its UTF-8 (urllib.parse.unquote reads them). The empty label becomes a lone %.
Underscores read better, and do not lead back: each such character becomes _, and so does the empty label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kgshard.errors import ConfigError
from kgshard_tools.export.delimited import counted
from kgshard_tools.export.tables import Export, LabelEscape, Rows

_NUM_NAMED = 5
_MAX_NAMED = 60

Spell = Callable[[str], str]
"""Turns a label into what is written."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a format writes labels."""

    unsayable: str
    """A pattern of what it cannot say: characters, or `\\A\\Z` for the empty label."""
    escape: LabelEscape

    def writer(self) -> Spell:
        """Return what turns a label into what is written.

        Example:
            >>> Spelling(r"\\s", "percent").writer()("100 % sure")
            '100%20%25%20sure'
        """
        if self.escape == "refuse":
            return str
        percent = self.escape == "percent"
        pattern = re.compile(f"%|{self.unsayable}" if percent else self.unsayable)
        change = _percent if percent else _underscore
        return lambda label: pattern.sub(change, label)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode()) or "%"


def _underscore(match: re.Match[str]) -> str:
    return "_"


def choose_spelling(what: Export, format: str, unsayable: str, kinds: Mapping[str, Rows]) -> Spelling:
    """Return how all labels of `kinds` are written, before anything is; note how many are changed.

    Args:
        what: What is exported, and the escape that was asked for.
        format: The format's name, for messages.
        unsayable: See `Spelling`.
        kinds: The rows whose labels it must say, by what they are called in messages.

    Raises:
        ConfigError: Some labels cannot be said and none is to be escaped, or escaped ones would be equal.
    """
    spelling = Spelling(unsayable, what.label_escape)
    if what.label_escape == "refuse":
        _refuse(format, re.compile(unsayable), kinds)
        return spelling
    if what.label_escape == "underscore":
        for kind, rows in kinds.items():
            _check_distinct(format, kind, rows, spelling.writer())
    what.config["label_escape"] = what.label_escape
    _note_changes(what, kinds, spelling.writer())
    return spelling


def _note_changes(what: Export, kinds: Mapping[str, Rows], spell: Spell) -> None:
    """Say how many labels are not written as they are, and give an example."""
    count, example = 0, ""
    for rows in kinds.values():
        for label in _each_label(rows):
            if (written := spell(label)) != label:
                count += 1
                example = example or f"{_named(label)} as {_named(written)}"
    if count:
        way = {"percent": "percent escapes", "underscore": "underscores"}[what.label_escape]
        what.note(f"{counted(count, 'label')} written with {way}, {example}")


def _each_label(rows: Rows) -> Iterator[str]:
    for labels in rows.labels():
        yield from labels


def _named(label: str) -> str:
    return repr(label if len(label) <= _MAX_NAMED else label[: _MAX_NAMED - 3] + "...")


def _refuse(format: str, unsayable: re.Pattern[str], kinds: Mapping[str, Rows]) -> None:
    """Raise ConfigError that counts the labels that cannot be said, and names some."""
    count, names = 0, list[str]()
    for kind, rows in kinds.items():
        for label in _each_label(rows):
            if unsayable.search(label):
                count += 1
                if len(names) < _NUM_NAMED:
                    names.append(f"{kind} {_named(label)}")
    if count:
        more = f" and {count - len(names):,} more" if count > len(names) else ""
        raise ConfigError(
            f"--format {format} cannot say {count:,} of the labels ({', '.join(names)}{more}); "
            "--label-escape percent writes them reversibly, underscore readably"
        )


def _check_distinct(format: str, kind: str, rows: Rows, spell: Spell) -> None:
    """Raise ConfigError where two labels are written alike.

    Eight bytes a label: only those whose hashes are equal are compared as text.
    """
    hashes = np.fromiter((hash(spell(label)) for label in _each_label(rows)), np.int64, len(rows))
    hashes.sort()
    suspects = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not suspects:
        return
    first: dict[str, str] = {}
    clashes: list[str] = []
    for label in _each_label(rows):
        written = spell(label)
        if hash(written) in suspects and first.setdefault(written, label) != label:
            clashes.append(f"{_named(first[written])} and {_named(label)}")
            if len(clashes) == _NUM_NAMED:
                break
    if clashes:
        raise ConfigError(
            f"--format {format}: with --label-escape underscore {kind} labels would be equal: "
            f"{', '.join(clashes)}; use --label-escape percent"
        )
