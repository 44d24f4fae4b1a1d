"""Build the bundled example graph `world` from CLDR: territories, currencies, languages, scripts, cities.

    python tools/build_world_graph.py [--out DIR]

All facts come from the CLDR data inside Babel, except the containment of territories, which Babel does not
carry: the table CONTAINS holds CLDR's own. With the pinned Babel, every run writes the same bytes.

The way: builders yield facts between things; `name_things` gives every thing a label of its own; `split`
holds out about a tenth; `write_graph` writes

    train.tsv, valid.tsv, test.tsv    head<TAB>relation<TAB>tail, UTF-8, LF, no header, lines in order
    README.md, LICENSE.txt            what is in it, and whose it is
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

BABEL_VERSION = "2.19.0"
INSTALL = f"build_world_graph: needs Babel=={BABEL_VERSION}, run: pip install Babel=={BABEL_VERSION}"

try:
    import babel  # type: ignore[import-not-found, unused-ignore]
    from babel.core import (  # type: ignore[import-not-found, unused-ignore]
        Locale,
        UnknownLocaleError,
        get_global,
    )
except ModuleNotFoundError:
    raise SystemExit(f"{INSTALL} (found none)") from None

WORLD_FOLDER = Path(__file__).resolve().parents[1] / "kgshard" / "data" / "graphs" / "world"
ENGLISH = Locale("en")
LANGUAGES = {str(code): str(name) for code, name in ENGLISH.languages.items()}
"""CLDR's English language names by code, with varieties such as pt_BR."""

SPOKEN_PERCENT = 2.0
"""A language counts as spoken where at least this share of the people speak it."""
KIND_SIZE = 3
"""A currency noun ("Peso") becomes a thing when at least this many currencies end in it."""
HELD_OUT = 0.05
"""The share of all triples that valid gets, and that test gets."""
SPLIT_SALT = "world 2"
"""Chosen so that test asks for every relation and for the currency of euro countries; no model was asked."""

CONTAINS = {
    # CLDR 48, supplemental territoryContainment, without deprecated codes. Left out: UN (nearly every
    # country, so nothing to learn) and EZ (a restatement of "uses currency Euro").
    "001": "002 009 019 142 150 EU",
    "002": "011 014 015 017 018 202",
    "003": "013 021 029",
    "005": "AR BO BR BV CL CO EC FK GF GS GY PE PY SR UY VE",
    "009": "053 054 057 061 QO",
    "011": "BF BJ CI CV GH GM GN GW LR ML MR NE NG SH SL SN TG",
    "013": "BZ CR GT HN MX NI PA SV",
    "014": "BI DJ ER ET IO KE KM MG MU MW MZ RE RW SC SO SS TF TZ UG YT ZM ZW",
    "015": "DZ EA EG EH IC LY MA SD TN",
    "017": "AO CD CF CG CM GA GQ ST TD",
    "018": "BW LS NA SZ ZA",
    "019": "003 005 013 021 029 419",
    "021": "BM CA GL PM US",
    "029": "AG AI AW BB BL BQ BS CU CW DM DO GD GP HT JM KN KY LC MF MQ MS PR SX TC TT VC VG VI",
    "030": "CN HK JP KP KR MN MO TW",
    "034": "AF BD BT IN IR LK MV NP PK",
    "035": "BN ID KH LA MM MY PH SG TH TL VN",
    "039": "AD AL BA ES GI GR HR IT ME MK MT PT RS SI SM VA XK",
    "053": "AU CC CX HM NF NZ",
    "054": "FJ NC PG SB VU",
    "057": "FM GU KI MH MP NR PW UM",
    "061": "AS CK NU PF PN TK TO TV WF WS",
    "142": "030 034 035 143 145",
    "143": "KG KZ TJ TM UZ",
    "145": "AE AM AZ BH CY GE IL IQ JO KW LB OM PS QA SA SY TR YE",
    "150": "039 151 154 155",
    "151": "BG BY CZ HU MD PL RO RU SK UA",
    "154": "AX CQ DK EE FI FO GB GG IE IM IS JE LT LV NO SE SJ",
    "155": "AT BE CH DE FR LI LU MC NL",
    "202": "011 014 017 018",
    "419": "005 013 029",
    "EU": "AT BE BG CY CZ DE DK EE ES FI FR GR HR HU IE IT LT LU LV MT NL PL PT RO SE SI SK",
    "QO": "AC AQ CP DG TA",
}
"""Each region's code, and the codes of the regions or territories directly inside it."""

