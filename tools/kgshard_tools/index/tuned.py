"""An index whose search can be turned: less of it is looked through, and the recall is known."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgshard.shards import StoredTable
from kgshard_tools.index.contents import Contents
from kgshard_tools.index.kinds import Kind, Search
from kgshard_tools.search import CandidateSource


@dataclass(frozen=True, slots=True)
class IndexPartFile:
    """A file of an index, and the rows of the table in it."""

    path: Path
    rows: range


class TunedIndex(CandidateSource):
    """Candidates from an index that was opened."""

    num_lists = 0
    """Of the largest part; 0 where there are none."""

    def __init__(
        self,
        files: Sequence[IndexPartFile],
        contents: Contents,
        kind: Kind,
        table: StoredTable,
        search: Search,
        *,
        longest: float,
        recall: dict[str, float] | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        """Open the files of an index of `table`.

        Raises:
            ShardError: One cannot be read, or they are of another size than the table.
        """
        super().__init__(table, contents.metric, contents.lift, labels=labels)
        self.files, self.kind, self.search = files, kind, search
        self.is_exact = kind.is_exact
        self._longest, self._recall = longest, recall
        self.open_files()

    @abstractmethod
    def open_files(self) -> None:
        """Open `files`; see `__init__`."""

    def described(self) -> dict[str, object]:
        found: dict[str, object] = {"index": self.kind.name, self.kind.parameter: self.search.setting}
        return found | ({"recall@10": self._recall} if self._recall else {})

    def first_count(self, k: int) -> int:
        return k * self.search.depth
