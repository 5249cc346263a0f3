"""Provides the names in ``accelerate.utils.bnb``, implemented by echelon."""

from echelon.accelerator.models.quantize import (
    has_4bit_bnb_layers as has_4bit_bnb_layers,
    load_and_quantize_model as load_and_quantize_model,
)
from echelon.compat import unsupported as _unsupported

_unsupported.add_names(globals())
