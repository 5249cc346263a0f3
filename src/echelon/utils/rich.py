"""Provides the names in ``accelerate.utils.rich``, implemented by echelon."""

from echelon.compat.rich_tracebacks import install as install
