"""denoising-diffusion-pytorch: its Trainer on a sequence of one dimension, which saves and loads a milestone.

Its Trainer passes ``split_batches=True`` to Accelerator, which accelerate ignores. ``--whole-batches``: passes False.
``--dataloader-config``: passes it in a ``DataLoaderConfiguration``, which accelerate follows.
"""

import sys
import types

import accelerate
import tiny
import torch

# The package imports torchvision, whose wheel needs the same build of torch; training in one dimension never calls it.
STUBS = ("torchvision", "torchvision.transforms", "torchvision.utils", "torchvision.models")
for stub in STUBS:
    sys.modules[stub] = types.ModuleType(stub)
    setattr(sys.modules["torchvision"], stub.rpartition(".")[2], sys.modules[stub])
from denoising_diffusion_pytorch import denoising_diffusion_pytorch_1d  # noqa: E402 - after the stubs
from denoising_diffusion_pytorch.denoising_diffusion_pytorch_1d import (  # noqa: E402
    Dataset1D,
    GaussianDiffusion1D,
    Trainer1D,
    Unet1D,
)

for stub in STUBS:
    del sys.modules[stub]
if "--in-order" in sys.argv:
    loader = denoising_diffusion_pytorch_1d.DataLoader
    denoising_diffusion_pytorch_1d.DataLoader = lambda data, **options: loader(data, **{**options, "shuffle": False})
if "--dataloader-config" in sys.argv:

    def with_configuration(*, split_batches: bool, **options):
        config = accelerate.DataLoaderConfiguration(split_batches=split_batches)
        return accelerate.Accelerator(dataloader_config=config, **options)

    denoising_diffusion_pytorch_1d.Accelerator = with_configuration


def main() -> None:
    torch.manual_seed(3)
    model = Unet1D(dim=8, dim_mults=(1, 2), channels=2)
    diffusion = GaussianDiffusion1D(model, seq_length=8, timesteps=20, sampling_timesteps=4, objective="pred_v")
    data = Dataset1D(torch.rand(32, 2, 8, generator=torch.Generator().manual_seed(1)))
    losses = []
    forward = diffusion.p_losses

    def recorded(*args, **kwargs):
        loss = forward(*args, **kwargs)
        losses.append(loss.item())
        return loss

    diffusion.p_losses = recorded
    trainer = Trainer1D(
        diffusion, dataset=data, train_batch_size=4, gradient_accumulate_every=2, train_lr=1e-3, train_num_steps=8,
        ema_decay=0.9, save_and_sample_every=4, num_samples=4, results_folder="out", amp=False,
        split_batches="--whole-batches" not in sys.argv,
    )  # fmt: skip
    torch.manual_seed(11)
    trainer.train()
    if (
        trainer.accelerator.num_processes == 1
    ):  # with several on CPUs, accelerate passes torch.load a device that it does not know (cpu:0)
        trainer.load(2)
    weights = next(iter(trainer.accelerator.unwrap_model(trainer.model).parameters())).flatten()[:4].tolist()
    tiny.show(losses=losses, step=trainer.step, weights=weights)


if __name__ == "__main__":
    main()
