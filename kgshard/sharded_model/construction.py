"""Making a model without the memory of its entity table, whatever its `__init__` does.

A model says `self.entity_embeddings = nn.Embedding(n, dim)` and then, perhaps, `xavier_normal_`. Inside
`deferring_entity_rows`, every new nn.Embedding holds `DeferredRows`; those of another name are filled as soon
as they become part of a module, since only then is it known that they are not the entity table.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from kgshard.sharded_model.deferred import ENTITIES, DeferredRows, Description

_owner: ContextVar[nn.Module | None] = ContextVar("owner", default=None)
"""The model that this thread is making."""
_made: ContextVar[list[weakref.ref[nn.Embedding]]] = ContextVar("made")
"""Its embeddings so far, some of which may have been thrown away."""

_SIGNATURE = signature(nn.Embedding.__init__)
_lock = threading.Lock()
_num_interceptions = 0
_is_watching = False
_original_init = nn.Embedding.__init__


@contextmanager
def deferring_entity_rows(model: nn.Module) -> Iterator[None]:
    """Let this thread, in a `with` block, run `model.__init__` without allocating its entity table."""
    made: list[weakref.ref[nn.Embedding]] = []
    owner, others = _owner.set(model), _made.set(made)
    try:
        with _intercepted_embeddings():
            yield
        for reference in made:
            embedding = reference()
            if embedding is not None and embedding is not model._modules.get(ENTITIES):
                _fill(embedding)
    finally:
        _owner.reset(owner)
        _made.reset(others)


@contextmanager
def _intercepted_embeddings() -> Iterator[None]:
    """Route every new nn.Embedding through `_init_deferred`, while any thread is in such a block."""
    global _num_interceptions, _is_watching, _original_init
    with _lock:
        if not _is_watching:
            # For good: torch iterates over its hooks without a lock.
            register_module_module_registration_hook(_fill_registered)
            _is_watching = True
        if _num_interceptions == 0:
            _original_init = nn.Embedding.__init__
            nn.Embedding.__init__ = _init_deferred  # type: ignore[method-assign]
        _num_interceptions += 1
    try:
        yield
    finally:
        with _lock:
            _num_interceptions -= 1
            if _num_interceptions == 0:
                nn.Embedding.__init__ = _original_init  # type: ignore[method-assign]


def _init_deferred(self: nn.Embedding, *args: Any, **kwargs: Any) -> None:
    """`nn.Embedding.__init__`, with deferred rows where this thread makes a sharded model."""
    call = _SIGNATURE.bind(self, *args, **kwargs)
    call.apply_defaults()
    asked = call.arguments
    device = torch.device(asked["device"] or torch.get_default_device())
    has_rows = asked["_weight"] is not None or asked["padding_idx"] is not None or device.type == "meta"
    if _owner.get() is None or has_rows:
        _original_init(self, *args, **kwargs)
        return
    shape = (asked["num_embeddings"], asked["embedding_dim"])
    dtype = asked["dtype"] or torch.get_default_dtype()
    asked["_weight"] = DeferredRows(Description(shape, dtype, device))
    _original_init(*call.args, **call.kwargs)
    self.reset_parameters()
    _made.get().append(weakref.ref(self))


def _fill_registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    """Fill an embedding that becomes part of a module, unless it is the entity table being made."""
    if isinstance(child, nn.Embedding) and not (parent is _owner.get() and name == ENTITIES):
        _fill(child)


def _fill(embedding: nn.Embedding) -> None:
    weight = embedding._parameters.get("weight")
    if isinstance(weight, DeferredRows):
        embedding.weight = nn.Parameter(weight.description.hold(), requires_grad=weight.requires_grad)
