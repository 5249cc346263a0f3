"""Sends small messages (counts and bytes) between ranks, on a device that one of the group's backends supports."""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash

from echelon.base.errors import UsageError
from echelon.base.messages.translation import gettext as _
from echelon.distributed.alone import is_alone

_HEAD = 256  # bytes of the first message; a longer payload needs a second one


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor`` as uint8 [number of bytes], as a view if the tensor is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single value of a larger tensor is contiguous, but torch cannot view it as bytes
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def fingerprint(tensor: torch.Tensor) -> int:
    """Return 63 bits of the xxh3 hash of dtype, shape and contents, or of dtype and shape if the contents are not available.

    It detects accidents, not attacks. A tensor on an accelerator is copied to the host.
    """
    found = xxhash.xxh3_64(f"{tensor.dtype} {list(tensor.shape)}".encode())
    tensor = tensor.detach()
    # Subclasses (sharded, quantized) store their contents elsewhere, and meta tensors have none.
    if type(tensor) is torch.Tensor and not tensor.is_meta and tensor.numel():
        found.update(bytes_of(tensor.cpu()).numpy().data)
    return found.intdigest() >> 1


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


def ranks_of(group: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks in ``group``, in group order."""
    if group is None:
        group = dist.group.WORLD  # torch 2.7 does not accept None here
        assert group is not None
    return dist.get_process_group_ranks(group)


def wire_device(device: torch.device, group: dist.ProcessGroup | None) -> torch.device:
    """Return the device to move a tensor to for a collective, which is ``device`` itself if a backend supports it.

    Raises:
        UsageError: there is no process group.
    """
    backends = backends_of(group)
    if device.type in backends:
        return device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and accelerator.type in backends:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend for each device type, such as ``{"cpu": "gloo", "cuda": "nccl"}``."""
    if not dist.is_initialized():
        raise UsageError(_("there is no process group"), do=_("call echelon.distributed.setup() first"))
    pairs = dist.get_backend_config(group).split(",")
    return dict(pair.split(":", 1) for pair in pairs)
