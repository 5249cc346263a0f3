"""Re-exports the names of ``accelerate.optimizer``."""

from echelon.accelerator.update.optimizer import AcceleratedOptimizer as AcceleratedOptimizer
from echelon.distributed.structure import send_to_device as _send_to_device

move_to_device = _send_to_device
