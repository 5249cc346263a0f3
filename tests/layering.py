"""The rules that the source of echelon keeps, as functions from (path, source text) to the list of violations.

``path`` is relative to ``src/echelon``, with slashes. ``test_layering.py`` runs them over the tree and over planted violations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

__all__ = [
    "FACES",
    "LAYERS",
    "ROOT_FILES",
    "TORCH_FREE",
    "engine_branches",
    "environment_access",
    "eager_torch",
    "layer_of",
    "is_torch_free",
    "module_state",
    "more_than_reexports",
    "torch_cuda",
    "upward_imports",
    "violations",
]

# A module imports its own folder or a lower layer; folders on one layer do not see each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("compat",),
    ("config", "world"),
    ("status",),
    ("diagnose",),
    ("launch",),
    ("distributed",),
    ("precision", "data", "checkpoint", "trackers"),
    ("engines",),
    ("accelerator",),
    ("trainer",),
    ("testing",),
    ("cli",),
)
# Level 3 stands on the public names of Level 2 and of the checkpoints: what a user of these cannot do, the Trainer cannot either.
ONLY = {"trainer": frozenset({"base", "compat", "accelerator", "checkpoint"})}

# Module paths of accelerate that are kept so that its scripts run, and echelon.ray: re-exports only, outside the layers.
FACES = frozenset(
    {
        "big_modeling",
        "checkpointing",
        "commands",
        "data_loader",
        "hooks",
        "inference",
        "launchers",
        "local_sgd",
        "logging",
        "memory_utils",
        "optimizer",
        "parallelism_config",
        "ray",
        "scheduler",
        "state",
        "test_utils",
        "tracking",
        "utils",
    }
)
ROOT_FILES = frozenset({"__init__.py", "__main__.py", "_version.py"})

# What starts in milliseconds: these import without torch. Folders, or single modules.
TORCH_FREE = frozenset(
    {"base", "config", "status", "diagnose", "launch", "cli", "world/__init__.py", "world/environment.py"}
    | {f"compat/{name}.py" for name in ("__init__", "constants", "machine", "probes", "variables")}
)
# Torch's elastic agent is what these are made of; the rest of launch/ imports them when it starts processes.
TORCH_AT_IMPORT = frozenset({"launch/agent.py", "launch/multinode/rendezvous.py"})

ENVIRON_FILE = "base/environ.py"
DEVICE_FILE = "base/device.py"
ENGINE_NAMES = frozenset({"single", "dp", "ddp", "zero1", "fsdp2", "deepspeed"})
# Words of the field with other meanings, too (a mesh axis, one of something): an engine only beside an engine's variable.
_AMBIGUOUS_ENGINES = frozenset({"single", "dp"})
_OS_ENVIRON = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})
_MUTABLE_TYPES = frozenset(
    {
        "dict",
        "list",
        "set",
        "bytearray",
        "defaultdict",
        "deque",
        "Counter",
        "OrderedDict",
        "WeakKeyDictionary",
        "WeakSet",
    }
    | {"WeakValueDictionary", "ChainMap"}
)
_MUTATORS = frozenset(
    {
        "add",
        "append",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "sort",
        "update",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import:
    line: int
    module: str  # absolute dotted name; for `from a import b`, this is a
    name: str | None  # b


def violations(path: str, source: str) -> list[str]:
    """Return what every rule finds in the file."""
    rules = (
        upward_imports,
        environment_access,
        torch_cuda,
        engine_branches,
        eager_torch,
        module_state,
        more_than_reexports,
    )
    return [found for rule in rules for found in rule(path, source)]


def layer_of(folder: str) -> int | None:
    """Return the line of a folder; None for what is outside the layers."""
    return next((number for number, folders in enumerate(LAYERS) if folder in folders), None)


def upward_imports(path: str, source: str) -> list[str]:
    """Find imports that do not go down: function-level, TYPE_CHECKING and ``import_module("echelon...")`` included."""
    own = _folder(path)
    if path in ROOT_FILES or own in FACES:
        return []
    own_layer = layer_of(own)
    if own_layer is None:
        return [f"{path}:1: {own!r} is no folder of the layers and no face"]
    found = []
    for item in _imports(path, ast.parse(source)):
        target = _target_folder(item)
        if target is None or target == own:
            continue
        target_layer = layer_of(target)
        if target_layer is None:
            found.append(
                f"{path}:{item.line}: imports echelon.{target}, which is no folder of the layers: name the module itself"
            )
        elif target_layer > own_layer:
            found.append(f"{path}:{item.line}: {own} (layer {own_layer}) imports {target} (layer {target_layer}): up")
        elif target_layer == own_layer:
            found.append(f"{path}:{item.line}: {own} imports {target}: both are on layer {own_layer}")
        elif own in ONLY and target not in ONLY[own]:
            found.append(f"{path}:{item.line}: {own} imports {target}: it may use {', '.join(sorted(ONLY[own]))} only")
        elif own in ONLY and _is_private(item):
            found.append(f"{path}:{item.line}: {own} imports a private name of {target}")
    return found


def environment_access(path: str, source: str) -> list[str]:
    """Find uses of the process environment outside the one file that may."""
    if path == ENVIRON_FILE:
        return []
    tree = ast.parse(source)
    names = _names_of_module(tree, "os") | _names_of_module(tree, "posix")
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in _OS_ENVIRON and _is_name(node.value, names))
        or (isinstance(node, ast.Call) and _is_getattr_of_environ(node, names))
    ]
    lines += [item.line for item in _imports(path, tree) if item.module in ("os", "posix") and item.name in _OS_ENVIRON]
    return [f"{path}:{line}: the environment is read and written in {ENVIRON_FILE} only" for line in sorted(lines)]


def torch_cuda(path: str, source: str) -> list[str]:
    """Find ``torch.cuda`` outside the one table of devices."""
    if path == DEVICE_FILE:
        return []
    tree = ast.parse(source)
    names = _names_of_module(tree, "torch")
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "cuda" and _is_name(node.value, names)
    ]
    for item in _imports(path, tree):
        full = item.module if item.name is None else f"{item.module}.{item.name}"
        if full == "torch.cuda" or full.startswith("torch.cuda."):
            lines.append(item.line)
    return [f"{path}:{line}: torch.cuda: ask {DEVICE_FILE} (or torch.accelerator)" for line in sorted(lines)]


def engine_branches(path: str, source: str) -> list[str]:
    """Find decisions on which engine runs, outside ``engines/``: what callers may know is data (Capabilities)."""
    if _folder(path) == "engines":
        return []
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            beside_engine = any("engine" in ast.unparse(side).lower() for side in sides)
            names = {text for side in sides for text in _strings(side)} & ENGINE_NAMES
            if names - (set() if beside_engine else _AMBIGUOUS_ENGINES) or any(map(_is_distributed_type, sides)):
                lines.append(node.lineno)
        elif isinstance(node, ast.Match):
            beside_engine = "engine" in ast.unparse(node.subject).lower()
            names = {text for case in node.cases for text in _strings(case.pattern)} & ENGINE_NAMES
            if names - (set() if beside_engine else _AMBIGUOUS_ENGINES) or _is_distributed_type(node.subject):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and _is_name(node.func, {"isinstance"}) and len(node.args) == 2:
            classes = [n for n in ast.walk(node.args[1]) if isinstance(n, ast.Name | ast.Attribute)]
            words = {n.id if isinstance(n, ast.Name) else n.attr for n in classes}
            if any(word.endswith("Engine") and word != "Engine" for word in words):
                lines.append(node.lineno)
    return [f"{path}:{line}: a branch on the engine outside engines/" for line in sorted(lines)]


def eager_torch(path: str, source: str) -> list[str]:
    """Find imports of torch that run when a torch-free module is imported."""
    if not is_torch_free(path):
        return []
    eager = [i for i in _imports(path, ast.parse(source), deferred=False) if i.module.partition(".")[0] == "torch"]
    return [f"{path}:{item.line}: imports torch at import, and is torch-free" for item in eager]


def is_torch_free(path: str) -> bool:
    """Tell whether the module must import without torch."""
    return (path in TORCH_FREE or _folder(path) in TORCH_FREE) and path not in TORCH_AT_IMPORT


def module_state(path: str, source: str) -> list[str]:
    """Find mutable values of a module or class: a container that is no CONSTANT, a CONSTANT that is changed, a ``global``."""
    tree = ast.parse(source)
    found = []
    constants = set()
    for node in _module_level(tree):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            if name.isupper():
                constants.add(name)
            elif name not in ("__all__", "__slots__") and _is_mutable(value):
                found.append(f"{path}:{node.lineno}: {name} is mutable and lives as long as the process")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(f"{path}:{node.lineno}: global {', '.join(node.names)}")
        elif (changed := _changed_name(node)) in constants:
            found.append(f"{path}:{node.lineno}: {changed} is a constant and is changed")
    return found


def more_than_reexports(path: str, source: str) -> list[str]:
    """Find functions, classes and computed values in a compatibility module or an ``__init__.py``."""
    may_call = path == "__init__.py" or _folder(path) in FACES
    if not may_call and not path.endswith("/__init__.py"):
        return []
    return [
        f"{path}:{node.lineno}: re-exports only: no code here"
        for node in ast.parse(source).body
        if not _is_reexport(node, may_call=may_call)
    ]


def _is_reexport(node: ast.stmt, *, may_call: bool) -> bool:
    """Is it an import, a docstring, ``__all__``; in compatibility modules also an alias or a call of ``compat/``?"""
    if isinstance(node, ast.If):
        return _is_type_checking(node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test) and all(
            _is_reexport(child, may_call=may_call) for child in node.body + node.orelse
        )
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or (may_call and isinstance(node.value, ast.Call))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        is_alias = may_call and isinstance(node.value, ast.Name | ast.Call)
        return is_alias or all(_is_name(target, {"__all__"}) for target in targets)
    return isinstance(node, ast.Import | ast.ImportFrom)


def _imports(path: str, tree: ast.Module, *, deferred: bool = True) -> Iterator[_Import]:
    """Yield the imports of a file; without ``deferred``, only those that run when the file is imported."""
    package = ["echelon", *PurePosixPath(path).parent.parts]
    for node in ast.walk(tree) if deferred else _run_at_import(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(line=node.lineno, module=alias.name, name=None)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield _Import(line=node.lineno, module=module, name=alias.name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "import_module",
            "__import__",
        ):
            text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if isinstance(text, str):
                yield _Import(line=node.lineno, module=text, name=None)


def _target_folder(item: _Import) -> str | None:
    """Return the folder of echelon that an import reaches; None for the rest of the world."""
    parts = item.module.split(".")
    if parts[0] != "echelon":
        return None
    if len(parts) > 1:
        return None if parts[1] == "_version" else parts[1]
    if item.name == "__version__":
        return None
    return item.name or "__init__"


def _is_private(item: _Import) -> bool:
    parts = [*item.module.split("."), *([item.name] if item.name else [])]
    return any(part.startswith("_") for part in parts)


def _folder(path: str) -> str:
    return PurePosixPath(path).parts[0].removesuffix(".py")


def _run_at_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for other in node.orelse:
                yield other
                yield from _run_at_import(other)
            continue
        yield node
        yield from _run_at_import(node)


def _module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in _run_at_import(tree):
        if isinstance(node, ast.stmt) and not isinstance(node, ast.ClassDef):
            yield node


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _names_of_module(tree: ast.Module, module: str) -> set[str]:
    """Return the names under which a file knows ``module``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == module and alias.asname:
                    names.add(alias.asname)
                elif alias.name.partition(".")[0] == module and not alias.asname:
                    names.add(module)
    return names


def _is_name(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _is_getattr_of_environ(node: ast.Call, names: set[str]) -> bool:
    return (
        _is_name(node.func, {"getattr"})
        and len(node.args) >= 2
        and _is_name(node.args[0], names)
        and isinstance(node.args[1], ast.Constant)
        and node.args[1].value in _OS_ENVIRON
    )


def _strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _is_distributed_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and (
        node.attr == "distributed_type" or _is_name(node.value, {"DistributedType"})
    )


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    return (
        isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2].partition("[")[0] in _MUTABLE_TYPES
    )


def _changed_name(node: ast.AST) -> str | None:
    """Return the plain name whose container ``node`` changes: ``NAME[key] = ..``, ``del NAME[key]``, ``NAME.append(..)``."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
    ):
        return node.value.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return None
