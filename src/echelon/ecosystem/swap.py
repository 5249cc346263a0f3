"""``install()``, which lets programs and libraries written for accelerate and transformers run on echelon unchanged.

``import accelerate`` (and its submodules) then imports echelon, whether or not accelerate is installed, and
transformers' modules contain echelon's Trainer.
"""

from __future__ import annotations

import multiprocessing.spawn
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from echelon.base import environ
from echelon.base.errors import UsageError
from echelon.base.optional import is_available
from echelon.base.rank import known_rank
from echelon.base.warnings import user_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "ACCELERATE_VERSION",
    "LIBRARIES",
    "VARIABLE",
    "describe",
    "install",
    "install_for_rank",
    "parse_libraries",
    "rank_variables",
]

ACCELERATE_VERSION = "1.15.0"
"""The accelerate release whose names echelon provides."""

LIBRARIES = ("accelerate", "transformers")

STARTER = "ECHELON_STARTER"
"""Environment variable with which the launcher tells its ranks to start this module, which stands above the launcher."""

VARIABLE = "ECHELON_AS"
"""Environment variable that lists the libraries echelon stands in for; set by the launcher for its ranks, and by
``install``."""

# Submodules of accelerate; those below them are the ones that echelon has.
_MODULES = """
    accelerator big_modeling checkpointing commands data_loader hooks inference launchers local_sgd logging memory_utils optimizer
    parallelism_config scheduler state tracking utils
"""
# Names of the package accelerate itself, and where echelon has them.
_NAMES = MappingProxyType(
    {
        "echelon": """
            Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin DistributedDataParallelKwargs
            DistributedType FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs ParallelismConfig PartialState
            ProfileKwargs cpu_offload cpu_offload_with_hook debug_launcher disk_offload dispatch_model find_executable_batch_size
            infer_auto_device_map init_empty_weights init_on_device load_checkpoint_and_dispatch load_checkpoint_in_model
            notebook_launcher prepare_pippy skip_first_batches synchronize_rng_states
        """,
        "echelon.utils": "is_rich_available",
    }
)
_SOURCES = MappingProxyType({name: module for module, names in _NAMES.items() for name in names.split()})
# Some packages accept accelerate only with its owner's home page.
_HOME_PAGE = "https://github.com/huggingface/accelerate"

# Modules of transformers and the names that they define, which become echelon's. All other modules import them from these.
_REPLACED = MappingProxyType(
    {
        "transformers.trainer": "Trainer",
        "transformers.trainer_callback": "CallbackHandler DefaultFlowCallback EarlyStoppingCallback PrinterCallback ProgressCallback "
        "TrainerCallback TrainerControl TrainerState",
        "transformers.trainer_seq2seq": "Seq2SeqTrainer",
        "transformers.trainer_utils": "BestRun EvalLoopOutput EvalPrediction HubStrategy IntervalStrategy PredictionOutput "
        "SaveStrategy SchedulerType TrainOutput get_last_checkpoint",
        "transformers.training_args": "OptimizerNames ParallelMode TrainingArguments",
        "transformers.training_args_seq2seq": "Seq2SeqTrainingArguments",
        "transformers.utils.notebook": "NotebookProgressCallback",
    }
)


def install(*libraries: str) -> None:
    """Make echelon stand in for ``libraries`` in this process and in processes that it starts with multiprocessing.

    Call this on the first line of a program, before importing the libraries or packages that use them. A second call
    does nothing. ``echelon launch --as`` does the same without changing the program.

    Args:
        libraries: ``"accelerate"``, or ``"accelerate", "transformers"`` (default: both).

    Raises:
        UsageError: a library is unknown or already imported, or ``"transformers"`` is requested without ``"accelerate"``.
    """
    new = _add(parse_libraries(libraries or LIBRARIES, where=str(user_line())))
    if new and known_rank() in (None, 0):
        print(f"echelon: {describe(new)} (echelon.compat.install)", file=sys.stderr)


def rank_variables(libraries: Sequence[str]) -> dict[str, str]:
    """Return the environment variables with which a rank installs ``libraries`` before its program starts."""
    return {VARIABLE: ",".join(libraries), STARTER: __name__}


def install_for_rank(text: str) -> None:
    """Install the libraries that the launcher requested for this rank in ``VARIABLE``, before the program starts."""
    _add(parse_libraries(text.split(","), where=f"env {VARIABLE}"))


def parse_libraries(names: Iterable[str], *, where: str) -> tuple[str, ...]:
    """Return the libraries that echelon should stand in for, in the order of ``LIBRARIES``.

    Raises:
        UsageError: a name is unknown, or ``"transformers"`` is requested without ``"accelerate"``.
    """
    requested = {name.strip() for name in names}
    if unknown := requested.difference(LIBRARIES):
        raise UsageError(
            f"echelon cannot stand in for {', '.join(map(repr, sorted(unknown)))}",
            where=where,
            do=f"use {' or '.join(('accelerate', ','.join(LIBRARIES)))}",
        )
    if requested == {"transformers"}:
        raise UsageError(
            "echelon can stand in for transformers only together with accelerate, because programs use the "
            "Trainer's Accelerator",
            where=where,
            do="name both: accelerate,transformers",
        )
    return tuple(name for name in LIBRARIES if name in requested)


def describe(libraries: Sequence[str]) -> str:
    """Return a description of what echelon stands in for."""
    names = [f"accelerate {ACCELERATE_VERSION}"] if "accelerate" in libraries else []
    names += ["transformers' Trainer"] if "transformers" in libraries else []
    return f"stands in for {' and '.join(names)}"


