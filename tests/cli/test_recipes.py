"""A recipe is where settings begin; options of their own end it."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import write_graph
from kgshard_tools.cli import run

from kgshard.config import TrainConfig, read_settings
from kgshard.runs import open_run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
GRAPH = [(f"e{i}", "next", f"e{(i + 1) % 8}") for i in range(8)]


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_every_recipe_is_one(path: Path) -> None:
    settings = TrainConfig.from_dict(read_settings(path))
    assert settings.eval_every > 0  # The best checkpoint is what quality figures are of.


def test_what_a_recipe_says_can_be_turned_off(tmp_path: Path, here: None) -> None:
    graph, recipe = write_graph(tmp_path / "graph", GRAPH), tmp_path / "recipe.toml"
    recipe.write_text("n3 = 0.1\ndim = 8\nepochs = 1\n")
    call = ["train", str(graph), "-o", str(tmp_path / "run"), "-q", "--config", str(recipe)]
    assert run([*call, "--model", "transe"]) == 2
    assert run([*call, "--model", "transe", "--n3", "0", "--set", "dim=4"]) == 0
    config = open_run(tmp_path / "run").info.config
    assert (config["model"], config["n3"], config["dim"], config["epochs"]) == ("transe", 0.0, 4, 1)
