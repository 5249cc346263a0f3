"""transformers' models with device maps on accelerate and on echelon: the same maps, outputs and generated text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.side_by_side.run import ROOT

PROGRAM = """
import sys
package, folder = sys.argv[1:]
if package == "echelon":
    import echelon.compat
    echelon.compat.install("accelerate", "transformers")
import logging, warnings
import torch
import transformers
from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.hooks import AlignDevicesHook
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
transformers.utils.logging.disable_progress_bar()
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
)
torch.manual_seed(0)
LlamaForCausalLM(config).save_pretrained(folder + "/model")
x = torch.tensor([[1, 5, 9, 3]])
expected = LlamaForCausalLM.from_pretrained(folder + "/model").eval()(x).logits

def show(name, model):
    model.eval()
    with torch.no_grad():
        same = torch.equal(model(x).logits, expected)
        text = model.generate(x, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    offloaded = sum(parameter.is_meta for parameter in model.parameters())
    hooks = sum(isinstance(getattr(module, "_hf_hook", None), AlignDevicesHook) for module in model.modules())
    print(name, same, text, offloaded, hooks, sorted(getattr(model, "hf_device_map", {}).items()))

def pretrained(device_map, **options):
    return AutoModelForCausalLM.from_pretrained(
        folder + "/model", device_map=device_map, offload_folder=folder + "/weights", **options
    )

show("auto", pretrained("auto", max_memory={"cpu": "60KB"}))
places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
on_disk = {"model.layers.1": "disk", "model.layers.2": "disk", "lm_head": "cpu"}
model = pretrained({**places, **on_disk})
show("disk", model)
model.save_pretrained(folder + "/again")
show("saved", LlamaForCausalLM.from_pretrained(folder + "/again"))
with init_empty_weights():
    empty = LlamaForCausalLM(config)
show("dispatched", load_checkpoint_and_dispatch(
    empty, folder + "/model", "auto", {"cpu": "80KB"}, ["LlamaDecoderLayer"], folder + "/other"
))
show("cpu", cpu_offload(LlamaForCausalLM.from_pretrained(folder + "/model")))
show("disk", disk_offload(LlamaForCausalLM.from_pretrained(folder + "/model"), folder + "/whole"))
"""


def _run(peers: Path, package: str, folder: Path) -> list[str]:
    folder.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    command = [str(peers), "-c", PROGRAM, package, str(folder)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return [
        line for line in ended.stdout.splitlines() if line.startswith(("auto", "disk", "saved", "dispatched", "cpu"))
    ]


def test_models_with_device_maps_compute_and_generate_the_same(tmp_path: Path, peers: Path) -> None:
    ours = _run(peers, "echelon", tmp_path / "ours")
    assert len(ours) == 6
    assert all(line.split()[1] == "True" for line in ours)
    assert ours == _run(peers, "accelerate", tmp_path / "theirs")
