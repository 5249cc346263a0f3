"""Provides the names in ``accelerate.state``, implemented by echelon."""

from echelon.accelerator.gradient_state import GradientState as GradientState
from echelon.accelerator.state import (
    AcceleratorState as AcceleratorState,
    PartialState as PartialState,
    is_initialized as is_initialized,
)
