"""Other libraries' names, without echelon-specific behavior; ``install()`` makes echelon stand in for these libraries."""

from echelon.compat.reexports import lazy_names

# Without a call of install(), its module is not imported.
__getattr__, __dir__, __all__ = lazy_names(__name__, f"{__path__[0]}/__init__.pyi")
