"""An overlay: entities beside a run that were not trained, with rows fitted to their triples.

OVERLAY/
    overlay.json           format "kgshard.overlay/1": whose it is, how it was made, hashes of the others
    entities.parquet       id (int64, after the run's), label (string), degree (int64: triples that name it)
    vectors.safetensors    "entity_embedding.weight", float32 [n, dim], in the order of ids
    triples.npy            int64 [t, 3]: the head, relation and tail ids that the rows were fitted to

The run stays as it is. With an overlay it seems larger: `extend` returns it with more labels, rows and
triples, and what asks it need not know. Rows of an overlay are approximate, and `Overlay.is_new` tells which
they are. No torch here, but for the fitting itself.

    stored      the folder, opened and checked
    extended    labels and rows of both
    whole       a run with its overlay, as one
    reading     triples that name entities which a run does not know
    folding     `fold_in`, which writes an overlay
"""

from kgshard_tools.overlay.extended import ExtendedTable, ExtendedVocabulary
from kgshard_tools.overlay.folding import DEFAULT_STEPS, FoldedEntity, FoldedIn, fold_in
from kgshard_tools.overlay.stored import (
    OVERLAY_FILE,
    OVERLAY_NAMES,
    Overlay,
    is_overlay,
    open_overlay,
    overlay_files,
    read_overlay_info,
)
from kgshard_tools.overlay.whole import ExtendedStored, extend

__all__ = [
    "DEFAULT_STEPS",
    "OVERLAY_FILE",
    "OVERLAY_NAMES",
    "ExtendedStored",
    "ExtendedTable",
    "ExtendedVocabulary",
    "FoldedEntity",
    "FoldedIn",
    "Overlay",
    "extend",
    "fold_in",
    "is_overlay",
    "open_overlay",
    "overlay_files",
    "read_overlay_info",
]
