"""Level 1: native ``torch.distributed`` with safety checks."""

from echelon.compat import torch_required as _torch_required  # noqa: F401 - first, for its error
from echelon.distributed.collectives import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    mean_over_ranks,
    pad_across_processes,
    reduce,
)
from echelon.distributed.control import agree, barrier, main_first, rank_zero_only
from echelon.distributed.preemption import should_stop
from echelon.distributed.record.log import log, log_hyperparameters
from echelon.distributed.setup import cleanup, process_group, setup
from echelon.distributed.shard import ShardedLoader, shard
from echelon.launch.spawn import spawn

__all__ = [
    "ShardedLoader",
    "agree",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "cleanup",
    "gather",
    "gather_object",
    "log",
    "log_hyperparameters",
    "main_first",
    "mean_over_ranks",
    "pad_across_processes",
    "process_group",
    "rank_zero_only",
    "reduce",
    "setup",
    "shard",
    "should_stop",
    "spawn",
]
