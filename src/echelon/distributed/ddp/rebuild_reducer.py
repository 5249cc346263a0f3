"""Rebuilds the reducer of a DistributedDataParallel model."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

__all__ = ["rebuild_reducer"]


def rebuild_reducer(wrapper: Any) -> None:
    """Rebuild DDP's reducer for its module's current parameters, keeping its options and hooks.

    Source: DistributedDataParallel.__setstate__, which does this after unpickling.
    """
    ignored = wrapper.parameters_to_ignore
    wrapper._module_parameters = [p for name, p in wrapper.module.named_parameters() if name not in ignored]
    parameters, is_sparse = wrapper._build_params_for_reducer()
    if not parameters:
        return
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, is_sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False  # the first backward pass records the graph
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    hooks = list(wrapper._comm_hooks)
    wrapper._comm_hooks.clear()
    for hook, state in hooks:
        if isinstance(state, PowerSGDState):  # its tensors belong to the old buckets
            for kept in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                kept.clear()
        wrapper.register_comm_hook(state, hook)
