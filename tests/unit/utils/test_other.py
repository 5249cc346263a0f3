"""The names of ``accelerate.utils`` that have no test file of their own: what each returns."""

from __future__ import annotations

import gc
import logging
import platform
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from echelon import utils
from echelon.base.errors import CheckpointError, DesyncError, MissingExtraError
from echelon.base.warnings import EchelonWarning
from echelon.logging import MultiProcessAdapter, get_logger
from echelon.optimizer import move_to_device
from echelon.tracking import (
    AimTracker,
    CometMLTracker,
    SwanLabTracker,
    TrackioTracker,
    get_available_trackers,
)
from echelon.utils.operations import DistributedOperationException


def test_state_dicts_for_safetensors_hold_each_tensor_once_and_contiguous() -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    with pytest.warns(EchelonWarning, match="again"):
        clean = utils.clean_state_dict_for_safetensors({"a": tied, "again": tied, "turned": tied.T})
    assert list(clean) == ["a", "turned"]
    assert clean["turned"].is_contiguous()
    assert clean["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    a, view, other = torch.zeros(4), None, torch.zeros(4)
    view = a[1:]
    assert utils.id_tensor_storage(a) == utils.id_tensor_storage(view) != utils.id_tensor_storage(other)


def test_an_old_kernel_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("5.5.0-generic", "6.1", "nonsense"):
        monkeypatch.setattr(platform, "uname", lambda r=release: SimpleNamespace(system="Linux", release=r))
        utils.check_os_kernel()
    monkeypatch.setattr(platform, "uname", lambda: SimpleNamespace(system="Linux", release="5.4.0-42-generic"))
    with pytest.warns(EchelonWarning, match="Linux kernel is 5.4.0"):
        utils.check_os_kernel()


class _Tied(nn.Module):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)

    def get_output_embeddings(self) -> nn.Module:
        return self


def test_attributes_of_a_model_are_read() -> None:
    assert utils.check_tied_parameters_in_config(_Tied(tie_word_embeddings=True)) is True
    assert utils.check_tied_parameters_in_config(_Tied(tie_word_embeddings=False)) is False
    assert utils.check_tied_parameters_in_config(nn.Linear(1, 1)) is False
    split = nn.Linear(1, 1)
    assert utils.get_model_tp_size(split) is None
    split.tp_size = 4  # as transformers notes it
    assert utils.get_model_tp_size(split) == 4
    assert utils.is_peft_model(nn.Linear(1, 1)) is False
    assert utils.model_has_dtensor(nn.Linear(1, 1)) is False


def test_precision_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(native_amp: bool) -> torch.dtype:
        with utils.get_mixed_precision_context_manager(native_amp):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert (product(native_amp=True), product(native_amp=False)) == (torch.bfloat16, torch.float32)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert product(native_amp=True) == torch.float32
    scaler = utils.get_grad_scaler(init_scale=4.0)
    assert scaler.scale(torch.tensor(3.0)).item() == 12.0


def test_unreferenced_memory_is_released() -> None:
    class Ring:
        def __init__(self) -> None:
            self.me = self

    gc.disable()  # so that only clear_device_cache() collects
    try:
        ring = weakref.ref(Ring())
        utils.memory.clear_device_cache()
        assert ring() is not None
        utils.memory.clear_device_cache(garbage_collection=True)
        assert ring() is None
    finally:
        gc.enable()


def test_rng_states_are_unchanged_on_one_process() -> None:
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    utils.synchronize_rng_state(utils.RNGType.GENERATOR, generator)
    utils.synchronize_rng_states(["generator"], generator)
    assert torch.equal(generator.get_state(), before)


def test_libraries_that_are_loaded_are_named() -> None:
    assert utils.are_libraries_initialized("torch", "no_such_library") == ["torch"]


def test_without_deepspeed_its_functions_refuse_and_its_context_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    @utils.deepspeed_required
    def zero() -> int:
        return 3

    monkeypatch.setattr("echelon.compat.probes.is_deepspeed_available", lambda: True)
    assert zero() == 3
    monkeypatch.setattr("echelon.compat.probes.is_deepspeed_available", lambda: False)
    with pytest.raises(MissingExtraError, match="zero requires the package 'deepspeed'"):
        zero()
    weight = nn.Parameter(torch.ones(2))
    with utils.GatheredParameters([weight]):
        assert weight.tolist() == [1.0, 1.0]


def test_a_handler_of_the_users_own_gives_what_differs() -> None:
    from dataclasses import dataclass

    @dataclass
    class Mine(utils.KwargsHandler):
        a: int = 1
        b: str = "x"

    assert (Mine(a=2).to_dict(), Mine(a=2).to_kwargs(), Mine().to_kwargs()) == ({"a": 2, "b": "x"}, {"a": 2}, {})


