"""Imports optional dependencies when they are needed, or raises an error with the command that installs them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType, ModuleType

from echelon.base.errors import MissingExtraError
from echelon.base.messages.translation import gettext as _

# The requirements of each extra of pyproject.toml (tests/unit/test_packaging.py compares them), and of torch. They are repeated
# here because messages name the requirements themselves: `pip install "echelon[NAME]"` fails where no index has echelon.
EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch": ("torch>=2.7",),
        "aim": ("aim>=3.17",),
        "apollo": ("apollo-torch>=1.0", "bitsandbytes>=0.43"),
        "bitsandbytes": ("bitsandbytes>=0.43",),
        "clearml": ("clearml>=1.13",),
        "comet_ml": ("comet_ml>=3.41",),
        "deepspeed": ("deepspeed>=0.19.8",),
        "dvclive": ("dvclive>=3.0",),
        "fp8": ("torchao>=0.10",),
        "galore": ("galore-torch>=1.0", "bitsandbytes>=0.43"),
        "grokadamw": ("grokadamw>=0.1",),
        "hub": ("huggingface_hub>=0.23",),
        "liger": ("liger-kernel>=0.4",),
        "mlflow": ("mlflow>=2.9",),
        "notebook": ("cloudpickle>=2.2",),
        "object-store": ("obstore>=0.8",),
        "optimi": ("torch-optimi>=0.2",),
        "optuna": ("optuna>=3.0",),
        "ray": ("ray[train]>=2.60",),
        "schedulefree": ("schedulefree>=1.4",),
        "stateful": ("torchdata>=0.11",),
        "swanlab": ("swanlab>=0.4",),
        "tensorboard": ("tensorboard>=2.12",),
        "trackio": ("trackio>=0.1",),
        "wandb": ("wandb>=0.16",),
    }
)


def install_command(extra: str) -> str:
    """Return the pip command that installs what ``extra`` requires, quoted for any shell."""
    return "pip install " + " ".join(f'"{requirement}"' for requirement in EXTRAS[extra])


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import ``module``, which ``purpose`` requires and which is one of the requirements of ``extra``.

    Raises:
        MissingExtraError: the module is not installed; the message contains the pip command.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module is installed, but one of its dependencies is missing
        raise MissingExtraError(
            _(
                "{purpose} requires the package {package!r}, which is not installed",
                purpose=purpose,
                package=module.partition(".")[0],
            ),
            do=install_command(extra),
        ) from error


def explain_missing_torch(error: ModuleNotFoundError) -> ImportError:
    """Return an error with the install command if ``error`` says that torch is missing, and otherwise ``error`` itself."""
    if error.name != "torch":
        return error
    return MissingExtraError(
        _("echelon requires the package 'torch', which is not installed in this Python environment"),
        where=sys.prefix,
        do=_(
            "{command} (docs/install.md has the commands for CPUs, for CUDA versions and for mirrors)",
            command=install_command("torch"),
        ),
    )


def is_available(module: str) -> bool:
    """Return whether ``module`` is installed, without importing it. For ``a.b``, the parent package ``a`` is
    imported.
    """
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # find_spec("a.b") imports a, and raises if a is not installed
        return False
