"""Tables in mapped files train as tables in memory do, to the bit, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from shutil import disk_usage
from typing import Any

import pytest
import torch
from graphs import Triple, write_graph

import kgshard.api
from kgshard.config import TrainConfig
from kgshard.errors import ConfigError
from kgshard.exchange import SingleExchange
from kgshard.mapped import check_room, mapped_zeros
from kgshard.optim import OPTIMIZERS
from kgshard.runs import open_run
from kgshard.training.assemble import build_trainer


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    triples: list[Triple] = [(f"e{i}", "next", f"e{(i + 1) % 40}") for i in range(40)]
    return write_graph(tmp_path_factory.mktemp("graph"), triples, triples[:4], triples[:4])


def hashes(graph: Path, out: Path, nproc: int, **settings: Any) -> dict[str, str]:
    """Train; return the SHA-256 of every file of the checkpoint."""
    settings = {"dim": 8, "epochs": 2, "batch_size": 16, "negatives": 8, "device": "cpu", **settings}
    config = TrainConfig(**settings)
    kgshard.api.train_config(graph, out, config, nproc, quiet=True)
    files = open_run(out).open_checkpoint("latest").manifest.files
    return {name: file.sha256 for name, file in files.items()}


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "adam-rowstep"}, {"dtype": "bfloat16"}, {"eval_every": 1}],
    ids=["moments and steps", "bfloat16", "evaluated"],
)
def test_mapped_tables_give_the_same_checkpoint(
    graph: Path, tmp_path: Path, nproc: int, settings: dict[str, Any]
) -> None:
    found = [
        hashes(graph, tmp_path / storage, nproc, table_storage=storage, **settings)
        for storage in ("ram", "mmap")
    ]
    assert found[0] == found[1]
    left = {path.name for path in (tmp_path / "mmap").iterdir()} - {
        p.name for p in (tmp_path / "ram").iterdir()
    }
    assert left == set()


def test_a_mapped_table_has_no_name_and_has_its_room_from_the_start(tmp_path: Path) -> None:
    before = disk_usage(tmp_path).free
    table = mapped_zeros(tmp_path, (1 << 20, 256), torch.float32)
    assert list(tmp_path.iterdir()) == []
    assert before - disk_usage(tmp_path).free > 1 << 29  # Of 1 GiB, for others write and remove files too.
    table[1 << 19] = 3
    assert table[[0, 1 << 19, -1], 5].tolist() == [0, 3, 0]


def test_state_of_every_optimizer_is_mapped(tmp_path: Path) -> None:
    made: list[tuple[int, ...]] = []

    def make(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(tuple(shape))
        return mapped_zeros(tmp_path, shape, dtype)

    for kind in OPTIMIZERS.values():
        made.clear()
        state = kind(torch.zeros(5, 3), lr=0.1, make_zeros=make).state()
        assert sorted(made) == sorted(tuple(value.shape) for value in state.values())


def test_a_disk_without_room_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    words = r"^--table-storage mmap: rows and optimizer state take 1000000\.0 GB, but the disk of .* GB free"
    with pytest.raises(ConfigError, match=words):
        check_room(tmp_path, 10**15)


def test_a_training_that_cannot_have_room_is_refused_before_it_begins(tmp_path: Path) -> None:
    config = TrainConfig(dim=1 << 40, table_storage="mmap", device="cpu")
    model = config.link_model(num_entities=40, num_relations=1)
    with pytest.raises(ConfigError, match=r"rows and optimizer state take 351843\.7 GB, but the disk of"):
        build_trainer(SingleExchange(), model, config, num_updates=1, folder=tmp_path)


def test_an_empty_table_can_be_mapped(tmp_path: Path) -> None:
    assert mapped_zeros(tmp_path, (0, 4), torch.float32).shape == (0, 4)
