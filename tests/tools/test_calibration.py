"""Probabilities: fits against brute force and known links, what they are fitted to, and what is kept."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from brute_force import BruteForce, random_graph
from graphs import Triple, make_run, ring, save_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from kgshard_tools.answers import load
from kgshard_tools.calibration import calibrated, calibration, pairs, pooled
from kgshard_tools.calibration.isotonic import pool_violators
from kgshard_tools.calibration.logistic import Lines, Normals, Points, fit_given, fit_lines, probability
from kgshard_tools.calibration.pairs import Pairs, collect
from kgshard_tools.export import export
from kgshard_tools.questions import Question, Wanted
from kgshard_tools.stored import Stored, open_stored

from kgshard.errors import ConfigError, DataError, NonFiniteError
from kgshard.files import check_seal, matches_any
from kgshard.models.link import SIDES, Side
from kgshard.runs import RUN_NAMES
from kgshard.vocabulary import label_hash

Doubles = npt.NDArray[np.float64]


def best_rising(outcomes: Doubles, weights: Doubles) -> Doubles:
    """Return the best non-decreasing fit to outcomes in order: of all ways to cut them into runs."""
    best: tuple[float, Doubles] | None = None
    places = range(1, len(outcomes))
    for count in range(len(outcomes)):
        for cuts in itertools.combinations(places, count):
            edges = [0, *cuts, len(outcomes)]
            parts = [slice(a, b) for a, b in itertools.pairwise(edges)]
            means = [float(np.average(outcomes[part], weights=weights[part])) for part in parts]
            if means == sorted(means):
                fit = np.repeat(means, [part.stop - part.start for part in parts])
                cost = float((weights * (outcomes - fit) ** 2).sum())
                if best is None or cost < best[0] - 1e-12:
                    best = cost, fit
    assert best is not None
    return best[1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=7), st.randoms())
def test_pools_are_the_best_rising_fit(drawn: list[tuple[bool, int]], random: Random) -> None:
    outcomes, weights = (np.array(column, np.float64) for column in zip(*drawn, strict=True))
    scores = np.arange(len(drawn), dtype=np.float64)
    order = list(range(len(drawn)))
    random.shuffle(order)
    pools = pool_violators(scores[order], outcomes[order], weights[order])
    expected = best_rising(outcomes, weights)
    distinct, starts = np.unique(expected, return_index=True)
    np.testing.assert_allclose(pools.true / pools.total, distinct, atol=1e-12)
    np.testing.assert_allclose(pools.total, np.add.reduceat(weights, np.sort(starts)))
    np.testing.assert_allclose(pools.scores, np.add.reduceat(weights * scores, np.sort(starts)) / pools.total)


def test_equal_scores_get_one_value() -> None:
    pools = pool_violators(np.array([1.0, 1.0, 2.0]), np.array([0.0, 1.0, 1.0]), np.ones(3))
    assert (pools.true / pools.total).tolist() == [0.5, 1.0]


def test_no_pool_is_certain_and_their_order_stays() -> None:
    pools = pool_violators(np.arange(6.0), np.array([0.0, 0, 1, 1, 1, 1]), np.array([1e6, 1, 1, 1, 1, 9]))
    odds = pools.log_odds()
    assert np.isfinite(odds).all()
    assert (np.diff(odds) >= 0).all()
    assert probability(odds)[-1] == pytest.approx(12.5 / 13)
    assert probability(odds)[0] == pytest.approx(0.5 / (1e6 + 2))


def cost_of(points: Points, normals: Normals, group: int, line: tuple[float, float]) -> float:
    """Return minus the log posterior of one group's line, pair by pair."""
    cost = 0.0
    for each in range(len(points.values)):
        if points.groups[each] == group:
            p = 1 / (1 + np.exp(-(line[0] * points.values[each] + line[1])))
            y = points.outcomes[each]
            cost -= points.weights[each] * (y * np.log(p) + (1 - y) * np.log(1 - p))
    for value, mean, variance in zip(line, normals.means, normals.variances, strict=True):
        cost += (value - mean) ** 2 / (2 * variance)
    return float(cost)


def drawn_points(seed: int, slopes: Doubles, intercepts: Doubles, sizes: list[int]) -> Points:
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    values = random.normal(0, 2, len(groups))
    chance = 1 / (1 + np.exp(-(slopes[groups] * values + intercepts[groups])))
    outcomes = (random.random(len(groups)) < chance).astype(np.float64)
    return Points(groups, values, outcomes, np.ones(len(groups)), len(sizes))


