"""Rows for entities that were not trained, from their triples; everything else stays as it is.

    frozen      what rows are fitted to, and what comes out
    losses      the run's loss, question by question, and as a rival sees it
    questions   what new entities are asked, and what else they compete in
    objective   the run's loss and regularisers as a function of new rows
    spread      how trained rows lie: lengths of steps, a prior
    sampling    how much of a large run is looked at
    starting    means of rows that stand where a new one does
    fitting     steps, and when there have been enough
    connected   which new entities triples connect: those are fitted together
    fold        `fold_in`

Full batches and an optimizer that looks at each coordinate by itself: entities that no triple connects do not
influence each other, but for rounding.
"""

from kgshard.folding.connected import components
from kgshard.folding.fold import fold_in
from kgshard.folding.frozen import FoldedRows, FrozenModel

__all__ = ["FoldedRows", "FrozenModel", "components", "fold_in"]
