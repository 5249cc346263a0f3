"""The same random numbers on all ranks: states copied from rank zero."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from echelon.base.errors import UsageError
from echelon.distributed.collectives import broadcast

__all__ = ["synchronize_rng_state", "synchronize_rng_states"]


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Give every rank the random state of rank zero, for each of ``rng_types``.

    Args:
        rng_types: ``torch`` (the CPU's), ``generator``, or the type of an accelerator (``cuda``, ``xpu``, ...).
        generator: for ``generator``.

    Collective: every rank.

    Raises:
        UsageError: an unknown type, an accelerator that is not there, or ``generator`` without one.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the random state of rank zero, for one type. Collective. See ``synchronize_rng_states``."""
    kind = str(getattr(rng_type, "value", rng_type))
    if kind == "torch":
        torch.set_rng_state(broadcast(torch.get_rng_state()))
    elif kind == "generator":
        if generator is None:
            raise UsageError("rng_types holds 'generator', and there is no generator", do="give generator=")
        generator.set_state(broadcast(generator.get_state()))
    else:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type != kind:
            here = "torch, generator" + (f", {accelerator.type}" if accelerator is not None else "")
            raise UsageError(
                f"rng_types={kind!r} is not one of those that this machine has: {here}",
                where="rng_types",
                do=f"give some of {here}",
            )
        module: Any = torch.get_device_module(accelerator)
        module.set_rng_state(broadcast(module.get_rng_state()))
