"""Advice for torch errors whose messages do not tell an echelon user what to do."""

from __future__ import annotations

__all__ = ["advice_for"]

_WHOLE = (
    "get full tensors with x.full_tensor() (call it on every rank) and full weights with "
    "accelerator.get_state_dict(model)"
)
_NO_GPU = (
    "replace x.cuda() and x.to('cuda') with x.to(accelerator.device) (at Level 1, setup().device), because this "
    "machine has no GPU "
    "or torch was built without CUDA; prepare() moves models and batches itself"
)
_PICKLE = (
    "make the object picklable for the DataLoader workers (create files, locks and connections on first use in "
    "__getitem__; define functions at module level), or set num_workers=0"
)
_OUT_OF_MEMORY = (
    "use a smaller micro-batch and gradient_accumulation_steps, which keep the batch of an update; store fewer activations "
    "(model.gradient_checkpointing_enable(), or activation_checkpointing in the sharding settings); use mixed_precision='bf16'; with "
    "several devices, shard the model and the optimizer (engine='fsdp2'). If the message says that much memory is reserved but "
    "unallocated, set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
_ASYNCHRONOUS = "run again with CUDA_LAUNCH_BLOCKING=1: the device reports errors late, so the line above is often not the one that failed"
_ADVICE = (
    # "out of memory" is part of the message of torch.OutOfMemoryError, and of cudaMalloc's for memory outside torch's allocator.
    ("out of memory", _OUT_OF_MEMORY),
    (
        "device-side assert triggered",
        f"{_ASYNCHRONOUS}. The assertion is in the rank's output; most often an index or a label is out of range (token numbers up "
        "to the size of the embedding, class labels up to the number of outputs)",
    ),
    (
        "an illegal memory access was encountered",
        f"{_ASYNCHRONOUS}. A kernel read or wrote outside its tensors: look at custom kernels first; compute-sanitizer names the access",
    ),
    ("CUDA error", _ASYNCHRONOUS),
    ("Torch not compiled with CUDA enabled", _NO_GPU),
    ("Found no NVIDIA driver", _NO_GPU),
    ("No CUDA GPUs are available", _NO_GPU),
    ("cannot pickle", _PICKLE),
    ("Can't pickle", _PICKLE),
    ("Can't get local object", _PICKLE),
    (
        "got mixed torch.Tensor and DTensor",
        "call the model that prepare() returned, not one of its submodules; a sharded tensor (fsdp2 engine) was "
        f"combined with a plain tensor; {_WHOLE}",
    ),
    (
        "is not supported for tensor subclasses",
        f"each rank holds only a shard of this tensor (fsdp2 engine); {_WHOLE}",
    ),
    (
        "out of bounds for storage of size 0",
        "use engine='ddp' or 'zero1' for second-order gradients (create_graph=True); the backward pass needed "
        "parameters that the fsdp2 engine had already resharded",
    ),
    (
        "Expected to mark a variable ready only once",
        "a parameter was used twice in one backward pass (for checkpointed layers, use use_reentrant=False or DistributedDataParallelKwargs("
        "static_graph=True)), or it was frozen in a compiled model after prepare() (freeze it before prepare())",
    ),
    (
        "Expected to have finished reduction in the prior iteration",
        "some parameters did not contribute to the loss of the previous step; use Accelerator(kwargs_handlers="
        "[DistributedDataParallelKwargs(find_unused_parameters=True)]), or freeze them before the forward pass",
    ),
)


def advice_for(message: str) -> str | None:
    """Return advice for an exception with this message, or None if there is none."""
    return next((advice for part, advice in _ADVICE if part in message), None)
