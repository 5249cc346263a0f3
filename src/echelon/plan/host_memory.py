"""Peaks of host memory while a model is loaded, trained with offloading and saved, and the bytes of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.plan.facts import Cluster, ModelFacts, ParallelLayout, StepTrace
from echelon.plan.holdings import Holding, state_as_stored, tensor_bytes
from echelon.plan.sizes import buffer_dtype, has_masters, item_bytes, numel, stored_dtype


def host_memory(
    model: ModelFacts, trace: StepTrace, layout: ParallelLayout, cluster: Cluster, held: Sequence[Holding]
) -> Mapping[str, int]:
    """Return peaks by what happens: at load, at save, and of what is offloaded, of rank zero and of a machine.

    At load, each rank builds the whole model in host memory before ``prepare`` moves or shards it. At save, ``save_state`` streams what a
    rank writes, one tensor at a time; ``save_model`` of sharded weights gathers all of them on rank zero.
    """
    per_machine = min(layout.world, cluster.gpus_per_node)
    whole = loaded_bytes(model)
    largest = max((_stored_bytes(model, layout)), default=0)
    gathers = layout.engine == "fsdp2" or (layout.engine == "deepspeed" and layout.stage == 3)
    at_save = sum(_stored_bytes(model, layout)) if gathers else largest
    if layout.engine == "deepspeed" and layout.stage > 0:  # its state is gathered on rank zero
        at_save = checkpoint_bytes(model, layout)
    found = {
        "rank 0 at load": whole,
        "a machine at load": whole * per_machine,
        "rank 0 at save": at_save,
        "a machine at save": at_save + largest * (per_machine - 1),
    }
    offloaded = sum(h.num_bytes for h in held if h.on_host)
    offloaded += max((moment.offloaded for moment in trace.moments), default=0) // layout.cp
    if offloaded:
        found["offload, a rank"] = offloaded
        found["offload, a machine"] = offloaded * per_machine
    return found


def loaded_bytes(model: ModelFacts) -> int:
    """Return the bytes of the model as it is loaded."""
    tensors = [*(p.tensor for p in model.parameters), *model.buffers]
    return sum(t.storage_bytes or numel(t.shape) * item_bytes(t.dtype) for t in tensors)


def _stored_bytes(model: ModelFacts, layout: ParallelLayout) -> list[int]:
    masters = has_masters(model, layout)
    weights = [
        p.tensor.storage_bytes or numel(p.tensor.shape) * item_bytes(stored_dtype(p, masters=masters))
        for p in model.parameters
    ]
    return weights + [
        b.storage_bytes or numel(b.shape) * item_bytes(buffer_dtype(b, masters=masters)) for b in model.buffers
    ]


def checkpoint_bytes(model: ModelFacts, layout: ParallelLayout) -> int:
    """Return the bytes of the tensors in a checkpoint of ``save_state``: weights, buffers and optimizer state, each once."""
    masters = has_masters(model, layout)
    state = sum(
        tensor_bytes(state_as_stored(tensor, p, stored_dtype(p, masters=masters)))
        for p in model.parameters
        for tensor in p.state
    )
    return sum(_stored_bytes(model, layout)) + state