SUFFIX = {
    "territory": "",
    "language": " language",
    "currency": " currency",
    "currency kind": " (kind of currency)",
    "script": " script",
    "time zone": " (time zone)",
    "city": " (city)",
    "convention": " (convention)",
}
"""What a label gets when a kind higher in this list has the same name: "Latin" and "Latin script"."""

HAN_SCRIPTS = {"Hans": "Simplified Han", "Hant": "Traditional Han"}
"""CLDR's names of these scripts when they stand alone; Babel keeps only "Simplified" and "Traditional"."""

DECIMAL_MARKS = {",": "Decimal comma", ".": "Decimal point", "\u066b": "Arabic decimal separator"}
NO_LANGUAGES = {"mul", "und", "zxx"}
"""Codes for several languages, an unknown one and none; CLDR names these too."""

RELATIONS = {
    "part of": ("territory or region, and a region directly around it", "France - Western Europe"),
    "uses currency": ("territory, and a currency that is legal tender today", "Japan - Japanese Yen"),
    "used currency formerly": (
        "territory, and a currency that was legal tender once",
        "France - French Franc",
    ),
    "is a kind of": ("currency, and the noun its name ends in", "Australian Dollar - Dollar"),
    "official language": ("territory, and a language official in all of it", "Brazil - Portuguese"),
    "regional official language": ("territory, and a language official in a part of it", "Spain - Catalan"),
    "spoken in": (
        f"language, and a territory where {SPOKEN_PERCENT:g} % or more speak it",
        "French - Belgium",
    ),
    "most spoken in": ("language, and the one territory CLDR takes it to belong to", "Portuguese - Brazil"),
    "is a variety of": ("language variety, and its language", "Flemish - Dutch"),
    "written in": ("language, and a script used for it", "English - Latin script"),
    "located in": ("city or place that names a time zone, and its territory", "Paris - France"),
    "has time zone": ("city or territory, and the time kept there", "Paris - Central European Time"),
    "week starts on": ("territory, and the first day in its calendars", "Egypt - Saturday"),
    "uses clock": ("territory, and how its time of day is written", "Germany - 24-hour clock"),
    "writes decimals with": ("territory, and its decimal mark", "Germany - Decimal comma"),
}
"""Each relation's meaning, and the example that the README shows."""


@dataclass(frozen=True, order=True, slots=True)
class Thing:
    """Something that facts are about. Two kinds of things may share a name, see `name_things`."""

    kind: str
    """A key of SUFFIX."""
    name: str
    """CLDR's English name."""


Fact = tuple[Thing, str, Thing]
"""Head, relation, tail, before labels are given."""
Triple = tuple[str, str, str]
"""Head, relation, tail, as in the files."""
Splits = dict[str, list[Triple]]
"""The triples of "train", "valid" and "test", in order."""


# --- things -----------------------------------------------------------------------------------------


def named(kind: str, names: Any, code: str) -> Thing | None:
    """Return the thing that `code` stands for, or None where CLDR has no English name for it."""
    return Thing(kind, str(names[code])) if code in names else None


def territory(code: str) -> Thing | None:
    """Return a territory or region that CONTAINS knows; codes such as ZZ (unknown region) give None."""
    if code == "001":
        return Thing("territory", "World")
    return named("territory", ENGLISH.territories, code) if code in CONTAINED else None


def language(code: str) -> Thing | None:
    """Return the language of a code such as "uz" or "uz_Cyrl"; the script is not looked at."""
    base = code.split("_")[0]
    return None if base in NO_LANGUAGES else named("language", LANGUAGES, base)


def script(code: str) -> Thing | None:
    """Return a script, under its name when it stands alone."""
    return named("script", {**ENGLISH.scripts, **HAN_SCRIPTS}, code)


def currency(code: str) -> Thing | None:
    """Return a currency, past or present."""
    return named("currency", ENGLISH.currencies, code)


def city(zone: str) -> Thing | None:
    """Return the place that names the zone, as "New York" does America/New_York.

    None where the place is a territory itself (Europe/Malta) or the zone names no place (Etc/UTC).
    """
    name = str(ENGLISH.time_zones.get(zone, {}).get("city") or zone.split("/")[-1].replace("_", " "))
    is_place = "/" in zone and not zone.startswith("Etc/") and name not in ENGLISH.territories.values()
    return Thing("city", name) if is_place else None


def time_zone(zone: str) -> Thing | None:
    """Return the time kept in the zone today, as "Central European Time"; None for a few unnamed ones."""
    names = ENGLISH.meta_zones.get(get_global("meta_zones").get(zone), {}).get("long", {})
    name = names.get("generic") or names.get("standard")
    return Thing("time zone", str(name)) if name else None


