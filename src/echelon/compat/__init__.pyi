"""Public names, which `__init__.py` imports on first use."""

from echelon.compat.swap import install as install
