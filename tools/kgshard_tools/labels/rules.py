"""What of a label counts when it is looked for, and how far apart two texts are."""

from __future__ import annotations

import re
import unicodedata

KEY_LENGTH = 1000
"""Characters of a folded label that are indexed; exact and prefix matches are checked on all of it."""
WORD_LENGTH = 64
"""Characters of a word that count."""
MOST_WORDS = 32
"""Words of a text that count."""
LONGEST_FUZZY = 64
"""Characters of a folded text that is looked for with its typing errors."""

# Accents of Latin, Greek and Cyrillic. Marks of other scripts are vowels, and stay.
_ACCENTS = re.compile("[\u0300-\u036f]+")
# What is no ASCII letter or digit, no white space and no general punctuation; emoji are words.
_WORD = re.compile(
    "[^\x00-/:-@\\[-`{-\x7f\\s\u0080-\u00bf\u2000-\u206f\u3000-\u303f\uff00-\uff0f\uff1a-\uff20\ufeff]+"
)


def is_text(text: str) -> bool:
    """Whether a string is Unicode text: bytes of an argument that are not UTF-8 arrive as lone surrogates."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def fold(text: str) -> str:
    """Return what is compared: case, accents and the way they are encoded do not count.

    Example:
        >>> fold("S\u00e3o Paulo") == fold("SA\u0303O PAULO") == fold("sao paulo")
        True
    """
    if text.isascii():
        return text.lower()
    # Twice: case folding may compose anew what the first decomposition took apart.
    whole = unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())
    return _ACCENTS.sub("", whole) or whole


def words_of(folded: str) -> list[str]:
    """Return the words of a folded text, as far as they count.

    Example:
        >>> words_of("berlin (state of germany)")
        ['berlin', 'state', 'of', 'germany']
    """
    return [word[:WORD_LENGTH] for word in _WORD.findall(folded[:KEY_LENGTH])]


def wanted_words(folded: str) -> list[str]:
    """Return the words that a label must have: the first distinct ones of a folded text."""
    return list(dict.fromkeys(words_of(folded)))[:MOST_WORDS]


def has_words(folded: str, wanted: list[str]) -> bool:
    """Whether every wanted word begins a word of a folded label."""
    words = words_of(folded)
    return all(any(word.startswith(begin) for word in words) for begin in wanted)


def allowed_edits(length: int) -> int:
    """Return how many typing errors a folded text of some length may have: 0 below 3 characters, 1 below 7.

    Then every label within that many edits shares a padded trigram with the text; see `grams`.
    """
    if not 3 <= length <= LONGEST_FUZZY:
        return 0
    return 1 if length < 7 else 2


class EditDistance:
    """How many edits a text is away from others: optimal string alignment.

    An edit inserts, deletes or replaces a character, or swaps two neighbours. Bit i of a vector stands for
    the first i + 1 characters of the text, so that a column of the table of distances takes a few operations
    (Hyyrö, A bit-vector algorithm for computing Levenshtein and Damerau edit distances, 2003).

    Example:
        >>> from_brelin = EditDistance("brelin", limit=2)
        >>> from_brelin("berlin"), from_brelin("dublin")
        (1, 3)
    """

    def __init__(self, text: str, limit: int) -> None:
        """Prepare for comparisons with `text`; of more than `limit` edits nobody wants to know the number."""
        self._length = len(text)
        self._limit = limit
        self._places: dict[str, int] = {}
        for place, char in enumerate(text):
            self._places[char] = self._places.get(char, 0) | 1 << place

    def __call__(self, other: str) -> int:
        """Return the edits between the text and another, or limit + 1 where there are more."""
        if abs(len(other) - self._length) > self._limit:
            return self._limit + 1
        if not self._length:
            return len(other)
        everything = (1 << self._length) - 1
        last = everything ^ everything >> 1
        down, up = everything, 0  # where the distance is one more, one less, than a character before
        same_before, before = 0, 0
        distance = self._length
        for column, char in enumerate(other, start=1):
            here = self._places.get(char, 0)
            swapped = ((~same_before & here) << 1) & before
            same = (((here & down) + down) ^ down) | here | up | swapped
            right = up | ~(same | down)
            left = same & down
            distance += bool(right & last) - bool(left & last)
            if distance - (len(other) - column) > self._limit:
                return self._limit + 1
            right, left = right << 1 | 1, left << 1
            down, up = (left | ~(same | right)) & everything, right & same & everything
            same_before, before = same, here
        return distance
