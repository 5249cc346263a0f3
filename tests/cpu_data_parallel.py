"""Runs the code of torch.nn.DataParallel on several simulated devices, all of which are the CPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter_gather

from echelon.accelerator.setup import local_devices as plain_process
from echelon.engines import dp


@contextmanager
def cpu_devices(count: int) -> Iterator[None]:
    """Make DataParallel and the engine dp see ``count`` devices; copies to a device are clones."""
    plain_init = nn.DataParallel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        self.src_device_obj = torch.device("cpu")

    # Functions of the same names shadow these modules.
    wrapper, copying = (sys.modules[f"torch.nn.parallel.{name}"] for name in ("data_parallel", "replicate"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (dp, plain_process):
            patch.setattr(module, "devices_from", lambda device: list(range(count)))
        patch.setattr(nn.DataParallel, "__init__", init)
        patch.setattr(wrapper, "_get_available_device_type", lambda: "cpu")
        patch.setattr(wrapper, "_get_all_device_indices", lambda: list(range(count)))
        patch.setattr(wrapper, "_get_device_index", lambda index, *_: index)
        patch.setattr(wrapper, "parallel_apply", _in_threads)
        patch.setattr(copying, "_get_device_index", lambda index, *_: index)
        patch.setattr(copying, "_broadcast_coalesced_reshape", _clones)
        patch.setattr(scatter_gather, "Scatter", _Chunks)
        patch.setattr(scatter_gather, "Gather", _Joined)
        yield


def _clones(tensors: Any, devices: Any, detach: bool = False) -> list[list[torch.Tensor]]:
    return [[t.detach().clone() if detach else t.clone() for t in tensors] for _ in devices]


def _in_threads(replicas: Any, inputs: Any, kwargs: Any, devices: Any) -> list[Any]:
    assert len(replicas) == len(inputs) == len(kwargs) == len(devices)
    grad_enabled, results = torch.is_grad_enabled(), [None] * len(replicas)

    def run(i: int) -> None:
        torch.set_grad_enabled(grad_enabled)  # thread-local
        try:
            results[i] = replicas[i](*inputs[i], **kwargs[i])
        except Exception as error:  # noqa: BLE001 - raised in the main thread, as in torch
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class _Chunks:
    """Split a batch like torch does, into fewer parts if there are fewer samples."""

    @staticmethod
    def apply(devices: Any, _sizes: Any, dim: int, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.chunk(len(devices), dim)


class _Joined:
    @staticmethod
    def apply(_device: Any, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.view(1) if t.dim() == 0 else t for t in tensors], dim)
