"""Provides the names in ``accelerate.utils.fsdp_utils``, implemented by echelon."""

from echelon.checkpoint.formats.merged_weights import merge_fsdp_weights as merge_fsdp_weights
from echelon.compat import unsupported as _unsupported
from echelon.config.library_variables import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)

_unsupported.add_names(globals())
