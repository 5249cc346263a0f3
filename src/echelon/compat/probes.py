"""Accelerate's ``is_*_available`` functions, which check for installed packages and hardware features.

A package is available if it can be found and a supported version of its distribution is installed. A device is
available if torch detects it. The probes import only torch and packages that add a device to torch.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from echelon.base import environ
from echelon.base.errors import MissingExtraError, UsageError
from echelon.base.messages.translation import gettext as _
from echelon.base.optional import install_command, is_available
from echelon.base.versions import at_least
from echelon.compat import reexports
from echelon.compat.variables import parse_flag_from_env

_P = ParamSpec("_P")
_T = TypeVar("_T")

# torch is imported inside the functions, because this layer must import without it.


def _is_installed(module: str, *distributions: str, least: str | None = None, below: str | None = None) -> bool:
    """Return whether one of the ``distributions`` (default: ``module``) provides ``module`` in a supported version."""
    if not is_available(module):
        return False
    for name in distributions or (module,):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return (least is None or at_least(version, least)) and (below is None or not at_least(version, below))
    return False


def _probe(module: str, *distributions: str, least: str | None = None, below: str | None = None) -> Callable[[], bool]:
    """Return a probe for the package; see ``_is_installed`` for the arguments."""

    def is_installed() -> bool:
        return _is_installed(module, *distributions, least=least, below=below)

    is_installed.__doc__ = f"Return whether {module} is installed{f', {least} or later' if least else ''}."
    return is_installed


def _device(kind: str, brought_by: str | None = None) -> bool:
    """Return whether torch detects a device of this type; ``brought_by`` is the package that adds the type to torch."""
    import torch  # noqa: PLC0415 - torch-free layer

    if brought_by is not None:
        if not is_available(brought_by):
            return False
        import_module(brought_by)
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def _device_probe(kind: str, what: str, brought_by: str | None = None) -> Callable[..., bool]:
    """Return a probe for a device type; see ``_device`` for the arguments."""

    def is_detected(check_device: bool = False) -> bool:
        return _device(kind, brought_by)

    is_detected.__doc__ = f"Return whether torch detects {what}{f' (package {brought_by})' if brought_by else ''}."
    return is_detected


# Devices


def is_cuda_available() -> bool:
    """Return whether torch detects a CUDA or ROCm device, without initializing CUDA, so that forked processes can use it."""
    with environ.patch({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return _device("cuda")


def is_rocm_available() -> bool:
    """Return whether torch is built for ROCm and detects a device."""
    import torch  # noqa: PLC0415 - torch-free layer

    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether an Apple GPU is available and torch is at least ``min_version``."""
    import torch  # noqa: PLC0415 - torch-free layer

    return at_least(torch.__version__, min_version) and torch.backends.mps.is_available()


is_xpu_available = _device_probe("xpu", "an Intel GPU")
is_npu_available = _device_probe("npu", "an Ascend NPU", "torch_npu")
is_mlu_available = _device_probe("mlu", "a Cambricon MLU", "torch_mlu")
is_musa_available = _device_probe("musa", "a Moore Threads GPU", "torch_musa")
is_sdaa_available = _device_probe("sdaa", "a Tecorigin device", "torch_sdaa")
is_neuron_available = _device_probe("neuron", "an AWS Neuron core", "torch_neuronx")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Return whether torch detects a Gaudi device (package habana_frameworks)."""
    return is_available("habana_frameworks") and _device("hpu", "habana_frameworks.torch")


def is_habana_gaudi1() -> bool:
    """Return whether the device is a first-generation Gaudi."""
    if not is_hpu_available():
        return False
    experimental: Any = import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed and, if requested, uses a TPU or a GPU; False if ``USE_TORCH_XLA=0``.

    Raises:
        UsageError: both flags are set.
    """
    if check_is_tpu and check_is_gpu:
        raise UsageError("check_is_tpu and check_is_gpu are mutually exclusive", do="pass one of them")
    if not parse_flag_from_env("USE_TORCH_XLA", default=True) or not is_available("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA")


# Features of the device and of torch


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether the device supports bfloat16."""
    import torch  # noqa: PLC0415 - torch-free layer

    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return True
    if accelerator.type == "mps":
        return bool(torch.backends.mps.is_macos_or_newer(14, 0))
    supported = getattr(torch.get_device_module(accelerator), "is_bf16_supported", None)
    return True if supported is None else bool(supported())


def is_fp16_available() -> bool:
    """Return whether the device supports float16."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Return whether an fp8 library is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether Transformer Engine is installed and the device supports MXFP8."""
    if not _is_installed("transformer_engine", "transformer-engine"):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_torch_distributed_available() -> bool:
    """Return whether this torch is built with ``torch.distributed``."""
    import torch.distributed as dist  # noqa: PLC0415 - torch-free layer

    return bool(dist.is_available())


