"""Re-exports the names of ``accelerate.utils.imports``."""

from echelon.compat.probes import *
