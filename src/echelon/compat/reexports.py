"""Lazy loading of the names that a stub file lists (PEP 562), so that each name is listed only once.

``lazy_loader`` does this for relative imports, but takes as long to import as echelon itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType

__all__ = ["defined_names", "lazy_names", "public_names"]


def lazy_names(package: str, stub: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package from the ``from a import b as c`` lines of its stub.

    Args:
        package: dotted name of the package. Submodules (``from package import b as b``) are not in ``__all__``.
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
        value = import_module(f"{package}.{name}") if module == package else getattr(import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(names), names


def public_names(namespace: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of a module for ``import *``, without submodules, which might shadow modules such as ``random``."""
    for name, value in namespace.items():
        if name[0] != "_" and name != "TYPE_CHECKING" and not isinstance(value, ModuleType):
            yield name


def defined_names(namespace: Mapping[str, object]) -> Iterator[str]:
    """Yield the public names that the module itself defines."""
    for name in public_names(namespace):
        if getattr(namespace[name], "__module__", None) == namespace["__name__"]:
            yield name