def test_a_line_is_the_most_probable_one() -> None:
    """No neighbour of it costs less; the third group falls, and its slope is held at 0."""
    points = drawn_points(1, np.array([1.0, 0.3, -1.5]), np.array([-1.0, 2.0, 0.5]), [60, 9, 80])
    points = replace(points, weights=np.random.default_rng(2).uniform(0.5, 3, len(points.values)))
    normals = Normals(np.array([0.8, -0.2]), np.array([0.1, 2.0]))
    lines = fit_given(points, normals, Lines(np.ones(3), np.zeros(3)))
    assert lines.slopes[2] == 0
    for group in range(3):
        found = float(lines.slopes[group]), float(lines.intercepts[group])
        least = cost_of(points, normals, group, found)
        for step in (1e-3, 1e-2):
            for change in ((step, 0), (-step, 0), (0, step), (0, -step), (step, -step)):
                near = found[0] + change[0], found[1] + change[1]
                assert near[0] < 0 or cost_of(points, normals, group, near) > least


def test_newton_ends_at_the_optimum_from_far_away() -> None:
    points = drawn_points(3, np.array([4.0, 0.2]), np.array([-9.0, 4.0]), [400, 300])
    normals = Normals(np.array([1.0, 0.0]), np.array([100.0, 100.0]))
    near = fit_given(points, normals, Lines(np.array([3.0, 0.3]), np.array([-7.0, 3.0])))
    far = fit_given(points, normals, Lines(np.array([0.0, 50.0]), np.array([40.0, -40.0])))
    np.testing.assert_allclose([far.slopes, far.intercepts], [near.slopes, near.intercepts], atol=1e-6)


def test_known_lines_are_recovered() -> None:
    random = np.random.default_rng(4)
    slopes, intercepts = abs(random.normal(1, 0.2, 30)), random.normal(-1, 1.5, 30)
    lines, normals = fit_lines(drawn_points(5, slopes, intercepts, [3000] * 30))
    assert abs(lines.slopes - slopes).mean() < 0.05
    assert abs(lines.intercepts - intercepts).mean() < 0.1
    np.testing.assert_allclose(normals.means, [slopes.mean(), intercepts.mean()], atol=0.05)
    np.testing.assert_allclose(normals.variances**0.5, [slopes.std(), intercepts.std()], rtol=0.25)


def test_how_much_small_groups_differ_is_not_lost() -> None:
    """Each group is uncertain, and drawn to the mean: that must not pass for being alike."""
    random = np.random.default_rng(12)
    slopes, intercepts = abs(random.normal(1, 0.5, 300)), random.normal(0, 1, 300)
    _, normals = fit_lines(drawn_points(13, slopes, intercepts, [25] * 300))
    np.testing.assert_allclose(normals.variances**0.5, [slopes.std(), intercepts.std()], rtol=0.2)


def test_a_group_of_few_outcomes_is_like_the_others() -> None:
    random = np.random.default_rng(6)
    intercepts = np.append(random.normal(-1, 0.1, 20), 3.0)
    lines, normals = fit_lines(drawn_points(7, np.ones(21), intercepts, [1000] * 20 + [4]))
    assert abs(lines.intercepts[20] - normals.means[1]) < 0.5
    points = drawn_points(7, np.ones(21), intercepts, [1000] * 20 + [4])
    points = replace(points, outcomes=np.where(points.groups == 20, 0, points.outcomes))
    lines, normals = fit_lines(points)
    assert (lines.slopes[20], lines.intercepts[20]) == tuple(normals.means)


def test_binned_points_have_the_same_sums() -> None:
    points = drawn_points(8, np.ones(3), np.zeros(3), [500, 0, 400])
    binned = points.binned()
    assert len(binned.values) < len(points.values) / 2
    for one, other in (
        (points.sums(points.weights), binned.sums(binned.weights)),
        (points.sums(points.values), binned.sums(binned.weights * binned.values)),
        (points.sums(points.outcomes), binned.sums(binned.weights * binned.outcomes)),
    ):
        np.testing.assert_allclose(one, other)


def test_probabilities_of_the_same_are_pooled_by_their_log_odds() -> None:
    found = pooled([np.array([0.2, 0.5, 0.0, 1.0]), np.array([0.8, 0.5, 0.0, 1.0])])
    np.testing.assert_allclose(found[:2], 0.5)
    assert 0 <= found[2] < 1e-300
    assert 1 - 1e-15 < found[3] <= 1
    assert pooled([np.array([0.9]), np.array([0.5])])[0] == pytest.approx(0.75)  # odds of 9 and of 1: of 3


