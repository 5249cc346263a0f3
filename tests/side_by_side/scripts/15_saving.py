"""Saving a trained model, and unwrapping it."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file
from show import show

set_seed(9)
accelerator = Accelerator()
own = torch.nn.Linear(3, 2)
model = accelerator.prepare(own)
show("unwrapped is mine", accelerator.unwrap_model(model) is own)

accelerator.wait_for_everyone()
state = accelerator.unwrap_model(model).state_dict()
accelerator.save(state, "weights.pt")
accelerator.save(state, "weights.safetensors", safe_serialization=True)
accelerator.wait_for_everyone()
with accelerator.main_process_first():
    show("files", sorted(name for name in os.listdir() if name.startswith("weights")))
with accelerator.local_main_process_first():
    loaded = torch.load("weights.pt", weights_only=True)
    safe = load_file("weights.safetensors")
show("loaded", {name: tensor.tolist() for name, tensor in loaded.items()})
show("safe", {name: tensor.tolist() for name, tensor in safe.items()})

compiled = accelerator.prepare(torch.compile(torch.nn.Linear(3, 2), backend="eager"))
kept = accelerator.unwrap_model(compiled, keep_torch_compile=True)
bare = accelerator.unwrap_model(compiled, keep_torch_compile=False)
show("kept", hasattr(kept, "_orig_mod"))
show("bare", [hasattr(bare, "_orig_mod"), type(bare).__name__])
show("names", sorted(bare.state_dict()))
