"""Initial rows and seeds: keyed by what they are for, never by who draws them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kgshard.initialise import BLOCK_ROWS, fill_initial_rows, initial_shared
from kgshard.models import find_scoring
from kgshard.models.scoring import Columns, Init, SharedInit
from kgshard.partition import RowPartition
from kgshard.seeds import generator

NORMAL = Init("normal", 0.01)
NUM_ROWS = 2 * BLOCK_ROWS + 5


def drawn(
    rows: range, init: Init | Columns = NORMAL, *, seed: int = 1, table: str = "entity", dim: int = 2
) -> torch.Tensor:
    weight = torch.full((len(rows), dim), torch.nan)
    fill_initial_rows(weight, init, seed=seed, table=table, rows=rows)
    return weight


WHOLE = drawn(range(NUM_ROWS))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_rows_are_the_same_bits_at_any_world_size(world_size: int) -> None:
    partition = RowPartition(NUM_ROWS, world_size)
    parts = [drawn(partition.rows_of(rank)) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), WHOLE)


@settings(deadline=None, max_examples=60)
@given(st.tuples(st.integers(0, NUM_ROWS), st.integers(0, NUM_ROWS)).map(sorted))
def test_any_range_is_a_slice_of_the_whole(ends: list[int]) -> None:
    start, stop = ends
    assert torch.equal(drawn(range(start, stop)), WHOLE[start:stop])


@pytest.mark.parametrize("start", [BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1])
@pytest.mark.parametrize("length", [0, 1, 2, BLOCK_ROWS])
def test_ranges_at_the_edge_of_a_block(start: int, length: int) -> None:
    assert torch.equal(drawn(range(start, start + length)), WHOLE[start : start + length])


def test_a_taller_table_begins_with_the_same_rows() -> None:
    assert torch.equal(drawn(range(3 * BLOCK_ROWS))[:NUM_ROWS], WHOLE)


def test_rows_far_into_a_table_do_not_cost_the_rows_before() -> None:
    far = 10**12
    assert not torch.equal(drawn(range(far, far + 2)), WHOLE[:2])


def test_distinct_rows_are_distinct() -> None:
    assert len({tuple(row) for row in drawn(range(NUM_ROWS), dim=4).tolist()}) == NUM_ROWS


@pytest.mark.parametrize("changed", [{"seed": 2}, {"table": "relation"}])
def test_another_seed_or_table_starts_elsewhere(changed: dict[str, object]) -> None:
    other = drawn(range(NUM_ROWS), **changed)  # type: ignore[arg-type]
    assert float((other == WHOLE).double().mean()) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([other.flatten(), WHOLE.flatten()]))[0, 1])) < 0.05


def test_normal_rows_have_the_asked_spread() -> None:
    assert abs(float(WHOLE.mean())) < 4e-4
    assert float(WHOLE.std()) == pytest.approx(0.01, rel=0.03)
    # 68.27 % of a normal distribution is within one standard deviation, 57.7 % of a uniform one.
    assert float((WHOLE.abs() < 0.01).double().mean()) == pytest.approx(0.6827, abs=0.015)


def test_uniform_rows_fill_their_interval() -> None:
    rows = drawn(range(NUM_ROWS), Init("uniform", 0.25))
    assert -0.25 <= float(rows.min()) < -0.249
    assert 0.249 < float(rows.max()) <= 0.25
    assert abs(float(rows.mean())) < 0.005
    assert float(rows.std()) == pytest.approx(0.25 / 3**0.5, rel=0.02)


def test_bfloat16_rows_are_the_float32_rows_rounded() -> None:
    weight = torch.empty(7, 2, dtype=torch.bfloat16)
    fill_initial_rows(weight, NORMAL, seed=1, table="entity", rows=range(3, 10))
    assert torch.equal(weight, WHOLE[3:10].bfloat16())


COLUMNS: Columns = (
    (2, Init("normal", 0.01)),
    (1, Init("uniform", 0.0, center=1.0)),
    (3, Init("uniform", 0.5, center=-2.0)),
    (1, Init("normal", 0.0)),
)


def test_columns_start_each_in_their_own_way() -> None:
    rows = drawn(range(NUM_ROWS), COLUMNS, dim=7)
    assert float(rows[:, :2].std()) == pytest.approx(0.01, rel=0.03)
    assert set(rows[:, 2].tolist()) == {1.0}
    assert -2.5 <= float(rows[:, 3:6].min()) < -2.499
    assert -1.501 < float(rows[:, 3:6].max()) <= -1.5
    assert float(rows[:, 3:6].mean()) == pytest.approx(-2, abs=0.01)
    assert set(rows[:, 6].tolist()) == {0.0}
    assert len({tuple(row) for row in rows.tolist()}) == NUM_ROWS


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_rows_of_columns_are_the_same_bits_at_any_world_size(world_size: int) -> None:
    partition = RowPartition(NUM_ROWS, world_size)
    parts = [drawn(partition.rows_of(rank), COLUMNS, dim=7) for rank in range(world_size)]
    assert torch.equal(torch.cat(parts), drawn(range(NUM_ROWS), COLUMNS, dim=7))


def test_one_column_for_all_is_no_columns() -> None:
    assert torch.equal(drawn(range(NUM_ROWS), ((2, NORMAL),)), WHOLE)


@pytest.mark.parametrize("dim", [6, 8])
def test_columns_that_do_not_fill_the_row_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"do not add up to {dim} floats"):
        drawn(range(3), COLUMNS, dim=dim)


def test_shared_parameters_start_as_asked_and_each_by_its_name() -> None:
    square = SharedInit((50, 40), Init("uniform", 0.25))
    asked = {"core": square, "other": square, "gain": SharedInit((7,), Init("uniform", 0.0, center=1.0))}
    values = initial_shared(asked, seed=3)
    assert list(values) == list(asked)
    assert {value.dtype for value in values.values()} == {torch.float32}
    assert values["core"].shape == (50, 40)
    assert float(values["core"].abs().max()) == pytest.approx(0.25, rel=0.01)
    assert values["gain"].tolist() == [1.0] * 7
    assert not torch.equal(values["core"], values["other"])
    assert torch.equal(values["core"], initial_shared({"core": square}, seed=3)["core"])
    assert not torch.equal(values["core"], initial_shared({"core": square}, seed=4)["core"])


def test_shared_parameters_are_no_rows_of_a_table() -> None:
    init = Init("normal", 0.01)
    shared = initial_shared({"entity": SharedInit((4, 2), init)}, seed=1)["entity"]
    assert not torch.equal(shared, drawn(range(4), init))


def test_a_model_that_shares_nothing_starts_with_nothing() -> None:
    assert initial_shared(find_scoring("complex").shared_init(8), seed=1) == {}
    conve = initial_shared(find_scoring("conve").shared_init(24), seed=1)
    assert list(conve) == ["filters", "filter_bias", "projection", "gain", "bias"]
    assert conve["gain"].tolist() == [1.0] * 24
    assert conve["bias"].tolist() == [0.0] * 24


Key = tuple[int, str, *tuple[int, ...]]


def numbers(*key: *Key) -> list[int]:
    return [int(number) for number in generator(*key).integers(2**62, size=4)]


def test_equal_keys_draw_equal_numbers() -> None:
    assert numbers(3, "shuffle", 4) == numbers(3, "shuffle", 4)


def test_every_part_of_a_key_matters() -> None:
    keys: list[Key] = [(s, p, i) for s in (0, 1, 2**70) for p in ("shuffle", "negatives") for i in (0, 1, 12)]
    keys += [(0, "shuffle"), (0, "shuffle", 1, 2), (1, "shuffle", 2, 0), (0, "shuffle", 0, 0)]
    drawn_numbers = [tuple(numbers(*key)) for key in keys]
    assert len(set(drawn_numbers)) == len(drawn_numbers)


def test_a_draw_is_untouched_by_numpys_global_state() -> None:
    before = numbers(0, "shuffle", 0)
    np.random.seed(123)
    assert numbers(0, "shuffle", 0) == before


def test_a_few_wide_rows_cost_what_they_hold() -> None:
    """One relation of RESCAL at dim 1000 has a million floats; four thousand of them would be 16 GB."""
    wide = torch.empty(1, 1_000_000)
    fill_initial_rows(wide, Init("normal", 1.0), seed=1, table="relation", rows=range(1))
    assert abs(float(wide.std()) - 1) < 0.01
