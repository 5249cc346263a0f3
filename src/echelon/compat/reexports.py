"""Lazily loads the names listed in a stub file (PEP 562), so that each name is listed only once.

The ``lazy_loader`` package does this for relative imports, but takes as long to import as echelon itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType

__all__ = ["defined_names", "lazy_names", "public_names"]


def lazy_names(package: str, stub: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return a package's ``__getattr__``, ``__dir__`` and ``__all__``, built from the ``from a import b as c`` lines in
    its stub.

    Args:
        package: the package's dotted name. Submodules (``from package import b as b``) are not included in ``__all__``.
        stub: path of the ``.pyi`` file.
    """
    with open(stub, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    # Public name -> (module, name in the module).
    sources = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = sorted(name for name, (module, _) in sources.items() if module != package)

    def load(name: str) -> object:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = sources[name]
        try:
            value = (
                import_module(f"{package}.{name}") if module == package else getattr(import_module(module), attribute)
            )
        except ModuleNotFoundError as error:
            from echelon.base.optional import explain_missing_torch  # noqa: PLC0415 - needed only for this error

            raise explain_missing_torch(error) from None
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(names), names


def public_names(namespace: Mapping[str, object]) -> Iterator[str]:
    """Yield a module's names for ``import *``, without submodules, which might shadow modules such as ``random``."""
    for name, value in namespace.items():
        if name[0] != "_" and name != "TYPE_CHECKING" and not isinstance(value, ModuleType):
            yield name


def defined_names(namespace: Mapping[str, object]) -> Iterator[str]:
    """Yield the public names that are defined in the module itself."""
    for name in public_names(namespace):
        if getattr(namespace[name], "__module__", None) == namespace["__name__"]:
            yield name
