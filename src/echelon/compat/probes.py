"""What is installed and what the hardware can do, as the ``is_*_available`` functions of Accelerate.

Every answer is real: a package is there when it can be found and its distribution is installed in a version that works; a
device when torch sees it. Nothing is imported to find out, except torch and what brings a device to it.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from echelon.base import environ
from echelon.base.errors import MissingExtraError, UsageError
from echelon.base.optional import is_available
from echelon.base.versions import at_least
from echelon.compat.variables import parse_flag_from_env

__all__ = [
    "deepspeed_required",
    "is_4bit_bnb_available",
    "is_8bit_bnb_available",
    "is_aim_available",
    "is_amdsmi_available",
    "is_bf16_available",
    "is_bitsandbytes_multi_backend_available",
    "is_bnb_available",
    "is_boto3_available",
    "is_clearml_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_dvclive_available",
    "is_fp16_available",
    "is_fp8_available",
    "is_habana_gaudi1",
    "is_hpu_available",
    "is_import_timer_available",
    "is_lomo_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mlu_available",
    "is_mps_available",
    "is_msamp_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_numpy_available",
    "is_pandas_available",
    "is_peft_available",
    "is_pippy_available",
    "is_pynvml_available",
    "is_pytest_available",
    "is_rich_available",
    "is_rocm_available",
    "is_sagemaker_available",
    "is_schedulefree_available",
    "is_sdaa_available",
    "is_swanlab_available",
    "is_tensorboard_available",
    "is_timm_available",
    "is_torch_distributed_available",
    "is_torch_xla_available",
    "is_torchao_available",
    "is_torchdata_available",
    "is_torchdata_stateful_dataloader_available",
    "is_torchvision_available",
    "is_tqdm_available",
    "is_trackio_available",
    "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available",
    "is_transformers_available",
    "is_triton_available",
    "is_wandb_available",
    "is_weights_only_available",
    "is_xccl_available",
    "is_xpu_available",
    "torchao_required",
]

P = ParamSpec("P")
T = TypeVar("T")

# torch is imported inside the functions: this layer must import without it.


def _package(module: str, *distributions: str, least: str | None = None, below: str | None = None) -> bool:
    """Tell whether ``module`` is there, from one of the ``distributions`` (else its own name), in a version that fits."""
    if not is_available(module):
        return False
    for name in distributions or (module,):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return (least is None or at_least(version, least)) and (below is None or not at_least(version, below))
    return False


def _device(kind: str, brought_by: str | None = None) -> bool:
    """Tell whether torch sees a device of this kind; ``brought_by`` is the package that teaches torch about it."""
    import torch  # noqa: PLC0415 - torch-free layer

    if brought_by is not None:
        if not is_available(brought_by):
            return False
        import_module(brought_by)
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


# ---- devices ---------------------------------------------------------------------------------------------------------


def is_cuda_available() -> bool:
    """Tell whether torch sees a CUDA (or ROCm) device; a process forked later can still use it."""
    with environ.patch({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return _device("cuda")


def is_rocm_available() -> bool:
    """Tell whether torch is built for ROCm and sees a device."""
    import torch  # noqa: PLC0415 - torch-free layer

    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Tell whether there is an Apple GPU, and torch is at least ``min_version``."""
    import torch  # noqa: PLC0415 - torch-free layer

    return at_least(torch.__version__, min_version) and torch.backends.mps.is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Tell whether torch sees an Intel GPU."""
    return _device("xpu")


def is_npu_available(check_device: bool = False) -> bool:
    """Tell whether torch sees an Ascend NPU (package torch_npu)."""
    return _device("npu", "torch_npu")


def is_mlu_available(check_device: bool = False) -> bool:
    """Tell whether torch sees a Cambricon MLU (package torch_mlu)."""
    return _device("mlu", "torch_mlu")


def is_musa_available(check_device: bool = False) -> bool:
    """Tell whether torch sees a Moore Threads GPU (package torch_musa)."""
    return _device("musa", "torch_musa")


def is_sdaa_available(check_device: bool = False) -> bool:
    """Tell whether torch sees a Tecorigin device (package torch_sdaa)."""
    return _device("sdaa", "torch_sdaa")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Tell whether torch sees a Gaudi (package habana_frameworks)."""
    return is_available("habana_frameworks") and _device("hpu", "habana_frameworks.torch")


