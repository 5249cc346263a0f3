"""Hashes of tensor contents."""

from __future__ import annotations

import torch
import xxhash

from echelon.distributed.small_messages import bytes_of

__all__ = ["fingerprint"]


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