def test_names_of_files_are_those_of_accelerate() -> None:
    """As checkpoints of accelerate 1.15 have them on disk."""
    assert (utils.WEIGHTS_NAME, utils.SAFE_WEIGHTS_NAME) == ("pytorch_model.bin", "model.safetensors")
    assert utils.WEIGHTS_INDEX_NAME == "pytorch_model.bin.index.json"
    assert utils.SAFE_WEIGHTS_INDEX_NAME == "model.safetensors.index.json"
    assert utils.WEIGHTS_PATTERN_NAME.format(suffix="-1") == "pytorch_model-1.bin"
    assert utils.SAFE_WEIGHTS_PATTERN_NAME.format(suffix="-1") == "model-1.safetensors"
    assert (utils.MODEL_NAME, utils.SAFE_MODEL_NAME, utils.OPTIMIZER_NAME) == ("pytorch_model", "model", "optimizer")
    assert (utils.SCHEDULER_NAME, utils.SAMPLER_NAME, utils.SCALER_NAME) == ("scheduler", "sampler", "scaler.pt")
    assert utils.RNG_STATE_NAME == "random_states"
    assert utils.PROFILE_PATTERN_NAME.format(suffix=0) == "profile_0.json"
    assert "MULTI_GPU" in utils.TORCH_DISTRIBUTED_OPERATION_TYPES
    assert "nproc_per_node" in utils.TORCH_LAUNCH_PARAMS
    assert utils.XPU_PROFILING_AVAILABLE_PYTORCH_VERSION == "2.4.0"
    assert utils.MITA_PROFILING_AVAILABLE_PYTORCH_VERSION == "2.1.0"


def test_kinds_are_spelled_as_in_config_files() -> None:
    assert utils.ComputeEnvironment("LOCAL_MACHINE").value == "LOCAL_MACHINE"
    assert utils.SageMakerDistributedType("NO").value == "NO"
    assert utils.get_current_device_type() == ("cuda", "MULTI_GPU")  # accelerate's answer without any accelerator


def test_trackers_are_known_by_name() -> None:
    named = {"aim": AimTracker, "comet_ml": CometMLTracker, "swanlab": SwanLabTracker, "trackio": TrackioTracker}
    assert {name: kind.name for name, kind in named.items()} == {name: name for name in named}
    assert "tensorboard" in [str(kind) for kind in get_available_trackers()] or not utils.is_tensorboard_available()


def test_the_logger_is_the_adapter_that_the_rank_decides(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("of_the_user")
    assert isinstance(logger, MultiProcessAdapter)
    with caplog.at_level(logging.INFO, "of_the_user"):
        logger.info("said", main_process_only=True)
        logger.warning_once("once")
        logger.warning_once("once")
    assert caplog.messages == ["[RANK 0] said", "[RANK 0] once"]


def test_weights_are_read_from_both_formats(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0)}
    utils.save(state, tmp_path / "a.safetensors", safe_serialization=True)
    utils.save(state, tmp_path / "a.bin")
    for name in ("a.safetensors", "a.bin"):
        loaded = utils.load_state_dict(str(tmp_path / name))
        assert (list(loaded), loaded["a"].tolist()) == (["a"], [0.0, 1.0, 2.0])
    assert utils.load(tmp_path / "a.bin")["a"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_a_damaged_weight_file_is_named(tmp_path: Path, device_map: dict[str, str] | None) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read"):
        utils.load_state_dict(str(tmp_path / "a.safetensors"), device_map)


def test_blocks_are_compiled_in_place_for_sharded_models() -> None:
    for compile_in_place in (utils.compile_regions_fsdp2, utils.compile_regions_deepspeed):
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        weights = list(model.parameters())
        compile_in_place(model, backend="eager")
        assert next(iter(model.parameters())) is weights[0]
        assert [block._compiled_call_impl is not None for block in model] == [True, True]


def test_fp8_keeps_the_first_and_last_layer_out_and_converts_the_rest() -> None:
    pytest.importorskip("torchao", reason="the package torchao is not installed")
    from torchao.float8 import Float8LinearConfig

    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    fits = [utils.filter_first_and_last_linear_layers(nn.Linear(16, outs), "name") for outs in (16, 15)]
    assert fits == [True, False]
    assert utils.has_ao_layers(model) is False
    utils.convert_model_to_fp8_ao(model, config=Float8LinearConfig(emulate=True))
    assert [type(layer).__name__ for layer in model] == ["Linear", "Float8Linear", "Linear"]
    assert utils.has_ao_layers(model) is True


def test_tracebacks_in_colour_hide_values_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from echelon.utils import rich

    given: list[dict[str, Any]] = []
    traceback = ModuleType("rich.traceback")
    traceback.install = lambda **options: given.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rich", ModuleType("rich"))
    monkeypatch.setitem(sys.modules, "rich.traceback", traceback)
    rich.install(width=80)
    rich.install(show_locals=True)
    assert given == [{"show_locals": False, "width": 80}, {"show_locals": True}]


def test_old_names_catch_and_do_what_the_new_ones_do() -> None:
    with pytest.raises(DistributedOperationException, match="shapes differ"):
        raise DesyncError("shapes differ")
    assert move_to_device({"x": torch.ones(1)}, torch.device("meta"))["x"].device.type == "meta"
    assert utils.is_habana_gaudi1() is False
