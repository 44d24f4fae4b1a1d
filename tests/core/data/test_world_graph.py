"""The bundled graph `world`: what its files promise to those who train on it, and that its tool made them."""

import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
WORLD = REPOSITORY / "kgshard" / "data" / "graphs" / "world"
BUILD = REPOSITORY / "tools" / "build_world_graph.py"
SPLITS = ("train", "valid", "test")

Triple = tuple[str, ...]


def read_split(name: str) -> list[Triple]:
    """Return the split's lines as tuples; a well-formed line gives three labels."""
    text = (WORLD / f"{name}.tsv").read_bytes().decode("utf-8")
    return [tuple(line.split("\t")) for line in text.removesuffix("\n").split("\n")]


def read_all() -> list[Triple]:
    return [triple for name in SPLITS for triple in read_split(name)]


def entities_of(triples: list[Triple]) -> set[str]:
    return {end for head, _, tail in triples for end in (head, tail)}


def relations_of(triples: list[Triple]) -> set[str]:
    return {relation for _, relation, _ in triples}


def readme_tables() -> dict[str, list[str]]:
    """Return the rows of the README's tables: first cell to the other cells."""
    lines = (WORLD / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {first: rest for first, *rest in rows}


def installed_babel() -> str | None:
    try:
        return importlib.metadata.version("babel")
    except importlib.metadata.PackageNotFoundError:
        return None


def wanted_babel() -> str:
    """Return the version the tool names, read from its text: importing it would need Babel."""
    match = re.search(r'^BABEL_VERSION = "(.+)"$', BUILD.read_text(encoding="utf-8"), re.MULTILINE)
    assert match, f"{BUILD}: no BABEL_VERSION"
    return match[1]


def need_wanted_babel() -> None:
    if installed_babel() != wanted_babel():
        pytest.skip(f"needs Babel=={wanted_babel()}, found {installed_babel()}")


def build(folder: Path, *, hash_seed: int) -> None:
    command = [sys.executable, str(BUILD), "--out", str(folder)]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": str(hash_seed)}, capture_output=True)


@pytest.mark.parametrize("name", SPLITS)
def test_every_line_is_three_labels(name: str) -> None:
    for triple in read_split(name):
        assert len(triple) == 3, triple
        assert all(label and label == label.strip() and label.isprintable() for label in triple), triple


@pytest.mark.parametrize("name", SPLITS)
def test_lines_are_in_order_and_end_in_a_single_newline(name: str) -> None:
    data = (WORLD / f"{name}.tsv").read_bytes()
    assert data.endswith(b"\n")
    assert not data.endswith(b"\n\n")
    assert b"\r" not in data
    assert read_split(name) == sorted(read_split(name))


def test_no_triple_occurs_twice() -> None:
    assert [triple for triple, count in Counter(read_all()).items() if count > 1] == []


def test_the_size_suits_an_example() -> None:
    assert 4000 <= len(read_all()) <= 9000


@pytest.mark.parametrize("name", ["valid", "test"])
def test_about_a_twentieth_is_held_out(name: str) -> None:
    assert 0.045 <= len(read_split(name)) / len(read_all()) <= 0.055


@pytest.mark.parametrize("name", ["valid", "test"])
def test_what_is_held_out_is_known_to_train(name: str) -> None:
    train, held_out = read_split("train"), read_split(name)
    assert entities_of(held_out) <= entities_of(train)
    assert relations_of(held_out) <= relations_of(train)


def test_every_relation_is_asked_for_in_test() -> None:
    assert relations_of(read_split("test")) == relations_of(read_split("train"))


@pytest.mark.parametrize("name", ["valid", "test"])
def test_every_tail_asked_for_has_a_precedent_in_train(name: str) -> None:
    precedents = {(relation, tail) for _, relation, tail in read_split("train")}
    assert {(relation, tail) for _, relation, tail in read_split(name)} <= precedents


def test_every_entity_keeps_half_of_its_triples_in_train() -> None:
    total, train = (
        Counter(end for head, _, tail in triples for end in (head, tail))
        for triples in (read_all(), read_split("train"))
    )
    assert [label for label in total if 2 * train[label] < total[label]] == []


def test_two_ends_never_meet_in_two_splits() -> None:
    """Else "Portuguese spoken in Brazil" in train gives away "Brazil official language Portuguese"."""
    pairs = [{frozenset((head, tail)) for head, _, tail in read_split(name)} for name in SPLITS]
    assert sum(len(each) for each in pairs) == len(set.union(*pairs))


def test_no_relation_is_the_inverse_of_another() -> None:
    """No two relations are mostly each other's mirror image. Official languages are mostly spoken, but
    most spoken languages are not official, and the splits keep such pairs together."""
    by_relation: dict[str, set[tuple[str, str]]] = {}
    for head, relation, tail in read_all():
        by_relation.setdefault(relation, set()).add((head, tail))
    for relation, pairs in by_relation.items():
        for other in by_relation.values():
            mirrored = pairs & {(tail, head) for head, tail in other}
            assert len(mirrored) < 0.5 * max(len(pairs), len(other)), relation


def test_no_relation_has_one_answer_for_nearly_all() -> None:
    for relation in relations_of(read_all()):
        tails = Counter(tail for _, name, tail in read_all() if name == relation)
        assert max(tails.values()) < 0.75 * tails.total(), (relation, tails.most_common(3))


@pytest.mark.parametrize(
    "fact",
    [
        ("France", "uses currency", "Euro"),
        ("France", "used currency formerly", "French Franc"),
        ("France", "part of", "Western Europe"),
        ("France", "part of", "European Union"),
        ("Western Europe", "part of", "Europe"),
        ("Europe", "part of", "World"),
        ("Switzerland", "uses currency", "Swiss Franc"),
        ("Switzerland", "official language", "French"),
        ("Croatia", "uses currency", "Euro"),
        ("Croatia", "used currency formerly", "Croatian Kuna"),
        ("Spain", "regional official language", "Catalan"),
        ("Portuguese", "most spoken in", "Brazil"),
        ("English", "written in", "Latin script"),
        ("Serbian", "written in", "Cyrillic"),
        ("Latin", "written in", "Latin script"),
        ("Brazilian Portuguese", "is a variety of", "Portuguese"),
        ("Canadian Dollar", "is a kind of", "Dollar"),
        ("New York", "located in", "United States"),
        ("New York", "has time zone", "Eastern Time"),
        ("Kolkata", "located in", "India"),
        ("United States", "week starts on", "Sunday"),
        ("United States", "uses clock", "12-hour clock"),
        ("Germany", "writes decimals with", "Decimal comma"),
    ],
    ids=" ".join,
)
def test_known_facts_are_there(fact: Triple) -> None:
    assert fact in read_all()


def test_facts_that_are_over_are_not_current() -> None:
    assert ("France", "uses currency", "French Franc") not in read_all()
    assert ("Switzerland", "part of", "European Union") not in read_all()
    assert ("United Kingdom", "part of", "European Union") not in read_all()


@pytest.mark.parametrize("country", ["Austria", "Belgium", "Greece"])
def test_a_euro_country_is_held_out_for_the_demo(country: str) -> None:
    assert (country, "uses currency", "Euro") in read_split("test")


def test_nameless_codes_are_left_out() -> None:
    entities = entities_of(read_all())
    assert [
        label for label in entities if re.search(r"^(Unknown|Pseudo)|No linguistic|Multiple lang", label)
    ] == []
    assert [label for label in entities if re.fullmatch(r"[0-9]+|[A-Z]{2,4}|[A-Z][a-z]+/.+", label)] == []


def test_the_readme_counts_the_files() -> None:
    rows = readme_tables()
    for name in SPLITS:
        assert rows[f"{name}.tsv"] == [str(len(read_split(name)))]
    triples = read_all()
    entities, relations = entities_of(triples), relations_of(triples)
    sentence = f"{len(entities)} entities, {len(relations)} relations, {len(triples)} triples"
    assert sentence in (WORLD / "README.md").read_text(encoding="utf-8")


def test_the_readme_explains_every_relation_with_an_example_that_is_there() -> None:
    rows = {first: rest for first, rest in readme_tables().items() if len(rest) == 3 and rest[0].isdigit()}
    counts = Counter(relation for _, relation, _ in read_all())
    assert {relation: int(rest[0]) for relation, rest in rows.items()} == counts
    for relation, (_, _, example) in rows.items():
        head, tail = example.split(" - ")
        assert (head, relation, tail) in read_all()


def test_the_licence_is_named() -> None:
    text = (WORLD / "LICENSE.txt").read_text(encoding="utf-8")
    assert "UNICODE LICENSE V3" in text
    assert "BSD-3-Clause" in text


@pytest.mark.parametrize("hash_seed", [1, 2])
def test_rebuilding_gives_the_same_bytes(tmp_path: Path, hash_seed: int) -> None:
    need_wanted_babel()
    build(tmp_path / "world", hash_seed=hash_seed)
    rebuilt = {path.name: path.read_bytes() for path in (tmp_path / "world").iterdir()}
    assert rebuilt == {path.name: path.read_bytes() for path in WORLD.iterdir()}


def test_another_babel_is_refused_in_one_line(tmp_path: Path) -> None:
    """Babel is told to give another version, since only one can be installed."""
    need_wanted_babel()
    (tmp_path / "run.py").write_text(
        "import runpy, sys, babel\n"
        "babel.__version__ = '2.0'\n"
        f"sys.argv = ['build', '--out', {str(tmp_path / 'world')!r}]\n"
        f"runpy.run_path({str(BUILD)!r}, run_name='__main__')\n",
        encoding="utf-8",
    )
    command = [sys.executable, str(tmp_path / "run.py")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    wanted = f"Babel=={wanted_babel()}"
    assert done.stderr == f"build_world_graph: needs {wanted}, run: pip install {wanted} (found 2.0)\n"
    assert not (tmp_path / "world").exists()