def convention(name: str) -> Thing:
    """Return a way of doing things, such as "Decimal comma"."""
    return Thing("convention", name)


CONTAINED = {code for codes in CONTAINS.values() for code in codes.split()}
"""Every territory and region that lies in another: all but the world."""


# --- facts ------------------------------------------------------------------------------------------

Candidate = tuple[Thing | None, str, Thing | None]
"""A fact whose head or tail may be nameless; `collect_facts` drops those."""


def containment_facts() -> Iterator[Candidate]:
    """Territories and regions in the regions directly around them; several may be (Europe's, the EU's)."""
    for region, parts in CONTAINS.items():
        for part in parts.split():
            yield territory(part), "part of", territory(region)


def currency_facts() -> Iterator[Candidate]:
    """Legal tender of each territory. A currency that came back is in use, not also a former one."""
    for place, uses in get_global("territory_currencies").items():
        tender = [(code, end) for code, _, end, is_tender in uses if is_tender]
        current = {code for code, end in tender if end is None}
        for code, _ in tender:
            relation = "uses currency" if code in current else "used currency formerly"
            yield territory(place), relation, currency(code)


def currency_kind_facts(currencies: Iterable[Thing]) -> Iterator[Candidate]:
    """Each currency's noun, where KIND_SIZE of them share it: "Peso" for "Argentine Peso (1881-1970)"."""
    nouns = {each: re.sub(r" \(.*\)$", "", each.name).split()[-1].capitalize() for each in currencies}
    sizes = Counter(nouns.values())
    for each, noun in nouns.items():
        if sizes[noun] >= KIND_SIZE:
            yield each, "is a kind of", Thing("currency kind", noun)


def territory_language_facts() -> Iterator[Candidate]:
    """What is official and what is spoken in each territory, and the scripts that are named with it."""
    official = {
        "official": "official language",
        "de_facto_official": "official language",
        "official_regional": "regional official language",
    }
    for place, languages in get_global("territory_languages").items():
        for code, use in languages.items():
            if use["official_status"] in official:
                yield territory(place), official[use["official_status"]], language(code)
            if use["population_percent"] >= SPOKEN_PERCENT:
                yield language(code), "spoken in", territory(place)
            if "_" in code:
                yield language(code), "written in", script(code.split("_")[1])


def language_facts() -> Iterator[Candidate]:
    """Each language's likely script and territory."""
    likely = get_global("likely_subtags")
    for code in LANGUAGES:
        if code in likely and "_" not in code:
            _, script_code, place = likely[code].split("_")[:3]
            yield language(code), "written in", script(script_code)
            yield language(code), "most spoken in", territory(place) if place in CONTAINED else None


def variety_facts() -> Iterator[Candidate]:
    """Varieties with a name of their own, as pt_BR is "Brazilian Portuguese"."""
    for code, name in LANGUAGES.items():
        place = code.partition("_")[2]
        if place in CONTAINED:
            yield Thing("language", name), "is a variety of", language(code)
            yield Thing("language", name), "spoken in", territory(place)


def time_facts() -> Iterator[Candidate]:
    """Where the time zones' cities lie, and what time is kept in the cities and the territories."""
    for zone, place in get_global("zone_territories").items():
        if place in CONTAINED:
            yield city(zone), "located in", territory(place)
            yield city(zone), "has time zone", time_zone(zone)
            yield territory(place), "has time zone", time_zone(zone)


def convention_facts() -> Iterator[Candidate]:
    """The conventions of each territory's likely locale; a territory without one has none."""
    for place in sorted(CONTAINED & set(get_global("territory_languages"))):
        try:
            locale = Locale.parse(f"und_{place}")
        except UnknownLocaleError:
            continue
        if locale.territory != place:
            continue
        yield territory(place), "week starts on", convention(first_weekday(locale))
        yield territory(place), "uses clock", convention(clock(locale))
        yield territory(place), "writes decimals with", convention(decimal_mark(locale))


def first_weekday(locale: Locale) -> str:
    """Return the English name of the day that starts the week."""
    return str(ENGLISH.days["format"]["wide"][locale.first_week_day])


def clock(locale: Locale) -> str:
    """Return how the short time is written: pattern letters h and K count to 12, H and k to 24."""
    pattern = re.sub("'[^']*'", "", locale.time_formats["short"].pattern)
    return "12-hour clock" if re.search("[hK]", pattern) else "24-hour clock"