def is_habana_gaudi1() -> bool:
    """Tell whether the Gaudi is one of the first generation."""
    if not is_hpu_available():
        return False
    experimental: Any = import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_neuron_available(check_device: bool = False) -> bool:
    """Tell whether torch sees an AWS Neuron core (package torch_neuronx)."""
    return _device("neuron", "torch_neuronx")


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Tell whether torch_xla is installed (and drives a TPU, or a GPU); ``USE_TORCH_XLA=0`` says no.

    Raises:
        UsageError: both are asked for.
    """
    if check_is_tpu and check_is_gpu:
        raise UsageError("check_is_tpu and check_is_gpu exclude each other", do="ask for one of them")
    if not parse_flag_from_env("USE_TORCH_XLA", default=True) or not is_available("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA")


# ---- what they can do ------------------------------------------------------------------------------------------------


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Tell whether the device of this machine computes in bfloat16."""
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
    """Tell whether the device computes in float16."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Tell whether one of the libraries for fp8 is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_transformer_engine_mxfp8_available() -> bool:
    """Tell whether Transformer Engine is installed and the device knows MXFP8."""
    if not _package("transformer_engine", "transformer-engine"):
        return False
    return bool(import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def is_torch_distributed_available() -> bool:
    """Tell whether this torch is built with ``torch.distributed``."""
    import torch.distributed as dist  # noqa: PLC0415 - torch-free layer

    return bool(dist.is_available())


def is_xccl_available() -> bool:
    """Tell whether this torch is built with XCCL, the collectives of Intel GPUs."""
    import torch.distributed as dist  # noqa: PLC0415 - torch-free layer

    return bool(dist.is_available() and dist.is_xccl_available())


def is_weights_only_available() -> bool:
    """Return True: every torch that echelon runs on loads weights without running code."""
    return True


def is_pippy_available() -> bool:
    """Return True: every torch that echelon runs on has ``torch.distributed.pipelining``."""
    return True


# ---- packages --------------------------------------------------------------------------------------------------------


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Tell whether numpy is installed, at least in this version."""
    return _package("numpy", least=min_version)


