"""Re-exports the names of ``accelerate.inference``."""

from echelon.compat import unsupported as _unsupported

_unsupported.add_names(globals())
