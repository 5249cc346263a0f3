"""Files as tutorials have them: they load without a warning, say where each value stands, and survive conversion."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from echelon.base import environ
from echelon.base.errors import ConfigError
from echelon.config.derive import check, derive, with_engine
from echelon.config.explain import differences, show, show_json
from echelon.config.files import find_config_file, from_file
from echelon.config.origin import SettingSource
from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunConfig
from echelon.config.sources import from_environment, from_flags
from echelon.config.write import chosen, unknown_to_accelerate, write
from echelon.launch.environment import rank_variables

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
FILES = sorted(path.name for path in CONFIGS.iterdir())
OF_DEEPSPEED = [name for name in FILES if name.startswith("ds_")]


def of_file(path: str | Path, **flags: str) -> Resolved[RunConfig]:
    layers = [from_flags({name: (value, f"--{name}") for name, value in flags.items()}), from_file(path)]
    return derive(resolve(RunConfig, layers))


def variables_of(resolved: Resolved[RunConfig]) -> dict[str, str]:
    """Return what the launcher adds to the environment of two ranks on a machine without accelerators, for accelerate."""
    variables = rank_variables(resolved, num_processes=2, num_threads=None, has_accelerator=False)
    return {name: value for name, value in variables.items() if name.startswith(("ACCELERATE_", "FSDP_", "PARALLEL"))}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_tutorial_loads_and_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(CONFIGS)
    resolved = of_file(name)  # a warning would be an error here
    check(resolved)
    explained = show(with_engine(resolved))
    for field, origin in resolved.origins.items():
        if origin.source is SettingSource.FILE:
            assert re.search(rf"^{field} .* file {re.escape(name)}", explained, flags=re.MULTILINE), field
            if place := re.match(r"(.*):(\d+)( .*)?$", origin.detail):
                line = (CONFIGS / place[1]).read_text().splitlines()[int(place[2]) - 1]
                told = place[3] or field
                assert any(word in line for word in (field, field.partition("_")[2], *re.findall(r"\w+", told))), line
    if name in OF_DEEPSPEED:
        text = show_json(name, resolved)
        data = json.loads((CONFIGS / name).read_text())
        stage = data["zero_optimization"]["stage"]
        assert re.search(rf"^zero_optimization\.stage +{stage} +file {name}:\d+$", text, flags=re.MULTILINE)
        assert text.count("(filled in from ") == json.dumps(data).count('"auto"')
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", [name for name in FILES if name not in OF_DEEPSPEED])
@pytest.mark.parametrize("suffix", [".toml", ".yaml", ".json"])
def test_a_converted_file_says_the_same(name: str, suffix: str, tmp_path: Path) -> None:
    resolved = of_file(CONFIGS / name)
    target = tmp_path / f"converted{suffix}"
    write(target, chosen(resolved))
    assert differences(resolved, of_file(target)) == ""


def test_an_ordinary_zero_3_yaml_is_passed_to_the_ranks() -> None:
    resolved = of_file(CONFIGS / "zero3_offload.yaml", num_processes="2")
    check(resolved)
    assert chosen(resolved) == {
        "num_processes": 2,
        "rdzv_backend": "static",
        "sharded_by": "deepspeed",
        "cpu": True,
        "mixed_precision": "bf16",
        "gradient_clipping": 1.0,
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    }
    assert str(resolved.origins["num_processes"]) == "flag --num_processes"
    assert str(resolved.origins["zero_stage"]) == f"file {CONFIGS / 'zero3_offload.yaml'}:10"
    (lost,) = resolved.shadowed
    assert (lost.name, lost.value, str(lost.origin)) == (
        "num_processes",
        8,
        f"file {CONFIGS / 'zero3_offload.yaml'}:17",
    )
    # The names and values are those of accelerate's launcher for this file.
    assert variables_of(resolved) == {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_USE_FSDP": "false",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DEBUG_MODE": "false",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }


def test_the_same_yaml_goes_to_another_engine_that_takes_its_settings_and_not_to_one_that_does_not() -> None:
    path = CONFIGS / "zero3_offload.yaml"
    resolved = of_file(path, engine="fsdp2")
    check(resolved)
    assert resolved.value.engine == "fsdp2"
    assert variables_of(resolved)["ACCELERATE_USE_DEEPSPEED"] == "true"  # its settings are translated, by the ranks
    with pytest.raises(ConfigError) as raised:
        check(of_file(path, engine="ddp"))
    assert raised.value.what == (
        f"zero_stage=3 (from file {path}:10) and engine='ddp' (from flag --engine) contradict each other"
    )
    assert f"from file {path}:11 (distributed_type: DEEPSPEED)" in str(raised.value.do)


@pytest.mark.parametrize(("name", "version"), [("fsdp1.yaml", None), ("fsdp2.yaml", "2"), ("fsdp_2022.yaml", None)])
def test_an_fsdp_yaml_is_passed_to_the_ranks(name: str, version: str | None) -> None:
    variables = variables_of(of_file(CONFIGS / name))
    assert (variables["ACCELERATE_USE_FSDP"], variables["ACCELERATE_USE_DEEPSPEED"]) == ("true", "false")
    assert variables.get("FSDP_VERSION") == version
    expected = {
        "fsdp1.yaml": {"FSDP_OFFLOAD_PARAMS": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"},
        "fsdp2.yaml": {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"},
        "fsdp_2022.yaml": {"FSDP_MIN_NUM_PARAMS": "2000", "FSDP_SHARDING_STRATEGY": "1"},
    }[name]
    assert expected.items() <= variables.items()
    assert variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"  # as accelerate's launcher where the file does not say


def test_a_layout_of_the_ranks_is_exported_and_switches_itself_on() -> None:
    variables = variables_of(of_file(CONFIGS / "hsdp.yaml"))
    assert {name: value for name, value in variables.items() if "PARALLELISM" in name} == {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
        "PARALLELISM_CONFIG_TP_SIZE": "1",
    }


def test_selecting_the_engine_enables_its_sharding() -> None:
    resolved = derive(resolve(RunConfig, [from_flags({"engine": ("fsdp2", "--engine")})]))
    assert str(resolved.origins["sharded_by"]) == "derived from engine, flag --engine"
    assert {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items() <= variables_of(resolved).items()


def test_what_the_environment_says_and_a_flag_takes_back_does_not_reach_the_ranks() -> None:
    with environ.patch({"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu", "ACCELERATE_USE_FSDP": "true"}):
        flags = {"offload_param_device": "none", "sharded_by": "deepspeed"}
        layers = [from_flags({name: (value, f"--{name}") for name, value in flags.items()}), from_environment()]
        variables = variables_of(derive(resolve(RunConfig, layers)))
    assert variables["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "none"
    assert variables["ACCELERATE_USE_FSDP"] == "false"


NOTHING = """
tpu_env: []
tpu_vm: ['']
tpu_name: null
tpu_use_cluster: false
tpu_use_sudo: 'no'
downcast_bf16: 'no'
main_training_function: train
megatron_lm_config: {}
mpirun_config: {mpirun_ccl: '1', mpirun_hostfile: ''}
ipex_config: {ipex: false}
fsdp_config: {}
deepspeed_config: {}
gpu_ids: all
num_processes: -1
commands: null
"""
IMPOSSIBLE = {
    "distributed_type: XLA": "echelon.engines",
    "distributed_type: MEGATRON_LM": "distributed_type: FSDP or DEEPSPEED",
    "compute_environment: AMAZON_SAGEMAKER": "inside the instance that SageMaker starts",
    "tpu_use_cluster: true": "echelon.engines",
    "downcast_bf16: 'yes'": "echelon.engines",
    "tpu_env: [A=1]": "echelon.engines",
    "mpirun_config: {mpirun_hostfile: hosts}": "echelon detects the ranks",
    "megatron_lm_config: {megatron_lm_tp_degree: 2}": "distributed_type: FSDP or DEEPSPEED",
    "ipex_config: {ipex: true}": "these optimizations are built into PyTorch",
    "fp8_config: {backend: TE, margin: 0}": "set fp8_backend to AO",
}


def test_a_key_without_effect_does_not_warn(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(NOTHING)
    assert from_file(path) == {}


@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_an_unsupported_key_is_an_error_with_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"# a comment\n{text}\n")
    with pytest.raises(ConfigError) as raised:
        check(of_file(path))
    assert text.partition(":")[0].removesuffix("_config") in raised.value.what
    assert raised.value.where == f"file {path}:2"
    assert IMPOSSIBLE[text] in str(raised.value.do)


TOGETHER = {
    "mixed_precision: bf16\nmixed_precision: fp16": ("mixed_precision is set twice", "run.yaml:1 and", "run.yaml:2"),
    "engine: zero1\nfsdp_config: {fsdp_version: 2}\ndistributed_type: FSDP": (
        *("sharded_by='fsdp' (from file", "run.yaml:3 (distributed_type: FSDP)) and engine='zero1' (from file"),
        "run.yaml:1) contradict each other",
    ),
    "distributed_type: MULTI_GPU\nfsdp_config: {fsdp_version: 2}": (
        *("fsdp_version=2 would have no effect: the model is not sharded", "run.yaml:2"),
        "add --use_fsdp, or distributed_type: FSDP",
    ),
    "distributed_type: FSDP\ndeepspeed_config: {zero_stage: 2}": (
        *("zero_stage=2 would have no effect: the model is sharded by fsdp", "run.yaml:2", "add --use_deepspeed"),
    ),
    "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: gone.json}": (
        *("the DeepSpeed config file gone.json does not exist", "run.yaml:2"),
    ),
    "engine: fsdp3": ("unknown engine 'fsdp3'", "run.yaml:1", "did you mean 'fsdp2'?"),
}


@pytest.mark.parametrize("text", TOGETHER)
def test_conflicting_settings_are_an_error_with_both_origins(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        check(of_file(path))
    assert all(part in str(raised.value) for part in TOGETHER[text]), raised.value


def _with_json(tmp_path: Path, section: dict[str, Any], said: dict[str, Any]) -> Resolved[RunConfig]:
    (tmp_path / "ds.json").write_text(json.dumps(said, indent=1))
    section = {"deepspeed_config_file": str(tmp_path / "ds.json"), **section}
    path = tmp_path / "run.yaml"
    path.write_text(f"distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {json.dumps(section)}\n")
    return of_file(path)


def test_a_json_of_deepspeed_and_a_setting_beside_it_that_says_something_else(tmp_path: Path) -> None:
    said = {"zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}, "gradient_clipping": 1}
    with pytest.raises(ConfigError) as raised:
        check(_with_json(tmp_path, {"zero_stage": 2}, said))
    assert raised.value.what == (
        f"zero_stage=2 (from file {tmp_path / 'run.yaml'}:3) and zero_optimization.stage=3 (from file "
        f"{tmp_path / 'ds.json'}:3) contradict each other"
    )
    check(_with_json(tmp_path, {"zero_stage": "3", "gradient_clipping": "1.0", "offload_param_device": "cpu"}, said))


def test_what_fills_in_an_auto_is_explained() -> None:
    resolved = derive(resolve(RunConfig, [from_flags({"mixed_precision": ("bf16", "--mixed_precision")})]))
    rows = {line.split()[0]: line for line in show_json(str(CONFIGS / "ds_zero3_auto.json"), resolved).splitlines()}
    assert rows["bf16.enabled"].endswith("(filled in from mixed_precision='bf16', flag --mixed_precision)")
    assert rows["train_batch_size"].endswith(
        "(filled in from micro-batch size x gradient accumulation steps x number of processes)"
    )
    assert rows["zero_optimization.reduce_bucket_size"].endswith("(filled in from the model's hidden size h: h x h)")
    assert rows["optimizer.params.lr"].endswith("(filled in from the objects that the script passes to prepare())")


def test_a_batch_that_does_not_fit_the_number_of_processes_names_all_of_them(tmp_path: Path) -> None:
    said = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    resolved = _with_json(tmp_path, {}, said)
    check(resolved, world_size=4)
    with pytest.raises(ConfigError) as raised:
        check(resolved, world_size=2)
    assert raised.value.what == (
        f"train_batch_size=32 (from file {tmp_path / 'ds.json'}:2) is not equal to train_micro_batch_size_per_gpu=4 x "
        f"gradient_accumulation_steps=2 x 2 processes (from file {tmp_path / 'run.yaml'}:2) = 16"
    )


@pytest.mark.parametrize(
    ("kind", "text", "what"),
    [
        ("toml", "a = [", "is not valid TOML"),
        ("json", "{'a': 1}", "is not valid JSON"),
        ("yaml", "a: [", "is not valid YAML"),
        ("yaml", "!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("yaml", "- 1\n", "does not contain a mapping of settings"),
        ("yaml", "base: &b {fsdp_version: 2}\nfsdp_config:\n  <<: *b\n", "'<<' is not a valid setting name"),
        ("yaml", "fsdp_config: {fsdp_version: {a: 1}}", "unknown setting 'fsdp_config.fsdp_version.a'"),
    ],
)
def test_an_invalid_file_is_rejected(kind: str, text: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.{kind}"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(what)) as raised:
        from_file(path)
    assert str(path) in str(raised.value)


def test_the_file_that_is_found_is_the_folders_then_ours_then_accelerates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    homes = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "HF_HOME": None, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    theirs = "huggingface/accelerate/default_config"
    places = ["cache/" + theirs + ".json", "cache/" + theirs + ".yaml", "hub/accelerate/default_config.yaml"]
    with environ.patch(homes):
        assert find_config_file() is None
        for place in (*places, "config/echelon/default_config.toml", "echelon.toml"):
            (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place).write_text("")
            with environ.patch({"HF_HOME": str(tmp_path / "hub")} if place.startswith("hub") else {}):
                found = find_config_file()
            assert found is not None
            assert found.absolute() == tmp_path / place


def test_names_that_accelerate_would_refuse_are_known() -> None:
    values = {"seed": 3, "engine": "ddp", "gradient_accumulation_steps": 2, "num_processes": 2}
    assert unknown_to_accelerate(values) == ["engine", "seed", "gradient_accumulation_steps"]
    assert unknown_to_accelerate({**values, "sharded_by": "deepspeed"}) == ["engine", "seed"]


def test_a_script_reads_a_file_under_accelerates_names(tmp_path: Path) -> None:
    from echelon.commands.config import default_config_file, load_config_from_file
    from echelon.commands.config.config_args import ClusterConfig

    found = load_config_from_file(str(CONFIGS / "fsdp_2022.yaml"))
    assert (found.distributed_type, found.num_processes, found.deepspeed_config) == ("FSDP", 2, {})
    assert found.fsdp_config["fsdp_min_num_params"] == 2000
    assert "deepspeed_config" not in found.to_dict()
    found.to_json_file(tmp_path / "again.json")
    assert ClusterConfig.from_json_file(tmp_path / "again.json") == found
    for written in (found.to_yaml_file, found.to_json_file):  # accelerate itself writes JSON to a file of this name
        written(tmp_path / "again.yaml")
        assert ClusterConfig.from_yaml_file(tmp_path / "again.yaml") == found
    assert Path(default_config_file).name == "default_config.toml"
    (tmp_path / "run.toml").write_text('seed = 1\nnum_processes = 3\nmixed_precision = "bf16"\n')
    assert load_config_from_file(tmp_path / "run.toml").to_dict().items() >= {
        ("num_processes", 3),
        ("mixed_precision", "bf16"),
    }


@pytest.mark.parametrize("no", ["NO", "no", "'NO'", "False"])
def test_yaml_reads_an_unquoted_no_as_false_which_means_no(no: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"distributed_type: {no}\nmixed_precision: {no.lower()}\nnum_processes: 1\n")
    resolved = of_file(path)
    assert (resolved.value.sharded_by, resolved.value.mixed_precision) == (None, "no")


@pytest.mark.parametrize(
    ("kind", "text", "line", "near"),
    [
        ("yaml", "# ours\nnum_processes: 2\n\nmixed_precison: bf16\n", 4, "mixed_precision"),
        ("yaml", "fsdp_config:\n  # c\n  fsdp_sharding_stratgy: 1\n", 3, "fsdp_sharding_strategy"),
        ("yaml", "fsdp_config: {fsdp_version: 2,\n  fsdp_offload_paramz: 1}\n", 2, "fsdp_offload_params"),
        ("json", '{\n\t"fsdp_config": {\n\t\t"fsdp_versoin": 2}}', 3, "fsdp_version"),
        ("toml", "seed = 1\n\n[fsdp]\nversoin = 2\n", 4, "fsdp_version"),
    ],
)
def test_an_unknown_setting_is_named_with_its_line_and_the_nearest_name(
    kind: str, text: str, line: int, near: str, tmp_path: Path
) -> None:
    path = tmp_path / f"run.{kind}"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        from_file(path)
    assert raised.value.where == f"file {path}:{line}"
    assert raised.value.do == f"did you mean {near!r}?"
