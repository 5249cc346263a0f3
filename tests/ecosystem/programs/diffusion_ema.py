"""A training loop in the style of diffusers' examples: EMA, save and load hooks, resume from a checkpoint.

``--noise-in-data``: the dataset draws the noise of a sample, instead of the loop that of a batch. ``--whole N``: N samples in a batch
of all processes (with ``parity="exact"``); the losses are the means over all samples of the updates.
``--save-on-main``: the state is saved under ``if accelerator.is_main_process``, as in these examples.
"""

import os
import shutil
import sys

import tiny
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, Dataset, TensorDataset


class NoisyImages(Dataset):
    """Images, each with newly drawn noise and a time."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.images[i], torch.randn(self.images[i].shape), torch.randint(0, 50, ())


def train(*, last_step: int, resume: bool) -> tuple[list[float], list[float]]:
    config = ProjectConfiguration(project_dir="out", logging_dir="out/logs")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=config)
    set_seed(5)
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    ema = EMAModel(
        model.parameters(),
        decay=0.99,
        use_ema_warmup=True,
        inv_gamma=1.0,
        power=0.75,
        model_cls=UNet2DModel,
        model_config=model.config,
    )

    def save_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            ema.save_pretrained(os.path.join(output_dir, "unet_ema"))
            for part in models:
                part.save_pretrained(os.path.join(output_dir, "unet"))
                weights.pop()  # so that the weights are not saved a second time

    def load_hook(models, input_dir):
        loaded = EMAModel.from_pretrained(os.path.join(input_dir, "unet_ema"), UNet2DModel)
        ema.load_state_dict(loaded.state_dict())
        for _ in range(len(models)):
            part = models.pop()
            other = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
            part.register_to_config(**other.config)
            part.load_state_dict(other.state_dict())

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    noises = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    dataset = NoisyImages(images) if "--noise-in-data" in sys.argv else TensorDataset(images)
    loader = DataLoader(dataset, batch_size=tiny.whole(4), shuffle="--in-order" not in sys.argv)
    schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=12)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.init_trackers("train_unconditional") if accelerator.is_main_process else None

    step, first_epoch, skipped = 0, 0, 0
    per_epoch = -(-len(loader) // accelerator.gradient_accumulation_steps)
    if resume:
        accelerator.load_state("out/checkpoint-6")
        step = 6
        first_epoch, skipped = step // per_epoch, step % per_epoch * accelerator.gradient_accumulation_steps
    losses, average, sums = [], [], torch.zeros(2)
    epoch = first_epoch
    while step < last_step:
        model.train()
        batches = accelerator.skip_first_batches(loader, skipped) if epoch == first_epoch and skipped else loader
        for clean, *drawn in batches:
            noise, times = drawn or (torch.randn(clean.shape), torch.randint(0, 50, (len(clean),)).long())
            noisy = noises.add_noise(clean, noise, times)
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy, times).sample, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if "--whole" not in sys.argv:
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            else:
                sums += accelerator.reduce(torch.tensor([loss.item() * len(clean), len(clean)]), "sum")
                if accelerator.sync_gradients:
                    losses.append((sums[0] / sums[1]).item())
                    sums.zero_()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                step += 1
                if step == 6 and not resume and "--save-on-main" not in sys.argv:
                    accelerator.save_state("out/checkpoint-6")
                if accelerator.is_main_process:  # noqa: SIM102 - as in the examples
                    if step == 6 and not resume and "--save-on-main" in sys.argv:
                        accelerator.save_state("out/checkpoint-6")
                if step >= last_step:
                    break
        epoch += 1
    accelerator.wait_for_everyone()
    unet = accelerator.unwrap_model(model)
    ema.store(unet.parameters())
    ema.copy_to(unet.parameters())
    if accelerator.is_main_process:
        DDPMPipeline(unet=unet, scheduler=noises).save_pretrained("out/pipeline")
        average = next(iter(unet.parameters())).flatten()[:4].tolist()
    ema.restore(unet.parameters())
    accelerator.wait_for_everyone()
    accelerator.end_training() if resume else accelerator.free_memory()
    return losses, average


def main() -> None:
    shutil.rmtree("out", ignore_errors=True) if os.environ.get("RANK", "0") == "0" else None
    losses, average = train(last_step=12, resume=False)
    resumed, resumed_average = train(last_step=12, resume=True)
    tiny.show(losses=losses, average=average, resumed=resumed, resumed_average=resumed_average)


if __name__ == "__main__":
    main()
