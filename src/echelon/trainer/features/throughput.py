"""Rates since the last log (``log_throughput=True``): samples, steps and tokens per second, and the model FLOPs utilization (MFU)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from echelon.base.peak_flops import peak_flops
from echelon.trainer.session import TrainerSession
from echelon.trainer.trainer_methods import TrainerMethods


class Throughput:
    """Counts the floating-point operations and tokens of a run's batches, and computes rates."""

    def __init__(self, trainer: TrainerMethods, session: TrainerSession) -> None:
        self._trainer = trainer
        self._is_logged = session.interface.counts_flops and trainer.args.log_throughput
        self._peak = self._find_peak() if self._is_logged else None
        self._flops, self._tokens = 0.0, 0  # of this rank since the last log
        self._logged_at = time.time()

    def start(self) -> None:
        """Start the first window."""
        self._logged_at = time.time()

    def add(self, inputs: Any) -> None:
        """Count one batch of this rank, of a model that knows its operations (``ModelInterface.counts_flops``)."""
        trainer = self._trainer
        flops = float(trainer.floating_point_ops(inputs))
        trainer.current_flos += flops
        if self._is_logged:
            self._flops += flops
            self._tokens += _num_tokens(trainer.model, inputs)

    def rates(self, *, num_steps: int, num_samples: int) -> dict[str, float]:
        """Return the rates of all ranks since the last call; those that are not known are left out.

        Collective if the model counts its operations.
        """
        now = time.time()
        seconds, self._logged_at = max(now - self._logged_at, 1e-9), now
        rates = {
            "samples_per_second": round(num_samples / seconds, 3),
            "steps_per_second": round(num_steps / seconds, 3),
        }
        if not self._is_logged:
            return rates
        accelerator = self._trainer.accelerator
        sums = torch.tensor([self._flops, self._tokens], dtype=torch.float64, device=accelerator.device)
        if accelerator.session.num_readers > 1:
            sums = accelerator.reduce(sums, "sum")
        flops, tokens = sums.tolist()
        self._flops, self._tokens = 0.0, 0
        if tokens:
            rates["tokens_per_second"] = round(tokens / seconds, 1)
        if flops and self._peak is not None:
            rates["mfu"] = round(flops / seconds / self._peak, 4)
        return rates

    def _find_peak(self) -> float | None:
        """Return the operations per second of all devices of the run; None if they, or the model's operations, are not known."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        parameters = list(trainer.model.parameters())
        low = accelerator.mixed_precision in ("bf16", "fp16") or all(p.dtype.itemsize == 2 for p in parameters)
        # Frozen weights need no gradients, but the formula of transformers counts them (6 operations per weight and token, not 4).
        if not low or not all(p.requires_grad for p in parameters):
            return None
        module: Any = torch.get_device_module(accelerator.device)
        if not hasattr(module, "get_device_name"):
            return None
        peak = peak_flops(module.get_device_name(accelerator.device))
        return None if peak is None else peak * accelerator.num_processes * accelerator.capabilities.num_devices


def _num_tokens(model: Any, inputs: Any) -> int:
    """Return the number of tokens in a batch, with padding; 0 if the model's main input has no token numbers."""
    name = getattr(model, "main_input_name", "input_ids")
    tokens = inputs.get(name) if isinstance(inputs, Mapping) else None
    if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point():
        return 0
    return tokens.numel()