def decimal_mark(locale: Locale) -> str:
    """Return the mark used with the locale's own digits, else the one used with Western digits."""
    symbols = locale.number_symbols
    own = symbols.get(locale.default_numbering_system, {}).get("decimal")
    return DECIMAL_MARKS[own or symbols["latn"]["decimal"]]


def collect_facts() -> set[Fact]:
    """Return every fact whose head and tail have names."""
    builders = [
        containment_facts,
        currency_facts,
        territory_language_facts,
        language_facts,
        variety_facts,
        time_facts,
        convention_facts,
    ]
    facts = drop_nameless(candidate for build in builders for candidate in build())
    currencies = {tail for _, _, tail in facts if tail.kind == "currency"}
    return facts | drop_nameless(currency_kind_facts(currencies))


def drop_nameless(candidates: Iterable[Candidate]) -> set[Fact]:
    """Return the candidates that have both a head and a tail."""
    return {(head, relation, tail) for head, relation, tail in candidates if head and tail}


# --- labels and splits ------------------------------------------------------------------------------


def name_things(things: set[Thing]) -> dict[Thing, str]:
    """Give every thing a label of its own: its name, with its kind's suffix only where names clash.

    Example:
        >>> labels = name_things({Thing("language", "Latin"), Thing("script", "Latin")})
        >>> sorted(labels.values())
        ['Latin', 'Latin script']
    """
    ranks = list(SUFFIX)
    labels: dict[Thing, str] = {}
    taken: set[str] = set()
    for thing in sorted(things, key=lambda thing: (ranks.index(thing.kind), thing.name)):
        labels[thing] = thing.name + SUFFIX[thing.kind] if thing.name in taken else thing.name
        taken.add(labels[thing])
    assert len(taken) == len(things), "two things have one label"
    return labels


def label_facts(facts: set[Fact]) -> list[Triple]:
    """Return the facts as triples of labels, in order."""
    labels = name_things({thing for head, _, tail in facts for thing in (head, tail)})
    return sorted((labels[head], relation, labels[tail]) for head, relation, tail in facts)


def split(triples: list[Triple]) -> Splits:
    """Hold out HELD_OUT for valid and again for test, drawn by a hash of the two ends.

    All triples between the same two ends go together, so that "Portuguese spoken in Brazil" cannot give
    away "Brazil official language Portuguese". Two rules keep the questions answerable: every entity keeps
    at least half of its triples in train, and a tail is only asked for where train has another head with
    that relation to it, so a currency that one territory uses is not.
    """
    by_ends: dict[tuple[str, ...], list[Triple]] = defaultdict(list)
    for triple in triples:
        by_ends[tuple(sorted((triple[0], triple[2])))].append(triple)
    total = Counter(part for triple in triples for part in counted_parts(triple))
    left = total.copy()
    quota = round(HELD_OUT * len(triples))
    splits: Splits = {"train": [], "valid": [], "test": []}
    for ends in sorted(by_ends, key=draw):
        group = by_ends[ends]
        # Test and valid fill side by side, so that neither gets the other's leavings.
        name = min("test", "valid", key=lambda name: len(splits[name]))
        parts = Counter(part for triple in group for part in counted_parts(triple))
        answerable = all(left[part] - count >= at_least(part, total) for part, count in parts.items())
        if answerable and len(splits[name]) + len(group) <= quota:
            splits[name] += group
            left -= parts
        else:
            splits["train"] += group
    return {name: sorted(members) for name, members in splits.items()}


def counted_parts(triple: Triple) -> list[tuple[str, ...]]:
    """Return what `split` counts in train: both ends alone, and the tail with its relation."""
    head, relation, tail = triple
    return [(head,), (tail,), (relation, tail)]


def at_least(part: tuple[str, ...], total: Counter[tuple[str, ...]]) -> int:
    """Return how many triples with this part train must have: half for an end, one for a pair."""
    return (total[part] + 1) // 2 if len(part) == 1 else 1


def draw(ends: tuple[str, ...]) -> str:
    """Return the hash that decides when these two ends are considered for holding out."""
    return sha256("\t".join((SPLIT_SALT, *ends)).encode()).hexdigest()


# --- files ------------------------------------------------------------------------------------------


def write_graph(splits: Splits, folder: Path) -> None:
    """Write the three splits, README.md and LICENSE.txt into `folder`, which is made if absent."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, triples in splits.items():
        write_text(folder / f"{name}.tsv", "".join("\t".join(triple) + "\n" for triple in triples))
    write_text(folder / "README.md", readme(splits))
    write_text(folder / "LICENSE.txt", licence())


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 with LF on every system."""
    path.write_text(text, encoding="utf-8", newline="\n")


