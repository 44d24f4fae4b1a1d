"""How much memory and disk there is for a training. No torch.

A container's limits (cgroups, version 1 or 2) hold where they are lower than what the machine has.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Limit and use, by the controller that /proc/self/cgroup names: none in version 2."""


def total_memory() -> int:
    """Return the bytes that all processes here can ever have together, swap included."""
    known = _meminfo()
    return min([known["MemTotal"], *(limit for limit, _ in _limits())]) + known["SwapTotal"]


def available_memory() -> int:
    """Return the bytes that new processes can have now without swapping; what files are cached counts."""
    return max(0, min([_meminfo()["MemAvailable"], *(limit - used for limit, used in _limits())]))


def free_disk(path: Path) -> int:
    """Return the bytes that are free where a file at `path` would be written."""
    path = path.absolute()
    return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free


def _meminfo() -> dict[str, int]:
    lines = (_PROC / "meminfo").read_text().splitlines()
    return {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}


def _limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, less cached files, of every cgroup of this process that has a limit."""
    path = _PROC / "self" / "cgroup"
    for line in path.read_text().splitlines() if path.is_file() else ():
        _, controllers, group = line.split(":", 2)
        for controller in {"", "memory"} & set(controllers.split(",")):
            top = _CGROUPS / controller
            folder = top / group.lstrip("/")
            for each in (folder, *folder.parents):
                if each.is_relative_to(top):
                    yield from _limit(each, *_FILES[controller])


def _limit(folder: Path, limit_file: str, use_file: str) -> Iterator[tuple[int, int]]:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (limit_file, use_file))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # The root has none, and a container may not see its own.
        return
    if limit != "max":
        yield int(limit), int(used) - int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
