"""Provides the names in ``accelerate.optimizer``, implemented by echelon."""

from echelon.accelerator.update.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from echelon.distributed.structure import send_to_device as _send_to_device

move_to_device = _send_to_device