def is_xccl_available() -> bool:
    """Return whether this torch is built with XCCL, the collectives library for Intel GPUs."""
    import torch.distributed as dist  # noqa: PLC0415 - torch-free layer

    return bool(dist.is_available() and dist.is_xccl_available())


def is_weights_only_available() -> bool:
    """Return True, because every supported torch version has ``weights_only``."""
    return True


def is_pippy_available() -> bool:
    """Return True, because every supported torch version has ``torch.distributed.pipelining``."""
    return True


# Packages


is_aim_available = _probe("aim", below="4.0.0")
is_amdsmi_available = _probe("amdsmi")
is_boto3_available = _probe("boto3")
is_clearml_available = _probe("clearml")
is_comet_ml_available = _probe("comet_ml", "comet-ml")
is_datasets_available = _probe("datasets")
is_deepspeed_available = _probe("deepspeed")
is_dvclive_available = _probe("dvclive")
is_import_timer_available = _probe("import_timer")
is_lomo_available = _probe("lomo_optim", "lomo-optim")
is_matplotlib_available = _probe("matplotlib")
is_mlflow_available = _probe("mlflow", "mlflow", "mlflow-skinny")
is_msamp_available = _probe("msamp", "ms-amp")
is_pandas_available = _probe("pandas")
is_peft_available = _probe("peft")
is_pynvml_available = _probe("pynvml", "nvidia-ml-py", "pynvml")
is_pytest_available = _probe("pytest")
is_sagemaker_available = _probe("sagemaker")
is_schedulefree_available = _probe("schedulefree")
is_swanlab_available = _probe("swanlab")
is_timm_available = _probe("timm")
is_torchao_available = _probe("torchao", least="0.6.1")
is_torchdata_available = _probe("torchdata")
is_torchdata_stateful_dataloader_available = _probe("torchdata", least="0.8.0")
is_torchvision_available = _probe("torchvision")
is_tqdm_available = _probe("tqdm")
is_trackio_available = _probe("trackio")
is_transformers_available = _probe("transformers")
is_triton_available = _probe("triton", "triton", "triton-xpu", "pytorch-triton")
is_wandb_available = _probe("wandb")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Return whether numpy ``min_version`` or later is installed."""
    return _is_installed("numpy", least=min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes ``min_version`` or later is installed."""
    return _is_installed("bitsandbytes", least=min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes is installed and supports backends other than CUDA."""
    return is_bnb_available() and "multi_backend" in getattr(import_module("bitsandbytes"), "features", set())


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes supports 4-bit quantization."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes supports 8-bit quantization."""
    return is_bnb_available("0.37.2")


def is_megatron_lm_available() -> bool:
    """Return whether Megatron-LM is requested (``ACCELERATE_USE_MEGATRON_LM``) and installed."""
    return (
        parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM")
        and _is_installed("megatron", "megatron-core", least="0.8.0")
        and is_available("megatron.training")
    )


def is_rich_available() -> bool:
    """Return whether rich is installed and enabled (``ACCELERATE_ENABLE_RICH``)."""
    return _is_installed("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_transformer_engine_available() -> bool:
    """Return whether Transformer Engine is installed."""
    if is_hpu_available():
        return _is_installed("intel_transformer_engine", "intel-transformer-engine")
    return _is_installed("transformer_engine", "transformer-engine")


def is_tensorboard_available() -> bool:
    """Return whether tensorboard or tensorboardX is installed."""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


# Decorators


def _requires(
    func: Callable[_P, _T], package: str, *, extra: str, is_installed: Callable[[], bool]
) -> Callable[_P, _T]:
    @functools.wraps(func)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not is_installed():
            raise MissingExtraError(
                _(
                    "{name} requires the package {package!r}, which is not installed",
                    name=func.__name__,
                    package=package,
                ),
                do=install_command(extra),
            )
        return func(*args, **kwargs)

    return checked


def torchao_required(func: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make ``func`` raise ``MissingExtraError`` if torchao is not installed."""
    return _requires(func, "torchao", extra="fp8", is_installed=lambda: is_torchao_available())


def deepspeed_required(func: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make ``func`` raise ``MissingExtraError`` if deepspeed is not installed."""
    return _requires(func, "deepspeed", extra="deepspeed", is_installed=lambda: is_deepspeed_available())


if not TYPE_CHECKING:
    __all__ = list(reexports.defined_names(globals()))
