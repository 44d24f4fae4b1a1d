"""FAISS files that kgshard did not write, or that no record has the hash of: read and searched elsewhere.

FAISS trusts its files. Mutated ones have made it crash, hang and ask for all memory, and none of that may
happen to who only asks; so a process with limits reads them (`foreign_child` has the list), and what it
sends back is checked (`foreign_answers`). No faiss here.

Shape letters: B queries, d floats of a vector, k answers.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from kgshard.errors import ConfigError, KgshardError, ShardError
from kgshard.files import AnyPath
from kgshard.shards import Floats
from kgshard_tools.index.foreign_answers import ForeignError, ForeignFound, ForeignIndex, checked, read_answer
from kgshard_tools.index.foreign_child import ANSWER, ENDED, FAULT, FRAME
from kgshard_tools.search import Ids
from kgshard_tools.terminal import shown

__all__ = ["ForeignFound", "ForeignIndex", "ForeignReader", "describe_foreign", "search_foreign"]

SECONDS = 10.0
"""For reading a file and searching it once."""
MOST_BYTES = 64 << 20
"""Of the queries of one request, and of its answers."""

_TRIAL_K = 10
_STARTING = 120.0
"""Seconds in which faiss must have been imported."""
_GRACE = 10.0
"""Seconds more than a child has, for telling that it had to be killed."""


class ForeignReader:
    """Reads foreign index files apart from this process: one process for all, and a fork of it for each.

    It starts with the first request, which takes a third of a second, and ends with `close` or a `with`.
    """

    def __init__(self, *, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ForeignReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process, after what it is doing."""
        with self._lock:
            self._stop()

    def describe(self, path: AnyPath) -> ForeignIndex:
        """Read a file, search it for the 10 nearest of a zero and of a random vector, and say what it is.

        Raises:
            ShardError: FAISS cannot, crashed, took too long or too much memory, or answered nonsense.
        """
        index, values, ids = self._ask(Path(path), np.empty((0, 0), np.float32), _TRIAL_K)
        if not np.isfinite(values[ids != -1]).all():
            raise ShardError(f"{path}: FAISS finds vectors in it that are not finite", file=str(path))
        return index

    def search(self, path: AnyPath, queries: Floats, k: int, *, num_rows: int | None = None) -> ForeignFound:
        """Read a file and search it, as it says itself it is to be searched (its nprobe, its efSearch).

        Args:
            path: A FAISS index.
            queries: float32[B, d], finite.
            k: How many answers.
            num_rows: Ids must be below; the number of the index's vectors, if not given.

        Raises:
            ShardError: As `describe`; or its vectors are not of `d` floats.
            ConfigError: More is asked than one request may.
        """
        narrow = np.ascontiguousarray(queries, np.float32)
        if narrow.ndim != 2 or not narrow.size or not np.isfinite(narrow).all():
            raise ValueError(f"queries must be finite, of shape (any, d), got {narrow.shape}")
        most = MOST_BYTES // (12 * len(narrow))
        if not 1 <= k <= most or narrow.nbytes > MOST_BYTES:
            raise ConfigError(
                f"k must be >= 1, and {len(narrow)} queries of a foreign index may ask for {most}"
            )
        index, values, ids = self._ask(Path(path), narrow, k)
        return checked(index, values, ids, index.rows if num_rows is None else num_rows)

    def _ask(self, path: Path, queries: Floats, k: int) -> tuple[ForeignIndex, Floats, Ids]:
        """Return what the file is, values float32[B, k] as FAISS reports them, and ids."""
        if not path.is_file():
            raise ShardError(
                f"{path}: {'is no ordinary file' if path.exists() else 'missing'}", file=str(path)
            )
        asked = {"path": os.path.abspath(path), "k": k, "shape": queries.shape, "seconds": self._seconds}
        with self._lock:
            answer = self._exchange(json.dumps(asked).encode(), queries.tobytes())
        try:
            return read_answer(answer, queries, k, seconds=self._seconds)
        except ForeignError as error:
            raise ShardError(f"{path}: {error}", file=str(path)) from error

    def _exchange(self, head: bytes, queries: bytes) -> bytes:
        was_running = self._server is not None
        try:
            server = self._running()
            assert server.stdin is not None
            for content in (head, queries):
                server.stdin.write(FRAME.pack(len(content)) + content)
            server.stdin.flush()
            return _read_frame(server, self._seconds + _GRACE)
        except (BrokenPipeError, EOFError) as error:
            self._stop()
            if was_running:  # It may have been gone before it was asked.
                return self._exchange(head, queries)
            raise KgshardError(f"the process that reads foreign indexes ended: {error}; ask again") from error
        except OSError as error:
            self._stop()
            raise KgshardError(f"the process that reads foreign indexes ended: {error}; ask again") from error
        except BaseException:
            self._stop()  # An answer that is still to come is no answer to the next question.
            raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._server is not None and self._server.poll() is not None:
            self._stop()
        if self._server is None:
            threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "kgshard_tools.index.foreign_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | threads,
                start_new_session=True,
            )
            greeting = _read_frame(self._server, _STARTING)
            if greeting != b"ready":
                raise KgshardError(shown(greeting.decode("utf-8", "replace")))
        return self._server

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)  # A child that reads is in its group.
        server.wait()
        for pipe in (server.stdin, server.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()


def describe_foreign(path: AnyPath, *, seconds: float = SECONDS) -> ForeignIndex:
    """Read and try one file; see `ForeignReader.describe`."""
    with ForeignReader(seconds=seconds) as reader:
        return reader.describe(path)


def search_foreign(
    path: AnyPath, queries: Floats, k: int, *, num_rows: int | None = None, seconds: float = SECONDS
) -> ForeignFound:
    """Read and search one file once; see `ForeignReader.search`."""
    with ForeignReader(seconds=seconds) as reader:
        return reader.search(path, queries, k, num_rows=num_rows)


def _read_frame(server: subprocess.Popen[bytes], seconds: float) -> bytes:
    deadline = time.monotonic() + seconds
    (size,) = FRAME.unpack(_read(server, FRAME.size, deadline))
    if size > ENDED.size + ANSWER.size + FAULT.size + MOST_BYTES:
        raise OSError(f"it sends {size} bytes")
    return _read(server, size, deadline)


def _read(server: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert server.stdout is not None
    pipe, content, poll = server.stdout.fileno(), bytearray(), select.poll()
    poll.register(pipe, select.POLLIN)
    while len(content) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            raise TimeoutError("it said nothing")
        piece = os.read(pipe, size - len(content))
        if not piece:
            raise EOFError("it closed its pipe")
        content += piece
    return bytes(content)
