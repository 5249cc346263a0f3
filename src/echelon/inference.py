"""Provides the names in ``accelerate.inference``, implemented by echelon."""

from echelon.compat import unsupported as _unsupported

_unsupported.add_names(globals())
