"""Checks that DistributedDataParallel averaged all gradients and is not waiting for parameters the loss does not use."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from echelon.base.errors import UsageError
from echelon.base.warnings import user_line
from echelon.distributed.torch_hooks import is_in_backward

__all__ = ["require_finished_reduction"]

_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_MAX_NAMES = 4


def require_finished_reduction(wrapper: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> None:
    """Check that the last backward pass reduced the gradients of all ``parameters`` that ``wrapper`` was built with.

    DDP itself checks this only in the next forward pass, after an optimizer step has used one rank's local gradients.

    Raises:
        UsageError: some of the parameters received no gradient.
    """
    if is_in_backward():
        return
    try:
        wrapper._check_reducer_finalized()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        name_of = {id(p): name for name, p in wrapper.module.named_parameters()}
        reduced = [p for p in parameters if name_of.get(id(p)) not in wrapper.parameters_to_ignore]
        found = _INDICES.search(str(error))
        unused = [reduced[int(i)] for i in found[1].split() if int(i) < len(reduced)] if found else []
        names = [name_of.get(id(p), "a removed parameter") for p in unused]
        shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if names[_MAX_NAMES:] else "")
        raise UsageError(
            f"{len(names) or 'some'} of the {len(reduced)} trainable parameters received no gradient in the last backward pass"
            f"{': ' if shown else ''}{shown}. DDP waits for them and has not averaged all gradients across ranks",
            where=f"{type(wrapper.module).__name__} under DistributedDataParallel, {user_line()}",
            do="if the loss does not always depend on them, use Accelerator(kwargs_handlers=[DistributedDataParallelKwargs("
            "find_unused_parameters=True)]) or TrainingArguments(ddp_find_unused_parameters=True). If it never does, call "
            "parameter.requires_grad_(False) before prepare()",
        ) from error
