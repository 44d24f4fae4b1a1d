"""Many texts in one buffer, with room between them, without a Python object for each.

Shape letters: B texts, C characters (bytes) of all of them together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]


def spread(texts: pa.Array, *, before: int = 0, after: int = 0) -> tuple[Bytes, Places]:
    """Copy texts into one buffer, each with some bytes before and after it that are not set yet.

    Args:
        texts: B strings, none missing.
        before: How many bytes to leave before each.
        after: How many bytes to leave behind each.

    Returns:
        uint8[C + B (before + after)], and int64[B]: where the bytes before each text begin.

    Example:
        >>> buffer, places = spread(pa.array(["ab", "", "c"]), after=1)
        >>> buffer[places + [2, 0, 1]] = ord(";")
        >>> bytes(buffer), places.tolist()
        (b'ab;;c;', [0, 3, 4])
    """
    array = texts.cast(pa.large_string())
    _, offset_buffer, character_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1]
    characters = np.frombuffer(character_buffer or b"", np.uint8)[offsets[0] : offsets[-1]]
    room = before + after
    buffer = np.empty(len(characters) + room * len(array), np.uint8)
    places = offsets[:-1] - offsets[0] + room * np.arange(len(array))
    ends = offsets[1:] - offsets[0] + room * np.arange(len(array)) + before
    is_character = np.ones(len(buffer), bool)
    is_character[places[:, None] + np.arange(before)] = False
    is_character[ends[:, None] + np.arange(after)] = False
    buffer[is_character] = characters
    return buffer, places
