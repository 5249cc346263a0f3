"""The names of ``accelerate.utils.imports``."""

from echelon.compat.probes import *
