"""Public names, which `__init__.py` imports on first use."""

from echelon.ecosystem.swap import install as install