GRAPH = random_graph(7, 80, 3)
GRAPH["valid"] += [(f"e{i % 12}", f"r{i % 3}", f"e{(7 * i + 3) % 80}") for i in range(160)]


@pytest.mark.parametrize(
    ("model", "dim"),
    [("complex", 8), ("transe", 8), ("transe-l1", 8), ("transh", 8), ("rotate-moduli", 8), ("mure", 10)],
)
@pytest.mark.parametrize("side", SIDES)
def test_pairs_are_the_answers_to_the_questions_of_valid(
    tmp_path: Path, model: str, dim: int, side: Side
) -> None:
    """Every answer that train lacks counts once; scores are those of the paper's formula."""
    run = make_run(tmp_path, *GRAPH.values(), model=model, dim=dim, corruption="reciprocal", world_size=2)
    export(run.folder, "numpy", tmp_path / "arrays")
    brute = BruteForce(tmp_path / "arrays", model, GRAPH)
    found = collect(open_stored(run.folder), side, seed=0)
    given = {(h if side == "tail" else t, r): set[str]() for h, r, t in GRAPH["valid"]}
    for h, r, t in GRAPH["valid"]:
        given[(h, r) if side == "tail" else (t, r)].add(t if side == "tail" else h)
    total, true_scores, highest = 0, [], dict[str, float]()
    for (anchor, relation), true in given.items():
        known = brute.known(side, anchor, relation)
        train = {name for name, split in known.items() if split == "train"}
        scores = dict(zip(brute.labels, brute.scores(side, anchor, relation).tolist(), strict=True))
        total += 80 - len(train)
        true_scores += [scores[name] for name in true - train]
        others = [scores[name] for name in scores if name not in true | train]
        highest[relation] = max(*others, highest.get(relation, -np.inf))
    assert found.weights.sum() == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(np.sort(found.scores[found.true]), sorted(true_scores), rtol=1e-9, atol=1e-9)
    for relation, score in highest.items():
        mine = found.relations == brute.relation_labels.index(relation)
        assert found.scores[mine & ~found.true].max() == pytest.approx(score, rel=1e-5, abs=1e-5)


def test_a_part_of_the_entities_stands_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, *GRAPH.values(), model="distmult", dim=8)
    stored = open_stored(run.folder)
    whole = collect(stored, "tail", seed=0)
    monkeypatch.setattr(pairs, "_MAX_ENTITIES", 40)
    monkeypatch.setattr(pairs, "_PILOTS", 20)
    totals, means = [], []
    for seed in range(12):
        part = collect(stored, "tail", seed=seed)
        assert part.true.sum() == whole.true.sum()
        false = ~part.true
        totals.append(part.weights[false].sum())
        means.append(np.average(part.scores[false], weights=part.weights[false]))
    false = ~whole.true
    assert np.mean(totals) == pytest.approx(whole.weights[false].sum(), rel=0.03)
    assert np.mean(means) == pytest.approx(
        np.average(whole.scores[false], weights=whole.weights[false]), abs=0.3
    )


