"""What a format is: how it is written, and what it can say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kgshard.errors import ConfigError
from kgshard.shards import TABLE_DTYPES
from kgshard_tools.export.tables import Export, LabelEscape
from kgshard_tools.rows import DTYPES


@dataclass(frozen=True, slots=True)
class Format:
    """One format."""

    summary: str
    """Who reads it, in a line."""
    fill: Callable[[Export, Path], list[str]]
    """Fills an empty folder; returns the lines of Python that load what it wrote, run from that folder."""
    names: tuple[str, ...]
    """Patterns of the paths of all files that it writes there, config.json aside."""
    dtypes: tuple[str, ...] = ("float32",)
    """What values can be written as. What else is stored is widened to float32, exactly."""
    whole: bool = False
    """It is a model with its graph, which means something with all its rows as they are only."""
    escapes: bool = False
    """Some labels cannot be said in it, and it knows how to escape them."""

    def check_takes(self, name: str, *, selection: bool, normalize: bool, escape: LabelEscape) -> None:
        """Raise ConfigError where this format, called `name`, cannot say what was asked for."""
        if self.whole and selection:
            raise ConfigError(
                f"--format {name} is a whole model; --entities and --top-degree would leave out part of it"
            )
        if self.whole and normalize:
            raise ConfigError(f"--format {name} is a whole model; --normalize would change its scores")
        if escape != "refuse" and not self.escapes:
            raise ConfigError(f"--label-escape: --format {name} writes every label as it is")

    def written_dtype(self, stored: str, wanted: str | None, notes: list[str]) -> str:
        """Return what is written, as safetensors spells it; note where it is not what is stored.

        Args:
            stored: What the table has, as safetensors spells it.
            wanted: A torch name, or None for the stored one.
            notes: Where to say it.

        Raises:
            ConfigError: This format cannot say what is wanted.
        """
        if wanted is not None and wanted not in self.dtypes:
            raise ConfigError(
                f"--dtype: {wanted!r} is none this format has (it has: {', '.join(self.dtypes)})"
            )
        name = TABLE_DTYPES[stored][1]
        chosen = wanted or (name if name in self.dtypes else "float32")
        if chosen != name:
            change = "widened to float32, exactly" if chosen == "float32" else f"rounded to {chosen}"
            reason = "" if wanted else "; this format has no such dtype"
            note = f"{name} was {change}{reason}"
            if note not in notes:
                notes.append(note)
        return DTYPES[chosen]
