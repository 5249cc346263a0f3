"""A short number for the contents of tensors: two that differ in one bit have different ones."""

from __future__ import annotations

import torch
import xxhash

from echelon.distributed.small_messages import bytes_of

__all__ = ["fingerprint"]


def fingerprint(tensor: torch.Tensor) -> int:
    """Return 63 bits of the xxh3 hash of dtype, shape and contents; of dtype and shape alone where there are no contents.

    It finds accidents, not attacks. A tensor on an accelerator is copied to the host.
    """
    found = xxhash.xxh3_64(f"{tensor.dtype} {list(tensor.shape)}".encode())
    tensor = tensor.detach()
    # Subclasses (sharded, quantised) keep their contents elsewhere, tensors on "meta" nowhere.
    if type(tensor) is torch.Tensor and not tensor.is_meta and tensor.numel():
        found.update(bytes_of(tensor.cpu()).numpy().data)
    return found.intdigest() >> 1
