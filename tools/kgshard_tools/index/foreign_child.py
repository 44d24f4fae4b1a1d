"""Reads FAISS files that nobody vouches for, each in a process of its own that may crash, hang or lie.

Run as `python -P -m kgshard_tools.index.foreign_child` by `kgshard_tools.index.foreign`. This process imports
faiss once and never reads an index itself; for each request it forks one that does, and may take

    memory     what it has, twice the file, and 1 GiB: vectors are held once, beside them tables of them
    time       the seconds of the request, then it is killed; an alarm does that if this process is gone
    files      none but the index: no file, socket or pipe can be opened, nothing written, no core is dumped
    FAISS      loops no longer than the file, vectors 512 MiB more at most; no lattices finer than any in use;
               one thread

Frames are uint64 lengths, little-endian, each before so many bytes.

    in     a JSON object {path, k, shape, seconds}, then the queries, float32[shape]; of shape [0, 0] where
           only a zero vector and a random one are to be tried
    out    once "ready", or why not; then for each request an `ENDED`, and after it what the child sent:
           an `ANSWER`, float32[B, k] as FAISS reports them and int64[B, k]; or a `FAULT`
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import sys
import time
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.random import default_rng  # here, since no module can be imported once files are out of reach

from kgshard.shards import Floats

FRAME = struct.Struct("<Q")
ENDED = struct.Struct("<cqq")
"""How the child ended (`EXITED`, `KILLED` or `TOO_LONG`), its exit code or signal, its limit of memory."""
EXITED, KILLED, TOO_LONG = b"e", b"k", b"t"
ANSWER = struct.Struct("<c40sqqqqq")
"""`OK`, the index's class, vectors, floats of each, metric, B and k."""
OK = b"+"
FAULT = struct.Struct("<c300s")
"""`MEMORY`, `UNREADABLE` or `UNSEARCHABLE`, and a reason."""
MEMORY, UNREADABLE, UNSEARCHABLE = b"m", b"r", b"s"
SPARE = 1 << 30
"""Bytes for what is made beside vectors: tables of 4096 lists and 64 bytes a vector (IVFPQ) are 256 MiB."""

_LATTICE_R2 = 256
"""Those of Sablayrolles et al. (2019) are below 80; with 32 floats, 512 takes minutes to set up."""
_LATE = 5
"""Seconds after which a child ends itself that nobody killed."""
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of one file."""

    path: str
    k: int
    queries: Floats
    """float32[B, d]; B is 0 where it is only to be tried."""
    seconds: float

    @property
    def most_bytes(self) -> int:
        """How many a child may send."""
        return max(ANSWER.size + 12 * self.k * max(2, len(self.queries)), FAULT.size)


def read_frame(file: IO[bytes]) -> bytes | None:
    """Return the next frame, or None at the end."""
    head = file.read(FRAME.size)
    return file.read(FRAME.unpack(head)[0]) if len(head) == FRAME.size else None


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more."""

    def send(content: bytes) -> None:
        answers.write(FRAME.pack(len(content)) + content)
        answers.flush()

    try:
        import faiss
    except ImportError as error:
        send(f"faiss cannot be imported: {error}".encode())
        return
    faiss.omp_set_num_threads(1)
    send(b"ready")
    while (head := read_frame(requests)) is not None:
        asked = json.loads(head)
        queries = np.frombuffer(read_frame(requests) or b"", np.float32).reshape(asked["shape"])
        send(_answered_apart(Request(asked["path"], asked["k"], queries, asked["seconds"]), faiss))


def _answered_apart(request: Request, faiss: Any) -> bytes:
    """Fork a child for one request; return how it ended and what it sent."""
    ours, its = os.pipe()
    memory = _mapped_bytes() + 2 * _size(request.path) + SPARE
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ours)
            _limit(request, memory, faiss)
            _send(its, _answer(request, faiss))
        finally:
            os._exit(0)
    os.close(its)
    sent, in_time = _received(ours, request.most_bytes + 1, time.monotonic() + request.seconds)
    os.close(ours)
    # It has ended, or must; what has ended keeps its own exit code.
    os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if len(sent) > request.most_bytes:
        return ENDED.pack(EXITED, 0, memory) + sent
    if not in_time or status == -signal.SIGXCPU:
        return ENDED.pack(TOO_LONG, 0, memory)
    return ENDED.pack(EXITED if status >= 0 else KILLED, abs(status), memory) + sent


def _mapped_bytes() -> int:
    """Return the bytes of address space that this process has, or a guess where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # The child will say that it cannot be read.


def _limit(request: Request, memory: int, faiss: Any) -> None:
    """Take away all that reading and searching an index does not need."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    signal.setitimer(signal.ITIMER_REAL, request.seconds + _LATE)
    size, seconds = _size(request.path), int(request.seconds) + 1
    limits = {
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (0, 0),
        # With 0 a core would still be piped to a program that collects them.
        resource.RLIMIT_CORE: (1, 1),
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, value)
    faiss.set_deserialization_vector_byte_limit(size + SPARE // 2)
    faiss.set_deserialization_loop_limit(max(1, size))
    faiss.set_deserialization_lattice_r2_limit(_LATTICE_R2)


def _answer(request: Request, faiss: Any) -> bytes:
    """Read the file and search it; say so where either fails."""
    fault = UNREADABLE
    try:
        reader = faiss.FileIOReader(request.path)
        # An index may name files that hold its lists. They are not opened.
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        index = faiss.read_index(reader)
        fault = UNSEARCHABLE
        name = type(index).__name__.encode()[:40]
        described = name, index.ntotal, index.d, int(index.metric_type)
        queries = request.queries if len(request.queries) else _trial(index.d)
        if queries.shape[1] != index.d:
            return ANSWER.pack(OK, *described, 0, 0)
        values, ids = index.search(queries, request.k)
        head = ANSWER.pack(OK, *described, len(queries), request.k)
        return b"".join([head, values.astype("<f4").tobytes(), ids.astype("<i8").tobytes()])
    except MemoryError:
        return FAULT.pack(MEMORY, b"")
    except Exception as error:
        if "bad_alloc" in str(error):
            return FAULT.pack(MEMORY, b"")
        return FAULT.pack(fault, _reason(error).encode("ascii", "replace")[:300])


def _trial(width: int) -> Floats:
    """Return a zero vector and a random one, float32[2, width]."""
    queries = np.zeros((2, width), np.float32)
    queries[1] = default_rng(0).standard_normal(width, np.float32)
    return queries


def _reason(error: Exception) -> str:
    """Return what FAISS says, without where in its source that is and what it asserted."""
    text = " ".join(str(error).split())
    return text.split(": Error: ", 1)[-1].split("' failed: ", 1)[-1] or type(error).__name__


def _send(pipe: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(pipe, view) :]


def _received(pipe: int, most: int, deadline: float) -> tuple[bytes, bool]:
    """Return what comes through a pipe until it is closed, `most` bytes, or the deadline; and if in time."""
    content, poll = bytearray(), select.poll()
    poll.register(pipe, select.POLLIN)
    while len(content) < most:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            return bytes(content), False
        piece = os.read(pipe, min(_PIECE, most - len(content)))
        if not piece:
            break
        content += piece
    return bytes(content), True


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