NUM = 130


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A run whose triples were drawn by the model's own scores: log odds of a triple are 2 s - 3, or s - 1.

    Of the true ones 60 % are in train, 20 % in valid and 20 % in test.
    """
    folder = tmp_path_factory.mktemp("simulated")
    entities = sorted((f"e{i}" for i in range(NUM)), key=label_hash)
    relations = sorted(("r0", "r1"), key=label_hash)
    random = np.random.default_rng(0)
    rows, relation_rows = random.normal(0, 0.8, (NUM, 6)), random.normal(0, 1, (2, 6))
    scores = np.einsum("hd,rd,td->hrt", rows, relation_rows, rows)
    is_true = random.random(scores.shape) < probability(true_odds(scores, np.arange(2)[:, None]))
    splits: dict[str, list[Triple]] = {"train": ring(NUM, 2), "valid": [], "test": []}
    for h, r, t in np.argwhere(is_true).tolist():
        triple = entities[h], relations[r], entities[t]
        if triple not in splits["train"][:NUM]:
            splits[random.choice(["train", "valid", "test"], p=[0.6, 0.2, 0.2])].append(triple)
    run = make_run(
        folder,
        *splits.values(),
        entities=rows,
        relations=relation_rows,
        model="distmult",
        dim=6,
        corruption="both-sides",
    )
    assert list(run.dataset.entities) == entities
    return open_stored(run.folder)


def true_odds(scores: Doubles, relations: npt.NDArray[np.int64]) -> Doubles:
    odds: Doubles = np.where(relations == 0, 2 * scores - 3, scores - 1)
    return odds


@pytest.mark.parametrize("side", SIDES)
def test_probabilities_are_those_that_triples_were_drawn_with(simulated: Stored, side: Side) -> None:
    """P(in valid, given the score and that train lacks it), against what the simulation makes it."""
    fitted = calibration(simulated, side=side)
    asked = collect(simulated, side, seed=9)
    for relation in (0, 1):
        mine = asked.relations == relation
        scores = asked.scores[mine]
        chance = probability(true_odds(scores, asked.relations[mine]))
        expected = 0.2 * chance / (1 - 0.6 * chance)
        found = fitted.probabilities(scores, asked.relations[mine], side)
        assert np.average(abs(found - expected), weights=asked.weights[mine]) < 0.02
        assert np.average(found, weights=asked.weights[mine]) == pytest.approx(
            np.average(expected, weights=asked.weights[mine]), abs=0.01
        )


def test_what_is_said_of_test_is_so(simulated: Stored) -> None:
    """Of the answers to questions of test that are called .2 to .4 likely, such a share is true."""
    fitted = calibration(simulated, side="tail")
    asked = collect(simulated, "tail", seed=3, split="test", known=("train",))
    found = fitted.probabilities(asked.scores, asked.relations, "tail")
    for low, high in ((0, 0.1), (0.1, 0.2), (0.2, 0.4)):
        here = (found >= low) & (found < high)
        claimed, true = (np.average(x[here], weights=asked.weights[here]) for x in (found, asked.true))
        assert asked.weights[here].sum() > 100
        assert claimed == pytest.approx(true, abs=0.05)


def test_probabilities_rise_with_the_score(simulated: Stored) -> None:
    fitted = calibration(simulated)
    assert fitted.sides == SIDES
    scores = np.linspace(-50, 50, 2001)
    for side in SIDES:
        for relation in (0, 1):
            found = fitted.probabilities(scores, np.full(len(scores), relation), side)
            assert (np.diff(found) >= 0).all()
            assert found[-1] > found[0] + 0.1
            assert ((found > 0) & (found < 1)).all()


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_base_rate_is_the_mean_where_so_many_are_true(simulated: Stored, rate: float) -> None:
    fitted = calibration(simulated, side="tail", base_rate=rate)
    asked = collect(simulated, "tail", seed=0)
    for relation in (0, 1):
        mine = asked.relations == relation
        found = fitted.probabilities(asked.scores[mine], asked.relations[mine], "tail")
        true = asked.true[mine]
        mean = rate * found[true].mean() + (1 - rate) * np.average(
            found[~true], weights=asked.weights[mine][~true]
        )
        assert mean == pytest.approx(rate, abs=0.02)
    assert "50 % of those asked about are true" in calibration(simulated, base_rate=0.5).line()


def test_a_side_that_was_not_fitted_is_refused(simulated: Stored) -> None:
    fitted = calibration(simulated, side="tail", seed=5)
    with pytest.raises(ValueError, match=r"side 'head' was not fitted \(fitted: tail\)"):
        fitted.probabilities(np.zeros(1), np.zeros(1, np.int64), "head")


def made(folder: Path, **splits: list[Triple]) -> Stored:
    graph = GRAPH | splits
    return open_stored(make_run(folder, *graph.values(), model="distmult", dim=8).folder)


def test_test_is_not_looked_at(tmp_path: Path) -> None:
    """The negative control: another valid does make another fit."""
    first = calibration(made(tmp_path / "a")).file.sides
    again = calibration(made(tmp_path / "b", test=GRAPH["test"][:9])).file.sides
    other = calibration(made(tmp_path / "c", valid=GRAPH["valid"][9:])).file.sides
    assert again == first
    assert other != first


@pytest.mark.parametrize("num_triples", [0, 99])
def test_too_small_a_valid_is_refused(tmp_path: Path, num_triples: int) -> None:
    stored = made(tmp_path, valid=ring(num_triples) if num_triples else [])
    with pytest.raises(DataError, match=rf"fitted to valid, which holds {num_triples} triples; at least 100"):
        calibration(stored)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, float("nan"), 50.0])
def test_a_base_rate_lies_between_0_and_1(simulated: Stored, rate: float) -> None:
    with pytest.raises(ConfigError, match="--base-rate must be a number between 0 and 1"):
        calibration(simulated, base_rate=rate)


def test_a_row_that_is_not_finite_is_named(tmp_path: Path) -> None:
    stored = made(tmp_path)
    rows = stored.checkpoint.entities.read(range(80)).copy()
    rows[5, 2] = np.nan
    relations = stored.checkpoint.relations.read(range(stored.model.num_relation_rows))
    save_tables(stored.run, rows, relations, step=2)
    with pytest.raises(NonFiniteError, match=r"entity 5 \('e\d+'\) is not finite"):
        calibration(open_stored(stored.run.folder))


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return made(tmp_path)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sides that were fitted anew."""
    sides: list[str] = []

    def counting(stored: Stored, side: Side, *, seed: int) -> Pairs:
        sides.append(side)
        return collect(stored, side, seed=seed)

    monkeypatch.setattr(calibrated, "collect", counting)
    return sides


