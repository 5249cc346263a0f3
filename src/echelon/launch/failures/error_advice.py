"""Advice for torch errors whose messages do not tell a user of echelon what to do."""

from __future__ import annotations

__all__ = ["advice_for"]

_WHOLE = (
    "get full tensors with x.full_tensor() (on every rank), and full weights with accelerator.get_state_dict(model)"
)
_NO_GPU = (
    "replace x.cuda() and x.to('cuda') by x.to(accelerator.device) (at Level 1, setup().device), because this machine has no GPU "
    "or torch was built without CUDA; prepare() moves models and batches itself"
)
_PICKLE = (
    "make the object picklable for the DataLoader workers: open files, locks and connections in __getitem__ on first "
    "use, define functions at the top level of a module, or use num_workers=0"
)
_ADVICE = (
    ("Torch not compiled with CUDA enabled", _NO_GPU),
    ("Found no NVIDIA driver", _NO_GPU),
    ("No CUDA GPUs are available", _NO_GPU),
    ("cannot pickle", _PICKLE),
    ("Can't pickle", _PICKLE),
    ("Can't get local object", _PICKLE),
    (
        "got mixed torch.Tensor and DTensor",
        "call the model that prepare() returned, not one of its submodules; a sharded tensor (engine fsdp2) was combined with a "
        f"plain one; {_WHOLE}",
    ),
    (
        "is not supported for tensor subclasses",
        f"each rank holds only a shard of this tensor (engine fsdp2); {_WHOLE}",
    ),
    (
        "out of bounds for storage of size 0",
        "use engine='ddp' or 'zero1' for second-order gradients (create_graph=True); the backward pass needed parameters that "
        "engine fsdp2 had resharded",
    ),
    (
        "Expected to mark a variable ready only once",
        "a parameter was used twice in one backward pass (for checkpointed layers, use use_reentrant=False or DistributedDataParallelKwargs("
        "static_graph=True)), or was frozen in a compiled model after prepare() (freeze it before)",
    ),
    (
        "Expected to have finished reduction in the prior iteration",
        "some parameters did not contribute to the loss of the previous step; use Accelerator(kwargs_handlers="
        "[DistributedDataParallelKwargs(find_unused_parameters=True)]), or freeze them before the forward pass",
    ),
)


def advice_for(message: str) -> str | None:
    """Return advice for an exception with this message, or None."""
    return next((advice for part, advice in _ADVICE if part in message), None)
