"""Provides the names in ``accelerate.checkpointing``, implemented by echelon."""

from echelon.accelerator.checkpoint.accelerate_layout import (
    load_accelerator_state as load_accelerator_state,
    load_custom_state as load_custom_state,
    save_accelerator_state as save_accelerator_state,
    save_custom_state as save_custom_state,
)
