"""Re-exports the names of ``accelerate.hooks``."""

from echelon.compat import unsupported as _unsupported

_unsupported.add_names(globals())
