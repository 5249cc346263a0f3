"""Writes torch's memory snapshots (``memory_snapshot=FOLDER``), which https://pytorch.org/memory_viz shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from echelon.accelerator import Accelerator
from echelon.base.errors import ConfigError
from echelon.base.logging import get_logger
from echelon.base.messages.translation import gettext_noop as N_

_MAX_EVENTS = 100_000  # the latest allocations and frees, with their stacks: some hundred MB of host memory at most
logger = get_logger(__name__)


@contextmanager
def memory_snapshot(folder: str, accelerator: Accelerator) -> Iterator[None]:
    """Record the allocations of this rank, and write ``FOLDER/memory-rank<r>.pickle`` at the end, also after an error.

    Raises:
        ConfigError: the device is no NVIDIA or AMD GPU, whose allocator alone keeps a history.
    """
    if accelerator.device.type != "cuda":
        raise ConfigError(
            f"memory_snapshot needs a CUDA or ROCm device, but this rank uses {accelerator.device}",
            where="TrainingArguments.memory_snapshot",
            do="remove it; an out-of-memory error names the largest tensors on any device",
        )
    # torch has no public names for the two functions that its documentation of memory snapshots describes.
    memory = torch.cuda.memory  # noqa: TID251 - the history of this allocator
    file = Path(folder) / f"memory-rank{accelerator.process_index}.pickle"
    file.parent.mkdir(parents=True, exist_ok=True)
    memory._record_memory_history(max_entries=_MAX_EVENTS)
    try:
        yield
    finally:
        memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
        memory._record_memory_history(enabled=None)
        shown = N_("wrote a memory snapshot to %s; https://pytorch.org/memory_viz shows it")
        logger.warning(shown, file, all_ranks=True)
