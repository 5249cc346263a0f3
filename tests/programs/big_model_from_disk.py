"""Builds a model that is larger than its memory, on disk, runs it, and prints the peak of its memory in MB.

``python big_model_from_disk.py FOLDER NUM_LAYERS WIDTH``: each layer has WIDTH x WIDTH float32 weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from echelon import init_empty_weights, load_checkpoint_and_dispatch


def peak_mb() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def weights(layer: int, width: int) -> dict[str, torch.Tensor]:
    matrix = torch.eye(width).roll(layer, 0) * (0.9 + 0.001 * layer)  # other values in each layer, and quick to build
    return {f"{layer}.weight": matrix, f"{layer}.bias": torch.arange(width) * (0.01 * layer / width)}


def main(folder: Path, num_layers: int, width: int) -> None:
    torch.set_num_threads(1)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    start = torch.ones(2, width)
    expected = start
    for layer in range(num_layers):
        values = weights(layer, width)
        # The formula of the model, with one layer in memory.
        expected = expected @ values[f"{layer}.weight"].T + values[f"{layer}.bias"]
        save_file(values, checkpoint / f"model-{layer}.safetensors")
    files = {
        f"{layer}.{name}": f"model-{layer}.safetensors" for layer in range(num_layers) for name in ("weight", "bias")
    }
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    before = peak_mb()
    with init_empty_weights():
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])
    load_checkpoint_and_dispatch(model, checkpoint, device_map={"": "disk"}, offload_folder=folder / "offload")
    with torch.no_grad():
        outputs = [model(start) for _ in range(2)]
    size = sum(parameter.numel() * 4 for parameter in model.parameters()) / 2**20
    close = [torch.allclose(output, expected, rtol=1e-4, atol=1e-5) for output in outputs]
    print(json.dumps({"size_mb": size, "before_mb": before, "peak_mb": peak_mb(), "close": close}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