def readme(splits: Splits) -> str:
    """Return the text of README.md: what the graph is, its counts and its relations."""
    triples = [triple for members in splits.values() for triple in members]
    entities = {end for head, _, tail in triples for end in (head, tail)}
    split_rows = "\n".join(f"| {name}.tsv | {len(members)} |" for name, members in splits.items())
    relation_rows = "\n".join(relation_row(relation, triples) for relation in RELATIONS)
    return README.format(
        babel_version=BABEL_VERSION,
        cldr_version=get_global("cldr")["version"],
        num_entities=len(entities),
        num_relations=len({relation for _, relation, _ in triples}),
        num_triples=len(triples),
        split_rows=split_rows,
        relation_rows=relation_rows,
    )


def relation_row(relation: str, triples: list[Triple]) -> str:
    """Return the relation's line in the README's table."""
    meaning, example = RELATIONS[relation]
    members = [f"{head} - {tail}" for head, name, tail in triples if name == relation]
    assert example in members, f"{relation}: no such triple: {example}"
    return f"| {relation} | {len(members)} | {meaning} | {example} |"


def licence() -> str:
    """Return the Unicode licence as Babel ships it, after a note on whose work is what."""
    unicode_licence = Path(babel.__file__).parent / "locale-data" / "LICENSE.unicode"
    return LICENCE_NOTE + unicode_licence.read_text(encoding="utf-8").strip() + "\n"


README = """\
# world

A knowledge graph of things most people know: territories, currencies, languages, scripts, cities and their
times. All of it comes from CLDR, the Unicode Consortium's locale data. It is an example, made for trying
kgshard out, not a reference work.

{num_entities} entities, {num_relations} relations, {num_triples} triples:

| file | triples |
|---|---:|
{split_rows}

A line is head, relation and tail between tabs, in UTF-8, with no header. No triple occurs twice. Every entity
and relation of valid and test occurs in train.

## Relations

| relation | triples | from, and to | example |
|---|---:|---|---|
{relation_rows}

## How it was made

`python tools/build_world_graph.py`, with Babel {babel_version} (CLDR {cldr_version}), writes this folder, the
same bytes each time.

- Names are CLDR's English ones, and what has none is left out. Where two kinds of things share a name, one
  keeps it: "Latin" is the language, "Latin script" the script; "Nauru" the country, "Nauru language" its
  language.
- Babel does not carry which territory lies in which region. That table is CLDR 48's, in the script itself;
  the United Nations and the eurozone are left out. "part of" names the regions directly around, so France is
  part of Western Europe and Western Europe is part of Europe.
- "uses currency" has no end date in CLDR. A currency no longer legal tender is "used currency formerly".
- "most spoken in", "week starts on", "uses clock" and "writes decimals with" are what CLDR assumes of a
  language or a territory when it is told nothing more.
- Left out because one answer fits nearly all: the weekend, the order of a date, a language's digits.
- About 5 % are held out for valid and 5 % for test, by a hash. Triples between the same two entities stay in
  one split ("Portuguese spoken in Brazil", "Brazil official language Portuguese"), so train does not give
  an answer away. To keep the questions answerable, every entity keeps at least half of its triples in train,
  and a tail is asked for only where train has the same relation and tail with another head. Scores are
  therefore higher than with a blind draw. The hash's salt was chosen so that test asks for every relation
  and for a few well-known facts, such as the currency of Austria.

The data is Unicode's, under the Unicode License V3: see LICENSE.txt.
"""

LICENCE_NOTE = """\
The files in this folder are derived from data of the Unicode Common Locale Data Repository (CLDR), which is
under the Unicode License V3 below. They were read through Babel (https://babel.pocoo.org), which is under the
BSD-3-Clause licence, Copyright (c) 2013-2026 by the Babel Team; no code of Babel's is in this folder.

--------------------------------------------------------------------------------

"""


def main() -> None:
    """Parse the command line, build the graph and say what was written."""
    parser = argparse.ArgumentParser(description="Build the bundled example graph `world` from CLDR.")
    parser.add_argument("--out", type=Path, default=WORLD_FOLDER, metavar="DIR", help="default: %(default)s")
    folder: Path = parser.parse_args().out
    if babel.__version__ != BABEL_VERSION:
        raise SystemExit(f"{INSTALL} (found {babel.__version__})")
    splits = split(label_facts(collect_facts()))
    write_graph(splits, folder)
    print(f"{folder}: " + ", ".join(f"{len(triples)} {name}" for name, triples in splits.items()))


if __name__ == "__main__":
    main()
