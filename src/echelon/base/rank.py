"""The rank of this process as far as it is known, for use in errors and logs; does not import torch."""

from __future__ import annotations

import sys

from echelon.base import environ


def known_rank() -> int | None:
    """Return the rank in torch's default process group if it exists, else the rank from the environment, else None."""
    distributed = sys.modules.get("torch.distributed")
    # The attribute is missing while another thread is importing the module.
    is_initialized = getattr(distributed, "is_initialized", None)
    if distributed is not None and is_initialized is not None and is_initialized():
        return int(distributed.get_rank())
    return environ.process_rank()
