"""Provides the names in ``accelerate.utils.imports``, implemented by echelon."""

from echelon.compat.probes import *
