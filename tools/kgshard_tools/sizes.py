"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from kgshard.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(option: str, size: int | str) -> int:
    """Return a size in bytes.

    Args:
        option: Whose value it is, for messages.
        size: A number of bytes, or a number and a unit: 5GB is 5e9 bytes, 5GiB is 5 * 2**30.

    Raises:
        ConfigError: It is no size, or not above zero.

    Example:
        >>> parse_size("--max-file-size", "1.5 KiB"), parse_size("--max-file-size", 7)
        (1536, 7)
    """
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", str(size).strip())
    units = _UNITS | _BINARY_UNITS
    if not found or found[2].upper() not in units:
        raise ConfigError(f"{option}: {size!r} is no size; write it as 5GB, 500MiB or a number of bytes")
    num_bytes = int(float(found[1]) * units[found[2].upper()])
    if num_bytes < 1:
        raise ConfigError(f"{option} must be at least a byte, got {size!r}")
    return num_bytes
