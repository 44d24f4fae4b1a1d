"""The model card, and the folder that a Hugging Face hub takes as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from graphs import ENTITIES, RELATIONS, make_run, ring, save_tables, tree
from kgshard_tools.card import model_card
from kgshard_tools.commands.card import command
from kgshard_tools.export import export
from kgshard_tools.merge import merge_shards
from kgshard_tools.stored import open_stored
from safetensors.numpy import load_file

import kgshard
from kgshard.runs import Run


@pytest.fixture
def run(tmp_path: Path, here: None) -> Run:
    """A run that was evaluated on its test split."""
    run = make_run(tmp_path, ring(30, 2), [], [("e0", "r0", "e7"), ("e1", "r1", "e9")], dim=4, world_size=2)
    kgshard.evaluate(run.folder, split="test")
    return run


def test_the_hub_reads_the_figures_of_the_test_split(run: Run) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="an extra: pip install 'kgshard[interop]'")
    figures = kgshard.evaluate(run.folder, split="test")["metrics"]
    data = hub.ModelCard(model_card(open_stored(run.folder), license="cc-by-4.0")).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("kgshard", "graph-ml", "cc-by-4.0")
    assert {"link-prediction", "complex"} <= set(data.tags)
    found = {result.metric_type: result.metric_value for result in data.eval_results}
    assert found == {
        name: pytest.approx(figures[name], abs=1e-6) for name in ("mrr", "hits@1", "hits@3", "hits@10")
    }
    assert {result.dataset_split for result in data.eval_results} == {"test"}
    assert {result.task_type for result in data.eval_results} == {"graph-ml"}


def test_torch_loads_the_folder_by_the_hubs_own_loader(run: Run, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="an extra: pip install 'kgshard[interop]'")
    from torch import nn

    for folder in (tmp_path / "hf", tmp_path / "merged"):
        if folder.name == "hf":
            export(run.folder, "hf", folder)
        else:
            merge_shards(run.folder, folder, max_file_size="100")
        model = nn.Module()
        model.entity_embedding = nn.Embedding(30, 4)
        model.relation_embedding = nn.Embedding(4, 4)
        result = hub.load_torch_model(model, folder)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        stored = run.checkpoint.entities.read(range(30))
        np.testing.assert_array_equal(model.entity_embedding.weight.detach().numpy(), stored)


def test_the_folder_holds_the_merged_tables_and_the_card(run: Run, tmp_path: Path) -> None:
    export(run.folder, "hf", tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    np.testing.assert_array_equal(tensors[ENTITIES], run.checkpoint.entities.read(range(30)))
    np.testing.assert_array_equal(tensors[RELATIONS], run.checkpoint.relations.read(range(4)))
    card = (tmp_path / "hf" / "README.md").read_text()
    assert card == model_card(open_stored(run.folder))
    assert "filtered by train+valid+test" in card
    assert "realistic ranks" in card


def test_the_cards_lines_of_python_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (None, "100"):
        merge_shards(run.folder, tmp_path / "m", max_file_size=size)
        monkeypatch.chdir(tmp_path / "m")
        code = (tmp_path / "m" / "README.md").read_text().split("```python\n")[1].split("```")[0]
        names: dict[str, object] = {}
        exec(code, names)
        assert names["labels"] == list(run.dataset.entities)
        assert set(names["tables"]) == {ENTITIES, RELATIONS}  # type: ignore[call-overload]


def test_figures_of_another_checkpoint_are_not_this_ones(run: Run) -> None:
    save_tables(run, np.ones((30, 4)), np.ones((4, 4)), step=2)
    card = model_card(open_stored(run.folder))
    assert "model-index" not in card
    assert "was not evaluated" in card


def test_names_from_data_are_text_wherever_they_stand(tmp_path: Path) -> None:
    name = 'x"\n---\n<script>`|` [a](javascript:b)'
    run = make_run(tmp_path / name.replace("/", "_"), ring(5), dim=2)
    (run.folder / "run.json").write_text(
        (run.folder / "run.json")
        .read_text()
        .replace('"data": "source"', '"data": "<img src=x> `|`\\n---\\n# a"')
    )
    lines = model_card(open_stored(run.folder)).split("\n")
    assert lines.count("---") == 2
    assert not any(line.startswith("# a") for line in lines)
    assert lines[lines.index("---", 1) + 2] == r"# complex embeddings of `<img src=x> '\|'\n---\n# a`"


def test_a_card_goes_to_stdout_or_to_a_file_that_is_a_card(run: Run, tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(run.folder)])
    assert done.output == model_card(open_stored(run.folder))
    out = tmp_path / "README.md"
    for _ in range(2):
        assert CliRunner().invoke(command, [str(run.folder), "-o", str(out)]).exit_code == 0
    assert out.read_text() == done.output
    out.write_text("# Mine\n")
    before = tree(tmp_path)
    refused = CliRunner().invoke(command, [str(run.folder), "-o", str(out)])
    assert "not a card" in str(refused.exception)
    assert tree(tmp_path) == before


def test_figures_of_a_named_checkpoint_are_that_checkpoints(run: Run) -> None:
    save_tables(run, np.random.default_rng(1).standard_normal((30, 4)), np.ones((4, 4)), step=2)
    kgshard.evaluate(run.folder, split="test", checkpoint="step-00000002")
    (run.folder / "eval" / "test-full-filtered.json").unlink()
    assert "filtered MRR" in model_card(open_stored(run.folder / "checkpoints" / "step-00000002"))


@pytest.mark.parametrize(
    "text", ["{}", "[]", "nonsense", '{"protocol": {}, "metrics": {}}', '{"metrics": 1}']
)
def test_figures_that_cannot_be_read_are_none(run: Run, text: str) -> None:
    (run.folder / "eval" / "test-full-filtered.json").write_text(text)
    assert "was not evaluated" in model_card(open_stored(run.folder))


def test_a_name_beyond_16_bits_is_read_back_whole(run: Run) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="an extra: pip install 'kgshard[interop]'")
    record = run.folder / "run.json"
    record.write_text(record.read_text().replace('"data": "source"', '"data": "kg 😀 é"'))
    results = hub.ModelCard(model_card(open_stored(run.folder))).data.eval_results
    assert {result.dataset_name for result in results} == {"kg 😀 é"}


def test_a_rounded_model_says_that_its_figures_are_of_another_dtype(run: Run, tmp_path: Path) -> None:
    merge_shards(run.folder, tmp_path / "m", dtype="bfloat16")
    assert (
        "bfloat16 in these files, float32 where it was evaluated"
        in (tmp_path / "m" / "README.md").read_text()
    )
    assert "where it was evaluated" not in model_card(open_stored(run.folder))
