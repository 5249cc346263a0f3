"""Sends small messages (counts and bytes) between ranks, on the CPU if one of the group's backends supports it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from echelon.distributed.alone import is_alone
from echelon.distributed.structure_check import wire_device

__all__ = ["broadcast_bytes", "bytes_of", "gather_bytes", "gather_counts", "host_wire"]

_HEAD = 256  # bytes of the first message; a longer payload needs a second one


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor`` as uint8 [number of bytes], as a view if the tensor is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single value of a larger tensor is contiguous, but torch cannot view it as bytes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def gather_counts(*counts: int, group: dist.ProcessGroup | None = None) -> list[list[int]]:
    """Return, for each of ``counts``, the list of its values in rank order.

    Collective: call on every rank of ``group`` (None: all ranks), with the same number of counts.
    """
    if is_alone():
        return [[count] for count in counts]
    mine = torch.tensor(counts, dtype=torch.int64, device=host_wire(group))
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    return torch.stack(theirs).T.tolist()


def gather_bytes(payload: bytes, *, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the payloads from all ranks, in rank order.

    Collective: call on every rank of ``group`` (None: all ranks).
    """
    if is_alone():
        return [payload]
    (lengths,) = gather_counts(len(payload), group=group)
    mine = torch.frombuffer(bytearray(payload.ljust(max(max(lengths), 1), b"\0")), dtype=torch.uint8).to(
        host_wire(group)
    )
    theirs = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(theirs, mine, group=group)
    return [their[:length].cpu().numpy().tobytes() for their, length in zip(theirs, lengths)]


def broadcast_bytes(payload: bytes | None, *, source: int = 0, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the payload from rank ``source`` of all ranks on every rank; the other ranks pass None.

    Collective: call on every rank of ``group`` (None: all ranks), which contains ``source``.
    """
    device = host_wire(group)
    if payload is not None:
        head = len(payload).to_bytes(8, "little") + payload[: _HEAD - 8]
        message = torch.frombuffer(bytearray(head.ljust(_HEAD, b"\0")), dtype=torch.uint8).to(device)
    else:
        message = torch.empty(_HEAD, dtype=torch.uint8, device=device)
    dist.broadcast(message, src=source, group=group)
    received = message.cpu().numpy().tobytes()
    length = int.from_bytes(received[:8], "little")
    if length <= _HEAD - 8:
        return received[8 : 8 + length]
    if payload is not None:
        rest = torch.frombuffer(bytearray(payload[_HEAD - 8 :]), dtype=torch.uint8).to(device)
    else:
        rest = torch.empty(length - (_HEAD - 8), dtype=torch.uint8, device=device)
    dist.broadcast(rest, src=source, group=group)
    return received[8:] + rest.cpu().numpy().tobytes()


def host_wire(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device for messages that the host reads, which is the CPU if one of the group's backends supports it."""
    return wire_device(torch.device("cpu"), group)
