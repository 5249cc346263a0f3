"""Re-exports the names of ``accelerate.utils.rich``."""

from echelon.compat.rich_tracebacks import install as install
