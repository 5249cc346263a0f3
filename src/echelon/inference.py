"""Provides the names in ``accelerate.inference``, implemented by echelon."""

from echelon.accelerator.models.prepare_pippy import prepare_pippy as prepare_pippy
from echelon.compat import unsupported as _unsupported

_unsupported.add_names(globals())
