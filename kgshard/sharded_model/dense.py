"""Parameters that every rank holds whole: equal at the start, and their gradients summed in every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from kgshard.errors import ConfigError
from kgshard.exchange import Exchange


def check_summable(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise ConfigError where a parameter's gradients could not be summed over ranks: it is complex."""
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.is_complex():
            raise ConfigError(
                f"{name} is {parameter.dtype}, whose gradients are not summed over ranks; keep it as real"
                " numbers and use torch.view_as_complex"
            )


@torch.no_grad()
def copy_from_rank_zero(tensors: Sequence[Tensor], exchange: Exchange) -> None:
    """Overwrite `tensors`, on all ranks of the same shapes, with rank 0's: one exchange.

    Raises:
        ExchangeMismatchError: Ranks hold tensors of other sizes.
    """
    if not tensors or exchange.world_size == 1:
        return
    mine = torch.cat([_bytes_of(tensor) for tensor in tensors])
    sends = exchange.rank == 0
    expected = [len(mine), *[0] * (exchange.world_size - 1)]
    received = exchange.all_to_all([mine if sends else mine[:0]] * exchange.world_size, expected)[0]
    sizes = [tensor.nbytes for tensor in tensors]
    for tensor, piece in zip(tensors, torch.split(received, sizes), strict=True):
        # A copy begins at its own address, which the wider dtype may need.
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@torch.no_grad()
def sum_gradients(parameters: Sequence[tuple[str, nn.Parameter]], exchange: Exchange) -> None:
    """Replace each gradient by its sum over ranks: one all-reduce for each dtype.

    A parameter without a gradient counts as zero, and stays without where no rank has one.

    Args:
        parameters: By name; the same on all ranks.
        exchange: The other ranks.

    Raises:
        ConfigError: A gradient is sparse.
    """
    for name, parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ConfigError(f"{name} has a sparse gradient; make that embedding with sparse=False")
    for dtype in sorted({parameter.dtype for _, parameter in parameters}, key=str):
        _sum_alike([parameter for _, parameter in parameters if parameter.dtype == dtype], exchange)


def _sum_alike(parameters: Sequence[nn.Parameter], exchange: Exchange) -> None:
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = pieces[0].new_tensor([p.grad is not None for p in parameters])
    total = exchange.all_reduce(torch.cat([present, *[piece.reshape(-1) for piece in pieces]]))
    someone_has: list[float] = total[: len(parameters)].tolist()
    sums = torch.split(total[len(parameters) :], [p.numel() for p in parameters])
    for parameter, gradient, counted in zip(parameters, sums, someone_has, strict=True):
        if counted:
            parameter.grad = gradient.view_as(parameter)


def has_foreign_shards(model: nn.Module) -> bool:
    """Return whether FSDP or FSDP2 keeps a model's parameters cut over ranks, and sums their gradients."""
    managed = any(getattr(module, "_is_fsdp_managed_module", False) for module in model.modules())
    return managed or any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
