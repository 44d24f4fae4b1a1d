"""What TensorBoard's projector shows: `tensorboard --logdir FOLDER`, or projector.tensorflow.org.

    tensors.tsv             v TAB v ... LF, one entity a line, no header
    metadata.tsv            header label TAB degree, then one entity a line
    projector_config.pbtxt  names the two
    config.json             `rows` is how many entities are in the files

The projector holds everything in memory, in the browser too, and its page asks for 100,000 points. Of more
entities, as many are taken at even distances: ids follow the hashes of labels, so that is a fair sample, and
the same one every time. A tab or a line end in a label is written \\t, \\n or \\r.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from kgshard.files import replacing, write_text
from kgshard_tools.export.delimited import counted, write_lines
from kgshard_tools.export.format import Format
from kgshard_tools.export.tables import Export, Rows

MAX_POINTS = 100_000
_SHOWN = str.maketrans({"\t": "\\t", "\n": "\\n", "\r": "\\r"})
_CONFIG = """\
embeddings {{
  tensor_name: "entities"
  tensor_path: "tensors.tsv"
  tensor_shape: {rows}
  tensor_shape: {dim}
  metadata_path: "metadata.tsv"
}}
"""


def write_projector(what: Export, folder: Path) -> list[str]:
    """Fill `folder`; return how to load it."""
    rows = _sample(what)
    _write_metadata(what, rows, folder / "metadata.tsv")
    with replacing(folder / "tensors.tsv") as temporary, temporary.open("wb") as file:
        write_lines(file, rows, lambda *_: "", "\t")
    write_text(folder / "projector_config.pbtxt", _CONFIG.format(rows=len(rows), dim=rows.dim))
    what.note("to look at it: tensorboard --logdir FOLDER, then Projector")
    return [
        "import numpy",
        r'entities = numpy.loadtxt("tensors.tsv", numpy.float32, delimiter="\t", ndmin=2)',
        r'lines = list(open("metadata.tsv", encoding="utf-8", newline="\n"))[1:]',
        r'labels = [line.split("\t")[0] for line in lines]',
    ]


def _sample(what: Export) -> Rows:
    """Return the entities that are shown; say so where they are not all."""
    rows, total = what.entities, len(what.entities)
    if total <= MAX_POINTS:
        return rows
    positions = np.arange(MAX_POINTS, dtype=np.int64) * total // MAX_POINTS
    what.note(f"sampled {MAX_POINTS:,} of {total:,} entities; --entities or --top-degree choose others")
    what.config["rows"] = MAX_POINTS
    ids, label_ids = (
        positions + ids.start if isinstance(ids, range) else ids[positions]
        for ids in (rows.ids, rows.label_ids)
    )
    return replace(rows, ids=ids, label_ids=label_ids)


def _write_metadata(what: Export, rows: Rows, path: Path) -> None:
    escaped = 0
    with replacing(path) as temporary, temporary.open("wb") as file:
        # Two columns: the projector takes a first line with a tab for a header, and only then.
        file.write(b"label\tdegree\n")
        for batch in rows.columns(["label", "degree"]):
            labels, degrees = batch["label"].to_pylist(), batch["degree"].to_pylist()
            shown = [label.translate(_SHOWN) for label in labels]
            escaped += sum(new != label for new, label in zip(shown, labels, strict=True))
            lines = (f"{label}\t{degree}\n" for label, degree in zip(shown, degrees, strict=True))
            file.write("".join(lines).encode())
    if escaped:
        labels = counted(escaped, "label")
        what.note(f"{labels} with a tab or a line end, which is shown as \\t, \\n or \\r")


FORMAT = Format(
    "TensorBoard's projector",
    write_projector,
    ("tensors.tsv", "metadata.tsv", "projector_config.pbtxt"),
    dtypes=("float32", "float16", "bfloat16"),
)
