"""One line says how figures came about, and one name keeps each kind of result."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from kgshard.errors import ConfigError
from kgshard.ranking.protocol import EvaluationSettings, Protocol, protocol_line

FULL = Protocol(
    split="test",
    triples=20_466,
    queries=40_932,
    candidates=14_541,
    filtered=True,
    filter=["train", "valid", "test"],
    ties="realistic",
    sides=["head", "tail"],
    head_queries="inverse relations",
    step=1520,
    checkpoint="step-00001520",
    model="complex, dim 200",
    unseen=28,
)


def line(**changes: object) -> str:
    return msgspec.structs.replace(FULL, **changes).line()


def test_the_line_says_everything_that_two_figures_must_share() -> None:
    assert FULL.line() == (
        "test: all 20,466 triples, 40,932 queries among all 14,541 entities; filtered by train+valid+test; "
        "realistic ranks; heads and tails asked; heads by inverse relations; 28 triples with an entity "
        "unseen in train kept; complex, dim 200; step-00001520; step 1520"
    )
    assert protocol_line(msgspec.to_builtins(FULL)) == FULL.line()


def test_what_differs_is_said() -> None:
    assert "filtered by nothing" in line(filtered=False, filter=[])
    assert "pessimistic ranks" in line(ties="pessimistic")
    assert "; tails asked; 28" in line(sides=["tail"])  # nothing about heads' queries
    assert "; heads asked; heads by" in line(sides=["head"])


def test_an_estimate_is_called_one() -> None:
    said = line(triples=1000, queries=2000, split_triples=20_466, seed=7)
    assert said.startswith(
        "test: ESTIMATE from 1,000 of 20,466 triples, seed 7, 2,000 queries among all 14,541"
    )
    assert "ESTIMATE" not in FULL.line()


def test_a_protocol_of_an_older_result_has_a_line_too() -> None:
    newer = ("checkpoint", "model", "unseen", "split_triples", "seed")
    older = {name: value for name, value in msgspec.to_builtins(FULL).items() if name not in newer}
    assert protocol_line(older).endswith("; step 1520")


@pytest.mark.parametrize(
    ("changes", "is_estimate", "name"),
    [
        ({}, False, "test-full-filtered.json"),
        ({}, True, "test-sample-filtered.json"),
        ({"split": "valid", "filtered": False}, False, "valid-full-raw.json"),
        ({"sides": "tail"}, False, "test-full-filtered-tail.json"),
        ({"sides": "head", "filtered": False}, True, "test-sample-raw-head.json"),
        ({"ties": "optimistic"}, False, "test-full-filtered-optimistic.json"),
    ],
)
def test_results_that_differ_in_kind_have_names_of_their_own(
    changes: dict[str, object], is_estimate: bool, name: str
) -> None:
    settings = replace(EvaluationSettings(), **changes)  # type: ignore[arg-type]
    assert settings.file_name(is_estimate=is_estimate) == name


def test_a_checkpoint_asked_for_by_name_has_results_of_its_own() -> None:
    name = EvaluationSettings(sides="tail").file_name(is_estimate=False, checkpoint="latest")
    assert name == "test-full-filtered-tail-latest.json"


def test_a_seed_without_a_sample_has_no_effect_and_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seed has no effect here: it fixes what --sample draws"):
        EvaluationSettings(seed=7)


def test_only_a_test_figure_is_filtered_by_test() -> None:
    filters = {split: EvaluationSettings(split=split).filters for split in ("train", "valid", "test")}
    assert filters == {
        "train": ("train", "valid"),
        "valid": ("train", "valid"),
        "test": ("train", "valid", "test"),
    }
    assert EvaluationSettings(filtered=False).filters == ()
