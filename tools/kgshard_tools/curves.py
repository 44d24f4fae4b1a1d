"""Loss and validation curves of a run as one picture, from its metrics.jsonl."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from kgshard.errors import ConfigError, RunError
from kgshard.files import AnyPath, replacing
from kgshard.runs import METRICS_FILE, open_run

CURVES_FILE = "curves.png"
SHOWN = ("mrr", "hits@10", "hits@1")
"""Which validation metrics are drawn."""


@dataclass(frozen=True, slots=True)
class Curves:
    """What a run recorded, over epochs (fractions of them, where it was evaluated between)."""

    epochs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Mean loss a question, one for each of `epochs`."""
    evaluated: list[float] = field(default_factory=list)
    """When valid triples were ranked, in epochs."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """By name, one value for each of `evaluated`."""


def read_curves(run: AnyPath) -> Curves:
    """Read a run's metrics.jsonl.

    Raises:
        RunError: It is no run, it recorded nothing, or a line is damaged.
    """
    opened = open_run(run)
    path = opened.folder / METRICS_FILE
    if opened.info.imported is not None and not path.exists():
        program = opened.info.imported.program
        raise RunError(f"{opened.folder}: was imported from {program}; its training was not recorded here")
    try:
        # A run that trains on may be in the middle of a line.
        whole = path.read_text().rpartition("\n")[0]
        if not whole:
            raise RunError(f"{path}: nothing was recorded yet")
        return _curves([json.loads(line) for line in whole.split("\n")])
    except FileNotFoundError:
        raise RunError(f"{path}: nothing was recorded yet") from None
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise RunError(f"{path}: {error}") from error


def _curves(lines: list[dict[str, object]]) -> Curves:
    curves = Curves()
    steps = [_number(line["step"]) / _number(line["epoch"]) for line in lines if "loss" in line]
    for line in lines:
        when = _number(line["step"]) / steps[0] if steps else _number(line["epoch"])
        if "loss" in line:
            curves.epochs.append(when)
            curves.losses.append(_number(line["loss"]))
        if isinstance(line.get("valid"), dict):
            curves.evaluated.append(when)
            for name in SHOWN:
                curves.metrics.setdefault(name, []).append(_number(line["valid"][name]))  # type: ignore[index]
    return curves


def _number(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise ValueError(f"expected a number, got {value!r}")
    return value


def draw_curves(run: AnyPath, out: AnyPath | None = None) -> Path:
    """Draw a run's curves; return the file, by default RUN/curves.png.

    Raises:
        ConfigError: matplotlib is not installed.
        RunError: See `read_curves`.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("curves needs the package matplotlib: pip install 'kgshard[curves]'")
    from matplotlib.figure import Figure

    curves = read_curves(run)
    path = Path(out) if out is not None else open_run(run).folder / CURVES_FILE
    if path.suffix != ".png" or not path.parent.is_dir():
        raise ConfigError(f"--out {path}: expected a file ending in .png, in a folder that exists")
    figure = Figure(figsize=(9, 4), layout="constrained")
    left = figure.subplots()
    left.plot(curves.epochs, curves.losses, color="tab:gray", label="loss")
    left.set_xlabel("epoch")
    left.set_ylabel("loss a question")
    if curves.evaluated:
        right = left.twinx()
        for name, values in curves.metrics.items():
            right.plot(curves.evaluated, values, marker=".", label=f"valid {name.upper()}")
        right.set_ylabel("valid, filtered by train and valid")
        right.set_ylim(0, 1)
        right.legend(loc="lower right")
    left.set_title(Path(run).resolve().name, parse_math=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path
