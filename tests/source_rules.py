"""Rules for the source of echelon that no tool covers, as functions from source text to a list of violations.

Import directions are contracts of import-linter, `os.environ` and `torch.cuda` are banned names of ruff: pyproject.toml.
``path`` is relative to ``src/echelon``, with slashes. ``test_layering.py`` runs the rules over the source and over deliberate violations.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

from echelon.compat.transformers_names import TRAINER_MEMBERS

# Module paths of accelerate, kept so that its scripts run, and echelon.ray. They only contain re-exports, outside the layers.
COMPATIBILITY_MODULES = frozenset(
    [
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
        "tracking",
        "utils",
    ]
)
# The folders that read and write variables, and the other files that may, with the reason.
_ENVIRONMENT_FOLDERS = ("config", "world", "launch")
ENVIRONMENT_USERS = {
    "base/environ.py": "the accessor; the modules of base/ that need one fact call its functions for it",
    "compat/variables.py": "accelerate's public functions that read, patch and clear variables of any name",
    "compat/probes.py": "accelerate's is_..._available() depend on variables of their own, and torch's probe needs one",
    "plan/capture.py": "tells the trackers of a script that runs without memory to write nothing",
    "ecosystem/swap.py": "install() tells the processes that this one starts, which echelon does not launch",
    "cli/help/completion.py": "the words that a shell hands to click's completion, and click reads from there",
}
_ACCESSORS = frozenset({"get", "own", "patch", "restored", "snapshot", "write"})
_VARIABLE_FUNCTIONS = frozenset(
    ("clear_environment", "get_int_from_env", "parse_choice_from_env", "parse_flag_from_env", "patch_environment")
)
ENGINE_NAMES = frozenset({"single", "dp", "ddp", "zero1", "fsdp2", "deepspeed"})
# Terms that also have other meanings (a mesh axis, for example): an engine only if compared with a variable of an engine.
_AMBIGUOUS_ENGINES = frozenset({"single", "dp"})
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


# Names with an underscore that the standard library, torch and transformers provide for others.
_FOREIGN_PRIVATE = frozenset(
    ("_asdict", "_buffers", "_fields", "_get_device_type", "_make", "_metadata", "_modules", "_n_gpu", "_num_samples")
    + (
        "_opt_called",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_parameters",
        "_replace",
        "_shutdown",
        "_world",
    )
)

# What collections.namedtuple documents.
_NAMEDTUPLE = frozenset({"_asdict", "_fields", "_make", "_replace"})
# Names of _FOREIGN_PRIVATE that classes of echelon have, too.
_AMBIGUOUS_NAMES = frozenset({"_shutdown", "_world"})


def violations(path: str, source: str) -> list[str]:
    """Return the violations of all rules for one file."""
    rules = (engine_branches, environment_uses, module_state, more_than_reexports)
    return [found for rule in rules for found in rule(path, source)]


def engine_branches(path: str, source: str) -> list[str]:
    """Find branches on the engine outside ``engines/``; callers must use its Capabilities.

    ``plan/`` predicts what each engine would do, by name: none is running.
    """
    if _folder(path) in ("engines", "plan"):
        return []
    lines = []
    for node in ast.walk(_parse(source)):
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


def environment_uses(path: str, source: str) -> list[str]:
    """Find reads and writes of variables outside ``config/``, ``world/``, ``launch/`` and ``ENVIRONMENT_USERS``."""
    if _folder(path) in (*_ENVIRONMENT_FOLDERS, *COMPATIBILITY_MODULES) or path in ENVIRONMENT_USERS:
        return []
    lines = []
    for node in ast.walk(_parse(source)):
        if isinstance(node, ast.Attribute):
            is_use = _is_name(node.value, {"environ"}) and node.attr in _ACCESSORS
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            is_use = (
                (node.module == "echelon.base.environ" and bool(names & _ACCESSORS))
                or (node.module == "echelon.compat.variables" and bool(names & _VARIABLE_FUNCTIONS))
                or any(alias.name == "environ" and alias.asname not in (None, "environ") for alias in node.names)
            )
        else:
            continue
        lines += [node.lineno] if is_use else []
    return [f"{path}:{line}: the environment is used outside config/, world/ and launch/" for line in sorted(lines)]


def module_state(path: str, source: str) -> list[str]:
    """Find mutable values of a module or class: a container not named as a CONSTANT, a modified CONSTANT, a ``global``."""
    tree = _parse(source)
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
            found.append(f"{path}:{node.lineno}: {changed} is a constant but is modified")
    return found


def more_than_reexports(path: str, source: str) -> list[str]:
    """Find functions, classes and computed values in a compatibility module or an ``__init__.py``."""
    # `echelon` and `echelon.compat` load their names on first use.
    may_call = path in ("__init__.py", "compat/__init__.py") or _folder(path) in COMPATIBILITY_MODULES
    if not may_call and not path.endswith("/__init__.py"):
        return []
    return [
        f"{path}:{node.lineno}: code in a module that may only re-export"
        for node in _parse(source).body
        if not _is_reexport(node, may_call=may_call)
    ]


def _is_reexport(node: ast.stmt, *, may_call: bool) -> bool:
    """Return whether it is an import, a docstring or ``__all__``; in compatibility modules also an alias or a call of ``compat/``."""
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


def private_reads(sources: Mapping[str, str]) -> Iterator[str]:
    """Find reads of another object's ``_name`` where a file of echelon other than the reader's defines that name.

    The Trainer's components may call transformers' private methods on it (``trainer``), because subclasses override them.
    """
    trees = {path: _parse(source) for path, source in sources.items()}
    defined = {path: set(_defined_names(tree)) for path, tree in trees.items()}
    everywhere = {name for name in set().union(*defined.values()) - _FOREIGN_PRIVATE if re.match("_[^_]", name)}
    for path, tree in trees.items():
        private = everywhere - defined[path]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in private:
                continue
            owner = ast.unparse(node.value)
            may_be_overridden = (
                path.startswith("trainer/") and owner.endswith("trainer") and node.attr in TRAINER_MEMBERS
            )
            if owner not in ("self", "cls", "super()") and not may_be_overridden:
                yield f"{path}:{node.lineno}: reads {ast.unparse(node)}, which is private to another file"


def foreign_private_reads(sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name, path) for each private name of another library that a file uses, and ("ctypes", path) for the C library.

    Counted are imports of private modules and names, and reads of ``_name`` on an object, also by ``getattr``, if the object is
    imported from another library or no file of echelon defines the name.
    """
    trees = {path: _parse(source) for path, source in sources.items()}
    defined = set().union(*(set(_defined_names(tree)) for tree in trees.values()))
    own = defined - (_FOREIGN_PRIVATE - _AMBIGUOUS_NAMES)
    for path, tree in trees.items():
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] != "echelon":
                imported |= {alias.asname or alias.name for alias in node.names}
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name.startswith("ctypes"):
                    yield "ctypes", path
                for private in filter(_is_private, name.split(".")):
                    yield private, path
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=owner, attr=name):
                    pass
                case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(module)), *_]):
                    for private in filter(_is_private, module.split(".")):
                        yield private, path
                    continue
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[owner, ast.Constant(value=str(name)), *_]
                ):
                    pass
                case _:
                    continue
            known = defined if ast.unparse(owner) in ("self", "cls", "super()") else own
            if _is_private(name) and name not in _NAMEDTUPLE and (name not in known or _root(owner) in imported):
                yield name, path


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_echelon"))


def _root(node: ast.expr) -> str | None:
    """Return the name of which ``node`` is an attribute, directly or through others."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def duplicate_classes(sources: Mapping[str, str]) -> list[str]:
    """Find public class names that are defined more than once."""
    places = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(_parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    return [f"class {name} is defined in {', '.join(paths)}" for name, paths in places.items() if len(paths) > 1]


def missing_paths(document: str, text: str, roots: Iterable[Path]) -> list[str]:
    """Find folders (`` `base/` ``) and Python files that a document names but that do not exist under any of ``roots``."""
    named = sorted(set(re.findall(r"`([a-z][\w/]*/(?:\w+\.py)?)`", text)))
    return [f"{document}: there is no {path}" for path in named if not any((root / path).exists() for root in roots)]


@cache
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, fields and variables, and those of ``self``'s attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and _is_name(node.value, {"self", "cls"})
        ):
            yield node.attr


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


def _is_name(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


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
    """Return the name of the container that ``node`` modifies: ``NAME[key] = ..``, ``del NAME[key]``, ``NAME.append(..)``."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
    ):
        return node.value.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return None
