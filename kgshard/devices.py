"""Which devices a name may mean, told without torch: a wrong one is refused before anything happens."""

from __future__ import annotations

import ctypes
import re

from kgshard.errors import ConfigError


def check_device(option: str, name: str) -> None:
    """Refuse a device that is none, or is not here.

    Args:
        option: The command-line option, for the message.
        name: auto, cpu, cuda or cuda:N.

    Raises:
        ConfigError: It is another word, or there is no such CUDA device on this machine.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::([0-9]{1,4}))?", name)
    if match is None:
        raise ConfigError(f"{option}: unknown value {name!r} (known: auto, cpu, cuda, cuda:N)")
    if not name.startswith("cuda"):
        return
    number = int(match[1] or 0)
    count = num_cuda_devices()
    if number >= count:
        raise ConfigError(f"{option} {name}: this machine has {count or 'no'} CUDA devices")


def num_cuda_devices() -> int:
    """Return how many CUDA devices the driver sees; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else count.value
