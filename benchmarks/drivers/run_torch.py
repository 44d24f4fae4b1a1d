"""torch alone: `nn.Embedding(sparse=True)` and its SparseAdam, one process."""

from __future__ import annotations

from typing import Any

import torch
from measuring import Window, main, zipf_batches


def lookup(given: dict[str, Any]) -> dict[str, Any]:
    """Look rows up, square their distance from a target, and update them."""
    table = torch.nn.Embedding(given["entities"], given["dim"], sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    target, window = torch.randn(given["ids"], given["dim"]), Window(given)
    for ids in zipf_batches(given, 0):
        optimizer.zero_grad()
        (table(torch.from_numpy(ids)) - target).square().mean().backward()
        optimizer.step()
        if window.step():
            break
    return window.figures(items_a_step=given["ids"])


if __name__ == "__main__":
    main({"lookup": lookup}, "torch")
