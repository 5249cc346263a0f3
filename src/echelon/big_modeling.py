"""Re-exports the names of ``accelerate.big_modeling``."""

from echelon.accelerator.models.load_pretrained import (
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from echelon.compat import unsupported as _unsupported

_unsupported.add_names(globals())