def _add(libraries: tuple[str, ...]) -> tuple[str, ...]:
    """Add finders for the ``libraries`` that have none yet, and return these libraries."""
    present = {type(finder) for finder in sys.meta_path}
    new = tuple(name for name in libraries if _FINDERS[name] not in present)
    for name in new:
        _refuse_imported(name)
    for name in new:
        sys.meta_path.insert(0, _FINDERS[name]())
    if new:
        installed = tuple(name for name in LIBRARIES if name in new or _FINDERS[name] in present)
        environ.write({VARIABLE: ",".join(installed)})
        _install_in_children(installed)
    return new


def _refuse_imported(library: str) -> None:
    if library not in sys.modules:
        return
    users = _packages_that_use(library)
    also = f", and used by {', '.join(users)}" if users else ""
    raise UsageError(
        f"{library} is already imported{also}, so echelon can no longer stand in for it",
        where=str(user_line()),
        do="call echelon.compat.install() before these imports, on the first line of the program (in a notebook, "
        "restart the kernel first), or start the program with echelon launch --as accelerate,transformers",
    )


def _packages_that_use(library: str) -> list[str]:
    """Return the imported packages other than ``library`` whose modules contain a class or function from ``library``."""
    found = set()
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package in found or package == library or not isinstance(module, ModuleType):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, (type, FunctionType)) and str(value.__module__).partition(".")[0] == library:
                found.add(package)
                break
    return sorted("this program" if name == "__main__" else name for name in found)


def _install_in_children(libraries: tuple[str, ...]) -> None:
    """Install the swap in processes that multiprocessing spawns, before they import the program's main module."""
    prepare: Callable[[str], dict[str, Any]] = multiprocessing.spawn.get_preparation_data
    prepare = getattr(prepare, "of_python", prepare)

    def get_preparation_data(name: str) -> dict[str, Any]:
        # Unpickling it installs the swap; multiprocessing ignores the entry itself.
        return {**prepare(name), "echelon_swap": _InstallWhenUnpickled(libraries)}

    get_preparation_data.of_python = prepare  # type: ignore[attr-defined]
    multiprocessing.spawn.get_preparation_data = get_preparation_data


class _InstallWhenUnpickled:
    def __init__(self, libraries: tuple[str, ...]) -> None:
        self._libraries = libraries

    def __reduce__(self) -> tuple[Callable[[tuple[str, ...]], object], tuple[tuple[str, ...]]]:
        return _add, (self._libraries,)


class _AccelerateFinder(MetaPathFinder, Loader):
    """Finds echelon's modules under accelerate's names, and reports accelerate as installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        if package != "accelerate":
            return None
        if not rest:
            spec = ModuleSpec(fullname, self, origin=str(_echelon_folder() / "__init__.py"), is_package=True)
            spec.has_location = True  # sets __file__
            return spec
        is_known = rest.partition(".")[0] in _MODULES.split() and is_available(f"echelon.{rest}")
        return ModuleSpec(fullname, self) if is_known else None

    def exec_module(self, module: ModuleType) -> None:
        rest = module.__name__.partition(".")[2]
        if rest:
            sys.modules[module.__name__] = import_module(f"echelon.{rest}")  # the import system returns this one
        else:
            vars(module).update(
                __doc__="accelerate's names, provided by echelon.",
                __version__=ACCELERATE_VERSION,
                __all__=sorted(_SOURCES),
                __getattr__=_attribute_of_accelerate,
                __dir__=lambda: sorted({*_SOURCES, *_MODULES.split(), "__version__"}),
            )

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        """Return accelerate's distribution if ``context`` includes it; importlib.metadata calls this."""
        name = None if context is None else context.name
        return [_AccelerateDistribution()] if name is None or name.lower() == "accelerate" else []


def _attribute_of_accelerate(name: str) -> object:
    if name in _MODULES.split():
        return import_module(f"accelerate.{name}")
    if name not in _SOURCES:
        raise AttributeError(f"module 'accelerate' has no attribute {name!r} (echelon stands in for accelerate)")
    value = getattr(import_module(_SOURCES[name]), name)
    setattr(sys.modules["accelerate"], name, value)
    return value


def _echelon_folder() -> Path:
    return Path(__file__).resolve().parents[1]


class _AccelerateDistribution(Distribution):
    """Metadata of the accelerate release whose names echelon provides."""

    def read_text(self, filename: str) -> str | None:
        """Return the content of a metadata file, or None if it does not exist."""
        if filename in ("METADATA", "PKG-INFO"):
            return f"Metadata-Version: 2.1\nName: accelerate\nVersion: {ACCELERATE_VERSION}\nHome-page: {_HOME_PAGE}\n"
        return "accelerate\n" if filename == "top_level.txt" else None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Return the path of a file in the distribution."""
        return _echelon_folder().parent / path


class _TransformersFinder(MetaPathFinder):
    """Replaces the Trainer and related names in transformers' modules as each module is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REPLACED:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                if spec.loader is not None:
                    # A delegate, not a subclass: the loader keeps all its other methods, such as get_source.
                    spec.loader = cast("Loader", _ReplacingLoader(spec.loader))
                return spec
        return None


class _ReplacingLoader:
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        trainer = import_module("echelon.trainer")
        for name in _REPLACED[module.__name__].split():
            if hasattr(module, name):  # some names do not exist in all releases
                setattr(module, name, getattr(trainer, name))


_FINDERS: MappingProxyType[str, type[MetaPathFinder]] = MappingProxyType(
    {"accelerate": _AccelerateFinder, "transformers": _TransformersFinder}
)