def is_bnb_available(min_version: str | None = None) -> bool:
    """Tell whether bitsandbytes is installed, at least in this version."""
    return _package("bitsandbytes", least=min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Tell whether bitsandbytes is installed and works on more than CUDA."""
    return is_bnb_available() and "multi_backend" in getattr(import_module("bitsandbytes"), "features", set())


def is_4bit_bnb_available() -> bool:
    """Tell whether bitsandbytes quantizes to 4 bits."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Tell whether bitsandbytes quantizes to 8 bits."""
    return is_bnb_available("0.37.2")


def is_megatron_lm_available() -> bool:
    """Tell whether Megatron-LM is asked for (``ACCELERATE_USE_MEGATRON_LM``) and installed."""
    return (
        parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM")
        and _package("megatron", "megatron-core", least="0.8.0")
        and is_available("megatron.training")
    )


def is_rich_available() -> bool:
    """Tell whether rich is installed and wanted (``ACCELERATE_ENABLE_RICH``)."""
    return _package("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_transformer_engine_available() -> bool:
    """Tell whether Transformer Engine is installed."""
    if is_hpu_available():
        return _package("intel_transformer_engine", "intel-transformer-engine")
    return _package("transformer_engine", "transformer-engine")


def is_triton_available() -> bool:
    """Tell whether Triton is installed."""
    return _package("triton", "triton", "triton-xpu", "pytorch-triton")


def is_tensorboard_available() -> bool:
    """Tell whether tensorboard or tensorboardX is installed."""
    return _package("tensorboard") or _package("tensorboardX")


def is_mlflow_available() -> bool:
    """Tell whether MLflow is installed, whole or skinny."""
    return _package("mlflow", "mlflow", "mlflow-skinny")


def is_aim_available() -> bool:
    """Tell whether aim is installed, before version 4.0.0."""
    return _package("aim", below="4.0.0")


def is_amdsmi_available() -> bool:
    """Tell whether amdsmi is installed."""
    return _package("amdsmi")


def is_boto3_available() -> bool:
    """Tell whether boto3 is installed."""
    return _package("boto3")


def is_clearml_available() -> bool:
    """Tell whether clearml is installed."""
    return _package("clearml")


def is_comet_ml_available() -> bool:
    """Tell whether comet_ml is installed."""
    return _package("comet_ml", "comet-ml")


def is_datasets_available() -> bool:
    """Tell whether datasets is installed."""
    return _package("datasets")


def is_deepspeed_available() -> bool:
    """Tell whether deepspeed is installed."""
    return _package("deepspeed")


def is_dvclive_available() -> bool:
    """Tell whether dvclive is installed."""
    return _package("dvclive")


def is_import_timer_available() -> bool:
    """Tell whether import_timer is installed."""
    return _package("import_timer")


def is_lomo_available() -> bool:
    """Tell whether lomo_optim is installed."""
    return _package("lomo_optim", "lomo-optim")


def is_matplotlib_available() -> bool:
    """Tell whether matplotlib is installed."""
    return _package("matplotlib")


def is_msamp_available() -> bool:
    """Tell whether msamp is installed."""
    return _package("msamp", "ms-amp")


def is_pandas_available() -> bool:
    """Tell whether pandas is installed."""
    return _package("pandas")


def is_peft_available() -> bool:
    """Tell whether peft is installed."""
    return _package("peft")


def is_pynvml_available() -> bool:
    """Tell whether pynvml is installed."""
    return _package("pynvml", "nvidia-ml-py", "pynvml")


def is_pytest_available() -> bool:
    """Tell whether pytest is installed."""
    return _package("pytest")


def is_sagemaker_available() -> bool:
    """Tell whether sagemaker is installed."""
    return _package("sagemaker")


def is_schedulefree_available() -> bool:
    """Tell whether schedulefree is installed."""
    return _package("schedulefree")


def is_swanlab_available() -> bool:
    """Tell whether swanlab is installed."""
    return _package("swanlab")


def is_timm_available() -> bool:
    """Tell whether timm is installed."""
    return _package("timm")


def is_torchao_available() -> bool:
    """Tell whether torchao is installed, version 0.6.1 or later."""
    return _package("torchao", least="0.6.1")


def is_torchdata_available() -> bool:
    """Tell whether torchdata is installed."""
    return _package("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Tell whether torchdata is installed, version 0.8.0 or later."""
    return _package("torchdata", least="0.8.0")


def is_torchvision_available() -> bool:
    """Tell whether torchvision is installed."""
    return _package("torchvision")


def is_tqdm_available() -> bool:
    """Tell whether tqdm is installed."""
    return _package("tqdm")


def is_trackio_available() -> bool:
    """Tell whether trackio is installed."""
    return _package("trackio")


def is_transformers_available() -> bool:
    """Tell whether transformers is installed."""
    return _package("transformers")


def is_wandb_available() -> bool:
    """Tell whether wandb is installed."""
    return _package("wandb")


# ---- decorators ------------------------------------------------------------------------------------------------------


def torchao_required(func: Callable[P, T]) -> Callable[P, T]:
    """Make ``func`` say how to install torchao where it is missing.

    Raises:
        MissingExtraError: when the function is called without torchao.
    """

    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_torchao_available():
            raise MissingExtraError(
                f"{func.__name__} needs the package 'torchao', which is not installed", do="pip install 'echelon[fp8]'"
            )
        return func(*args, **kwargs)

    return checked


def deepspeed_required(func: Callable[P, T]) -> Callable[P, T]:
    """Make ``func`` say how to install deepspeed where it is missing.

    Raises:
        MissingExtraError: when the function is called without deepspeed.
    """

    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if not is_deepspeed_available():
            raise MissingExtraError(
                f"{func.__name__} needs the package 'deepspeed', which is not installed",
                do="pip install 'echelon[deepspeed]'",
            )
        return func(*args, **kwargs)

    return checked
