"""Sharding settings in Accelerate's words, and what they mean for torch's ``fully_shard``: plain data, no process group."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from echelon import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from echelon.accelerator.plugins.kwargs_handlers import DistributedDataParallelKwargs
from echelon.accelerator.setup.build_session import build_engine, build_sharding
from echelon.base.errors import ConfigError, UsageError
from echelon.base.warnings import EchelonWarning
from echelon.config.schema import RunConfig
from echelon.config.sources import current
from echelon.engines.fsdp.options import ShardingOptions, wrap_nothing
from echelon.engines.registry import SHARDING
from echelon.world.world import World

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def _world(world_size: int = 8, local_world_size: int = 4) -> World:
    return World(
        rank=0,
        local_rank=0,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=0,
        device=torch.device("cpu"),
        backend="gloo",
    )


def _options(*, on: World | None = None, precision: str = "no", **arguments: Any) -> ShardingOptions:
    return FullyShardedDataParallelPlugin(**arguments).sharding_options(on or _world(), mixed_precision=precision)


# ---- strategies ------------------------------------------------------------------------------------------------------


# FSDP1's strategies, as torch documents them, on 2 machines with 4 processes each: (parameters freed after the forward
# pass, groups that each hold the model).
@pytest.mark.parametrize(
    ("strategy", "number", "reshard", "replicas"),
    [
        ("FULL_SHARD", 1, True, 1),
        ("SHARD_GRAD_OP", 2, False, 1),
        ("NO_SHARD", 3, False, 8),
        ("HYBRID_SHARD", 4, True, 2),
        ("HYBRID_SHARD_ZERO2", 5, False, 2),
    ],
)
def test_strategies_are_translated_in_every_spelling(
    strategy: str, number: int, reshard: bool, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spellings = [strategy, strategy.lower(), number, str(number), ShardingStrategy(number)]
    plugins = [FullyShardedDataParallelPlugin(sharding_strategy=spelling) for spelling in spellings]
    plugins += [FullyShardedDataParallelPlugin(reshard_after_forward=spelling) for spelling in spellings]
    plugins.append(FullyShardedDataParallelPlugin(fsdp_version=2, sharding_strategy=strategy))
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", strategy)
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")  # a launcher exports both: version 1 looks at the strategy
    plugins.append(FullyShardedDataParallelPlugin())
    for plugin in plugins:
        assert plugin.sharding_strategy is ShardingStrategy(number)
        options = plugin.sharding_options(_world(), mixed_precision="no")
        assert (options.reshard_after_forward, options.replicas) == (reshard, replicas)


def test_version_two_reshards_by_a_bool_or_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, meant in ((True, True), (False, False), ("true", True), ("no", False), ("1", True), (2, 2), ("4", 4)):
        reshard = _options(fsdp_version=2, reshard_after_forward=given).reshard_after_forward
        assert (type(reshard), reshard) == (type(meant), meant)
    assert _options(fsdp_version=2).reshard_after_forward is True
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    assert _options().reshard_after_forward is False
    assert _options(reshard_after_forward=True).reshard_after_forward is True
    alone = _options(fsdp_version=2, reshard_after_forward=3, on=_world(1, 1))  # without effect there, and no error
    assert alone.reshard_after_forward == 3
    with pytest.raises(ConfigError, match="reshard_after_forward=3 does not divide the 8 ranks"):
        _options(reshard_after_forward=3)


def test_hybrid_needs_the_same_number_of_processes_on_each_machine() -> None:
    assert _options(sharding_strategy="HYBRID_SHARD", on=_world(4, 4)).replicas == 1
    with pytest.raises(
        ConfigError, match="HYBRID_SHARD shards within each machine, but 6 processes are not a multiple"
    ):
        _options(sharding_strategy="HYBRID_SHARD", on=_world(6, 4))


# ---- what is a unit --------------------------------------------------------------------------------------------------


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _units(options: ShardingOptions) -> tuple[object, ...]:
    return options.wrap_classes, options.min_num_params, options.wrap_fn


def test_named_policies_select_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = "transformer_based_wrap"
    assert _units(_options()) == ((), 0, None)  # the model's _no_split_modules
    assert _units(_options(auto_wrap_policy=transformer)) == ((), 0, None)
    assert _units(_options(auto_wrap_policy="NO_WRAP")) == ((), 0, wrap_nothing)
    assert wrap_nothing(nn.Linear(1, 1)) is False
    for names in (["Block", "Head"], "Block, Head"):
        assert _units(_options(auto_wrap_policy=transformer, transformer_cls_names_to_wrap=names))[0] == (
            "Block",
            "Head",
        )
    assert _options(transformer_cls_names_to_wrap=["Block"]).wrap_classes == (
        "Block",
    )  # the policy that they belong to
    assert _options(min_num_params=7).min_num_params == 7
    assert _options(auto_wrap_policy="size_based_wrap", min_num_params=7).min_num_params == 7
    # What accelerate's launcher exports: 1e8 is written as a float, and is there without a policy, too.
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "100000000.0")
    assert _units(_options()) == ((), 0, None)
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    assert _options().min_num_params == 100_000_000
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "GPT2Block,GPT2MLP")
    assert _options().wrap_classes == ("GPT2Block", "GPT2MLP")


@pytest.mark.parametrize(
    "policy",
    [
        _is_linear,
        functools.partial(lambda_auto_wrap_policy, lambda_fn=_is_linear),
        ModuleWrapPolicy({nn.Linear}),
        lambda module, recurse, nonwrapped_numel: not recurse and nonwrapped_numel == 6,
    ],
)
def test_a_policy_function_is_called_for_each_module(policy: Callable[..., bool]) -> None:
    wraps = _options(auto_wrap_policy=policy).wrap_fn
    assert wraps is not None
    assert (wraps(nn.Linear(2, 2)), wraps(nn.ReLU())) == (True, False)


def test_torchs_own_policies_are_read() -> None:
    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear, nn.Conv1d})
    assert set(_options(auto_wrap_policy=by_class).wrap_classes) == {nn.Linear, nn.Conv1d}
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=9)
    assert _options(auto_wrap_policy=by_size).min_num_params == 9
    everything = functools.partial(size_based_auto_wrap_policy, min_num_params=0)
    assert _options(auto_wrap_policy=everything).min_num_params == 1
    assert _options(auto_wrap_policy=size_based_auto_wrap_policy).min_num_params == 100_000_000  # torch's default


# ---- dtypes, offloading, the rest ------------------------------------------------------------------------------------


def _dtypes(**arguments: Any) -> tuple[object, ...]:
    options = _options(**arguments)
    return options.param_dtype, options.reduce_dtype, options.output_dtype, options.cast_forward_inputs


def test_mixed_precision_computes_in_low_precision_and_sums_in_float32() -> None:
    assert _dtypes() == (None, None, None, True)
    for name, dtype in (("bf16", bf16), ("fp16", fp16), ("fp8", bf16)):
        assert _dtypes(precision=name) == (dtype, fp32, None, True)
        assert _dtypes(mixed_precision_policy=name) == (dtype, fp32, None, True)
    # What was given counts, whatever the run computes in; torch's objects mean what torch says.
    whole = MixedPrecisionPolicy(param_dtype=fp16, output_dtype=fp32, cast_forward_inputs=False)
    assert _dtypes(precision="bf16", mixed_precision_policy=whole) == (fp16, None, fp32, False)
    older = MixedPrecision(param_dtype=bf16, reduce_dtype=bf16)
    assert _dtypes(precision="fp16", mixed_precision_policy=older) == (bf16, bf16, None, True)
    no_cast = MixedPrecision(param_dtype=bf16, cast_root_forward_inputs=False)
    assert _dtypes(mixed_precision_policy=no_cast) == (bf16, None, None, False)
    assert _dtypes(mixed_precision_policy={"param_dtype": bf16}) == (bf16, fp32, None, True)
    assert _dtypes(mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": "bf16", "output_dtype": fp32}) == (
        bf16,
        bf16,
        fp32,
        True,
    )
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision("bf16")
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32)
    plugin.set_mixed_precision(fp16, override=True)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(param_dtype=fp16, reduce_dtype=fp32)


@pytest.mark.parametrize(
    ("given", "offloads", "pin"),
    [
        (None, False, None),
        (False, False, None),
        (True, True, None),
        (CPUOffload(offload_params=True), True, None),
        (CPUOffload(), False, None),
        (OffloadPolicy(), False, None),
        (CPUOffloadPolicy(), True, None),
        (CPUOffloadPolicy(pin_memory=False), True, False),
    ],
)
def test_offloading_is_read_from_both_kinds_of_torchs_objects(given: object, offloads: bool, pin: bool | None) -> None:
    for version in (1, 2):
        options = _options(fsdp_version=version, cpu_offload=given)
        assert (options.cpu_offload, options.pin_memory) == (offloads, pin)


def test_every_variable_is_read_and_code_overrides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING", "CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(f"FSDP_{name}", "true")
    monkeypatch.setenv("FSDP_IGNORED_MODULES", "head.*")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    options = plugin.sharding_options(_world(), mixed_precision="no")
    assert options == ShardingOptions(
        cpu_offload=True, activation_checkpointing="full", ram_efficient_loading=True, ignored="head.*"
    )
    layer = nn.Linear(1, 1)
    given = FullyShardedDataParallelPlugin(
        cpu_offload=False,
        activation_checkpointing=False,
        cpu_ram_efficient_loading=False,
        ignored_modules=iter([layer]),
        state_dict_type="full_state_dict",
    )
    assert given.state_dict_type is StateDictType.FULL_STATE_DICT
    assert given.sharding_options(_world(), mixed_precision="no") == ShardingOptions(ignored=(layer,))


def test_how_state_is_saved_is_kept_and_may_be_changed_later() -> None:
    assert FullyShardedDataParallelPlugin().state_dict_type is StateDictType.FULL_STATE_DICT
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert FullyShardedDataParallelPlugin(state_dict_type="3").state_dict_type is StateDictType.SHARDED_STATE_DICT
    # What is set before the Accelerator is made counts, however it is written.
    plugin.activation_checkpointing = plugin.cpu_offload = True
    plugin.auto_wrap_policy = "no_wrap"
    options = plugin.sharding_options(_world(), mixed_precision="no")
    assert options == ShardingOptions(activation_checkpointing="full", cpu_offload=True, wrap_fn=wrap_nothing)
    assert plugin.sharding_options(_world(), mixed_precision="no") == options  # of a second Accelerator
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    with pytest.raises(UsageError, match="auto_wrap_policy was set after an Accelerator was created") as raised:
        plugin.auto_wrap_policy = _is_linear
    assert "FullyShardedDataParallelPlugin(auto_wrap_policy=)" in str(raised.value.do)
    assert dataclasses.replace(plugin, cpu_offload=True).state_dict_type is StateDictType.FULL_STATE_DICT


def test_settings_without_effect_are_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        FullyShardedDataParallelPlugin()
        # What asks for nothing, or for what is always so.
        FullyShardedDataParallelPlugin(
            use_orig_params=True, sync_module_states=False, forward_prefetch=False, backward_prefetch="no_prefetch"
        )
    assert caplog.records == []
    monkeypatch.setenv("FSDP_BACKWARD_PREFETCH", "BACKWARD_POST")
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "true")
    with caplog.at_level(logging.WARNING):
        plugin = FullyShardedDataParallelPlugin(
            use_orig_params=False,
            forward_prefetch=True,
            limit_all_gathers=False,
            param_init_fn=lambda module: None,
            state_dict_config=FullStateDictConfig(),
            mixed_precision_policy=MixedPrecision(buffer_dtype=bf16),
        )
    (record,) = caplog.records
    for name in (
        "backward_prefetch",
        "forward_prefetch",
        "limit_all_gathers",
        "use_orig_params",
        "sync_module_states",
        "param_init_fn",
        "state_dict_config",
        "mixed_precision_policy.buffer_dtype",
    ):
        assert f"{name} (" in record.getMessage()
    assert "optim_state_dict_config" not in record.getMessage()
    assert (plugin.use_orig_params, plugin.sync_module_states) == (False, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fsdp_version": 3}, "fsdp_version=3 is unknown"),
        ({"sharding_strategy": "FULL_SHRAD"}, "did you mean 'FULL_SHARD'?"),
        ({"sharding_strategy": 6}, "sharding_strategy=6 is unknown"),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "contradict each other"),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": "NO_SHARD"}, "contradict each other"),
        ({"fsdp_version": 2, "reshard_after_forward": "perhaps"}, "reshard_after_forward='perhaps' is unknown"),
        ({"auto_wrap_policy": "transformer_wrap"}, "did you mean 'TRANSFORMER_BASED_WRAP'?"),
        ({"auto_wrap_policy": "size_based_wrap"}, "'size_based_wrap' requires a size"),
        ({"auto_wrap_policy": CustomPolicy(_is_linear)}, "is a CustomPolicy, which is not callable"),
        ({"auto_wrap_policy": "no_wrap", "min_num_params": 5}, "min_num_params has no effect with auto_wrap_policy="),
        ({"transformer_cls_names_to_wrap": ["B"], "min_num_params": 5}, "both define the FSDP units"),
        ({"min_num_params": 1.5}, "fsdp_min_num_params=1.5 is not an integer"),
        ({"cpu_offload": "yes"}, "cpu_offload='yes' is invalid"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "is not supported with torch's fully_shard"),
        ({"mixed_precision_policy": "bf61"}, "did you mean 'BF16'?"),
        ({"mixed_precision_policy": {"parm_dtype": bf16}}, "did you mean 'PARAM_DTYPE'?"),
        ({"mixed_precision_policy": {"param_dtype": "b"}}, "param_dtype='b' is unknown"),
        ({"mixed_precision_policy": 16}, "mixed_precision_policy is a int"),
        ({"activation_checkpointing_offload": True}, "has no effect without activation_checkpointing"),
    ],
)
def test_invalid_plugin_settings_raise(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        FullyShardedDataParallelPlugin(**arguments)
    assert text in str(raised.value)
    assert raised.value.do


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP", "Block", "FSDP_TRANSFORMER_CLS_TO_WRAP"),
        ("FSDP_OFLOAD_PARAMS", "true", "FSDP_OFFLOAD_PARAMS"),
        ("FSDP_OFFLOAD_PARAMS", "maybe", "fsdp_offload_params='maybe' is not true or false"),
        ("FSDP_VERSION", "two", "fsdp_version='two' is not one of 1, 2"),
        ("PARALLELISM_CONFIG_DP_SHARD", "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE"),
        ("PARALLELISM_CONFIG_TP_SIZE", "x", "tp_size='x' is not an integer"),
    ],
)
def test_misspelled_or_invalid_variables_are_reported(
    name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_OF_SOMEBODY_ELSE", "1")
    FullyShardedDataParallelPlugin()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        (ParallelismConfig if name.startswith("PARALLELISM") else FullyShardedDataParallelPlugin)()
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"replicas": 0}, "replicas=0"),
        ({"wrap_classes": ("A",), "min_num_params": 2}, "wrap_classes, min_num_params cannot be combined"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype to be a floating-point dtype, but got torch.int8"),
        ({"ignored": "("}, "is not a valid regular expression"),
        ({"ignored": ("head",)}, "modules and parameters in ignored, but got str"),
    ],
)
def test_options_of_the_engine_are_checked(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ShardingOptions(**arguments)
    assert text in str(raised.value)
    assert raised.value.do


# ---- ParallelismConfig -----------------------------------------------------------------------------------------------


def test_sizes_come_from_the_code_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig()
    assert (config.total_size, config.active_mesh_dims, config.device_mesh) == (1, [], None)
    assert (config.cp_backend, config.sp_backend, config.fsdp_dim_names) == ("torch", "deepspeed", ["dp_shard_cp"])
    assert config.build_device_mesh("cpu") is None
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    config = ParallelismConfig(dp_shard_size=8, tp_size=3)
    assert (config.dp_replicate_size, config.dp_shard_size, config.tp_size) == (2, 8, 3)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (48, 16, 3)
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert "dp_shard_size=8" in repr(config)
    assert "total_size=48" in repr(config)
    assert json.loads(config.to_json())["dp_replicate_size"] == 2
    cut = ParallelismConfig(cp_size=2)
    assert (cut.dp_shard_cp_dim_names, cut.dp_cp_dim_names[-1], cut.cp_enabled) == (["dp_shard", "cp"], "cp", True)
    with pytest.raises(UsageError, match="there is no device mesh yet"):
        config.get_device_mesh()
    for arguments, text in (
        ({"dp_shard_size": 0}, "dp_shard_size=0 is below 1"),
        ({"cp_size": 2, "sp_size": 2}, "both split sequences"),
        ({"cp_backend": "ring"}, "cp_backend='ring' is unknown"),
    ):
        with pytest.raises(ConfigError, match=text):
            ParallelismConfig(**arguments)  # type: ignore[arg-type]


def _opened(config: ParallelismConfig | None, plugin: FullyShardedDataParallelPlugin | None, **wanted: Any) -> Any:
    """Return (replicas of the sharding, sizes of the layout) on 8 ranks, without a mesh."""
    _, sharding, layout = build_sharding(
        plugin, config, world=_world(), settings=RunConfig(mixed_precision="bf16"), **wanted
    )
    sizes = layout and (layout.dp_replicate_size, layout.dp_shard_size)
    return sharding and sharding.replicas, sizes


def test_sizes_and_plugin_become_one_layout() -> None:
    plugin = FullyShardedDataParallelPlugin
    assert _opened(None, None) == (None, None)
    assert _opened(None, plugin()) == (1, None)
    assert _opened(ParallelismConfig(), None) == (None, (8, 1))
    assert _opened(ParallelismConfig(dp_replicate_size=8), None) == (None, (8, 1))
    assert _opened(ParallelismConfig(dp_shard_size=8), None) == (1, (1, 8))
    assert _opened(ParallelismConfig(dp_replicate_size=2, dp_shard_size=4), None) == (2, (2, 4))
    assert _opened(ParallelismConfig(), plugin()) == (1, (1, 8))
    assert _opened(ParallelismConfig(), plugin(sharding_strategy="HYBRID_SHARD")) == (2, (2, 4))
    hybrid = ParallelismConfig(dp_replicate_size=4, dp_shard_size=2)
    assert _opened(hybrid, plugin(sharding_strategy="HYBRID_SHARD")) == (4, (4, 2))
    assert _opened(ParallelismConfig(dp_replicate_size=8), plugin(sharding_strategy="NO_SHARD")) == (8, (8, 1))


@pytest.mark.parametrize(
    ("sizes", "plugin", "texts"),
    [
        (
            {"dp_replicate_size": 2, "dp_shard_size": 3},
            {},
            ["2 x dp_shard_size=3 = 6", "8 processes", "dp_shard_size=4"],
        ),
        ({"dp_shard_size": 8, "ep_size": 3}, {}, ["ep_size=3 does not divide dp_shard_size=8", "divisor of 8"]),
        ({"dp_replicate_size": 8, "ep_size": 2}, {}, ["ep_size=2 does not divide", "dp_shard_size to a multiple of 2"]),
        ({"pp_size": 2, "dp_shard_size": 4, "ep_size": 2}, {}, ["ep_size=2 with pp_size=2", "dp_shard_size"]),
        ({"dp_replicate_size": 8}, {}, ["means 1 replicas", "dp_replicate_size=8"]),
        ({"dp_shard_size": 8}, {"sharding_strategy": "HYBRID_SHARD"}, ["HYBRID_SHARD means 2 replicas", "size=1"]),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, {"sharding_strategy": "NO_SHARD"}, ["means 8 replicas"]),
    ],
)
def test_invalid_layouts_raise(sizes: dict[str, int], plugin: dict[str, Any] | None, texts: list[str]) -> None:
    given = None if plugin is None else FullyShardedDataParallelPlugin(**plugin)
    with pytest.raises(ConfigError) as raised:
        _opened(ParallelismConfig(**sizes), given)  # type: ignore[arg-type]
    assert all(text in str(raised.value) for text in texts)
    assert raised.value.do


# ---- the Accelerator's part ------------------------------------------------------------------------------------------


def test_an_engine_that_does_not_shard_refuses_sharding_settings() -> None:
    ddp, sharding = DistributedDataParallelKwargs(), ShardingOptions(replicas=2)
    with pytest.raises(ConfigError, match="engine='ddp' and sharding settings"):
        build_engine("ddp", _world(), None, ddp, sharding)
    with pytest.raises(ConfigError, match=r"engine=SingleEngine\(\) and sharding settings"):
        build_engine(build_engine("single", _world(1, 1), None, ddp), _world(), None, ddp, sharding)


def test_environment_or_engine_name_creates_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(engine: str | None = None) -> Any:
        return build_sharding(
            None,
            None,
            world=_world(),
            settings=dataclasses.replace(current().value, mixed_precision="bf16"),
            engine=engine,
        )

    assert opened() == (None, None, None)
    (name,) = SHARDING
    plugin, sharding, _ = opened(name)
    assert (plugin.fsdp_version, sharding.param_dtype) == (2, bf16)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    plugin, sharding, _ = opened()
    assert (plugin.fsdp_version, sharding.cpu_offload) == (1, True)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "8")
    assert opened()[2] is not None


def test_one_process_warns_that_there_is_nothing_to_shard() -> None:
    plugin = FullyShardedDataParallelPlugin()
    with pytest.warns(EchelonWarning, match="sharding settings have no effect on a single process"):
        accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig())
    assert accelerator.state.fsdp_plugin is plugin
    assert accelerator.capabilities.name == "single"
    assert (accelerator.is_fsdp2, accelerator.is_composable_parallelism_enabled) == (False, False)
    assert accelerator.parallelism_config.total_size == 1
    assert accelerator.state.parallelism_config is accelerator.parallelism_config
    assert (accelerator.torch_device_mesh, accelerator.state.device_mesh) == (None, None)
    ranks = (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank, accelerator.tensor_parallel_rank)
    assert ranks == (0, 0, 0)
    with pytest.raises(ConfigError, match="= 2 does not cover 1 processes"):
        Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
    for arguments in ({"fsdp_plugin": object()}, {"parallelism_config": object()}):
        with pytest.raises(ConfigError, match=f"{next(iter(arguments))} is a object"):
            Accelerator(**arguments)  # type: ignore[arg-type]