def test_a_fit_is_kept_beside_its_run(stored: Stored, counted: list[str]) -> None:
    sides = counted
    first = calibration(stored, side="tail")
    path = stored.run.folder / "eval" / "calibration-00000001.json"
    assert check_seal(path)
    assert matches_any(path.relative_to(stored.run.folder).as_posix(), RUN_NAMES)
    kept = json.loads(path.read_text())
    assert (kept["run_id"], kept["step"]) == (stored.run.info.id, 1)
    both = calibration(stored)
    assert calibration(open_stored(stored.run.folder)).file == both.file
    assert both.file.sides["tail"] == first.file.sides["tail"]
    assert sides == ["tail", "head"]
    calibration(stored, base_rate=0.5, side="head")
    calibration(stored, seed=1, side="head")
    assert sides == ["tail", "head", "head", "head"]
    names = {each.name for each in path.parent.iterdir()}
    assert names == {path.name, *(f"calibration-00000001-{end}.json" for end in ("rate-0.5", "seed-1"))}


def test_the_fit_of_another_run_or_step_is_not_taken(
    tmp_path: Path, stored: Stored, counted: list[str]
) -> None:
    sides = counted
    calibration(stored, side="tail")
    other = made(tmp_path / "other")
    (other.run.folder / "eval").mkdir()
    name = "eval/calibration-00000001.json"
    (other.run.folder / name).write_bytes((stored.run.folder / name).read_bytes())
    calibration(other, side="tail")
    assert sides == ["tail", "tail"]
    rows = stored.checkpoint.entities.read(range(80)), stored.checkpoint.relations.read(range(6))
    save_tables(stored.run, *rows, step=2)
    calibration(open_stored(stored.run.folder), side="tail")
    assert sides == ["tail"] * 3


def test_a_damaged_fit_is_made_again_and_that_is_said(
    stored: Stored, counted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sides = counted
    first = calibration(stored, side="tail")
    path = stored.run.folder / "eval" / "calibration-00000001.json"
    good = path.read_text()
    for bad in (good.replace('"step": 1,', '"step": 3,'), "{", ""):
        path.write_text(bad)
        assert calibration(stored, side="tail").file == first.file
        assert "probabilities are fitted again" in capsys.readouterr().err
        assert path.read_text() == good
    assert sides == ["tail"] * 4


def test_a_fit_that_cannot_be_kept_is_still_returned(
    stored: Stored, capsys: pytest.CaptureFixture[str]
) -> None:
    (stored.run.folder / "eval").write_text("in the way")
    assert calibration(stored, side="tail").sides == ("tail",)
    assert "calibration-00000001.json was not written" in capsys.readouterr().err


def test_predict_tells_the_probability_of_each_answer(simulated: Stored) -> None:
    """Those of the calibration, for the side that is asked for; and only where they are asked for."""
    model = load(simulated.run.folder)
    for side in SIDES:
        given: Side = "head" if side == "tail" else "tail"
        question = Question(relation=model.relations[1], **{given: model.entities[3]})
        [answers] = model.predict([question], Wanted(12, calibrate=True))
        scores = np.array([answer.score for answer in answers])
        fitted = calibration(simulated, side=side)
        expected = fitted.probabilities(scores, np.full(12, 1), side)
        assert [answer.probability for answer in answers] == expected.tolist()
        assert answers.query["probability"] == fitted.line()
        assert answers.lines()[-1] == f"p: {fitted.line()}"
        [plain] = model.predict([question], Wanted(12))
        assert {answer.probability for answer in plain} == {None}
        assert [answer.label for answer in plain] == [answer.label for answer in answers]
    between = Question(head=model.entities[3], tail=model.entities[4])
    with pytest.raises(ConfigError, match="--calibrate is for heads and tails"):
        model.predict([between], Wanted(calibrate=True))
