"""Names of other libraries, without behavior specific to echelon; ``install()`` puts echelon in the place of the libraries."""

from echelon.compat.reexports import lazy_names

# Without a call of install(), its module is not imported.
__getattr__, __dir__, __all__ = lazy_names(__name__, f"{__path__[0]}/__init__.pyi")
