"""One PyTorch training script, three levels of abstraction, any number of ranks, provably the same run."""

from echelon._version import __version__ as __version__
from echelon.compat.reexports import lazy_names

# `__init__.pyi` lists the public names. `import echelon` takes milliseconds, and `echelon --help` never imports torch.
__getattr__, __dir__, __all__ = lazy_names(__name__, f"{__path__[0]}/__init__.pyi")
__all__ += ["distributed", "ray"]  # the submodules that `from echelon import *` includes
