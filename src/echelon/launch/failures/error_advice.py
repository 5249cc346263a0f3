"""What to do about errors of torch whose own messages do not say it in the words of a script that uses echelon."""

from __future__ import annotations

__all__ = ["advice_for"]

_WHOLE = (
    "take whole tensors from x.full_tensor() (on every rank), and whole weights from accelerator.get_state_dict(model)"
)
_NO_GPU = (
    "there is no GPU here, or torch was built without: write x.to(accelerator.device) for x.cuda() and x.to('cuda') (at Level 1, "
    "setup().device); prepare() moves models and batches there by itself"
)
_PICKLE = (
    "the workers of the DataLoader are new processes, to which this cannot be sent: open files, locks and connections in "
    "__getitem__, when they are first needed, put functions at the top of a module, or use num_workers=0"
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
        "a tensor of a sharded model (engine fsdp2) met a plain one: call the model that prepare() returned, not a module inside "
        f"it; {_WHOLE}",
    ),
    (
        "is not supported for tensor subclasses",
        f"this is a tensor of a sharded model (engine fsdp2), of which each rank has a part: {_WHOLE}",
    ),
    (
        "out of bounds for storage of size 0",
        "a backward pass needed parameters that a sharded model (engine fsdp2) has given back: gradients of gradients "
        "(create_graph=True) need engine='ddp' or 'zero1'",
    ),
    (
        "Expected to mark a variable ready only once",
        "a parameter was used twice in one backward pass (checkpointed layers: use_reentrant=False, or DistributedDataParallelKwargs("
        "static_graph=True)), or was frozen in a compiled model after prepare(): choose what trains before",
    ),
    (
        "Expected to have finished reduction in the prior iteration",
        "some parameters did not take part in the loss of the step before: give Accelerator(kwargs_handlers="
        "[DistributedDataParallelKwargs(find_unused_parameters=True)]), or freeze them before the forward pass",
    ),
)


def advice_for(message: str) -> str | None:
    """Return what to do about an exception with this message; None: it says enough, or nobody knows."""
    return next((advice for part, advice in _ADVICE if part in message), None)
