"""Writes tests/data/accelerate_names.json from the installed accelerate; run it with ``.venv-peers/bin/python``.

``names``: what each public module defines (its packages: what they re-export). ``signatures``: of each class, method and
function among them, the parameters without annotations. ``properties``: of each class.
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMES = ROOT / "tests" / "data" / "accelerate_names.json"
PACKAGE = "accelerate"
COMMANDS = ("commands", "commands.config", "commands.config.config_args", "commands.config.default")
# In addition to the commands: the test scripts, and modules that need another library.
NOT_INSTALLED = ("utils.rich", "utils.torch_xla")
LEFT_OUT = ("accelerator", "commands", "test_utils")
CLASSES = {"accelerator": ["Accelerator"]}  # the other names of echelon.accelerator are not accelerate's


def modules(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        if name in COMMANDS or (name != "__init__" and name.split(".")[0] not in LEFT_OUT):
            yield name


def defined(path: Path) -> set[str]:
    """Return the public names that a module defines, and for a package also those that it imports."""
    found: dict[bool, set[str]] = {True: set(), False: set()}  # keys: whether the name is defined here
    imports_count = path.name == "__init__.py"
    for node in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[True].add(node.name)
        elif isinstance(node, ast.Assign):
            found[True].update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and node.level > 0:
            found[False].update(alias.asname or alias.name for alias in node.names)
    names = found[True] | found[False] if imports_count else found[True]
    return {name for name in names if not name.startswith("_") and name != "logger"}


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])


def signatures(module: str, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    source = import_module(f"{PACKAGE}.{module}")
    for name in names:
        value = getattr(source, name, None)
        if getattr(value, "__module__", None) != source.__name__ or isinstance(value, enum.EnumMeta):
            continue
        if isinstance(value, type):
            if isinstance(value.__init__, FunctionType):
                yield f"{module}:{name}", parameters(value.__init__)
            for method, function in vars(value).items():
                function = getattr(function, "__func__", function)
                if isinstance(function, FunctionType) and not method.startswith("_"):
                    yield f"{module}:{name}.{method}", parameters(function)
        elif isinstance(value, FunctionType):
            yield f"{module}:{name}", parameters(value)


def properties(module: str, names: list[str]) -> Iterator[tuple[str, list[str]]]:
    source = import_module(f"{PACKAGE}.{module}")
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, type) and value.__module__ == source.__name__:
            own = [attribute for attribute, what in vars(value).items() if isinstance(what, property)]
            if own:
                yield f"{module}:{name}", sorted(own)


def parameters(value: Callable[..., Any]) -> list[str]:
    """Return the parameters of ``value`` as text, such as ``["self", "tensor", "reduction='sum'", "*", "strict=False"]``."""
    result: list[str] = []
    for parameter in inspect.signature(undecorated(value)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in result):
            result.append("*")
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={text_of(parameter.default)}"
        result.append(f"{star}{parameter.name}{default}")
    return result


def undecorated(value: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a decorator without functools.wraps wraps under the same name (accelerate's on_main_process)."""
    for cell in getattr(value, "__closure__", None) or ():
        if isinstance(cell.cell_contents, FunctionType) and cell.cell_contents.__qualname__.count(".") == 1:
            return cell.cell_contents
    return value


def text_of(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return repr(default.value)
    if callable(default):
        return f"<{default.__name__}>"
    text = repr(default).replace(str(Path.home()), "~")
    return "<object>" if " at 0x" in text else text


def main() -> None:
    folder = Path(import_module(PACKAGE).__file__ or "").parent
    names = {}
    for name in modules(folder):
        path = folder.joinpath(*name.split("."))
        names[name] = sorted(defined(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")))
    names["memory_utils"] = names["utils.memory"]  # its file only warns that the module has moved
    found: dict[str, list[str]] = {}
    found_properties: dict[str, list[str]] = {}
    for module, listed in {**names, **CLASSES}.items():
        if module not in NOT_INSTALLED:
            found.update(signatures(module, listed))
            found_properties.update(properties(module, listed))
    # One line per name and per signature, so that a diff shows the changes of a new version.
    parts = [f'"names": {json.dumps(names, indent=0)}']
    for part, table in {"properties": found_properties, "signatures": found}.items():
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
        parts.append(f'"{part}": {{\n{lines}\n}}')
    NAMES.write_text("{" + ",\n".join(parts) + "}\n")


if __name__ == "__main__":
    main()
