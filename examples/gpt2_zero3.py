"""Level 2: a GPT-2 from a transformers config with ZeRO-3: every rank holds a part of the parameters, gradients and optimizer state.

The script does not name an engine. These commands train the same model to the same loss (leave out --cpu on GPUs):

    python examples/gpt2_zero3.py                     # one process: nothing is sharded
    echelon launch --cpu --config_file examples/configs/zero3.yaml examples/gpt2_zero3.py
    echelon launch --cpu --num_processes 2 --deepspeed examples/configs/ds_config.json examples/gpt2_zero3.py
    echelon launch --cpu --num_processes 2 --use_fsdp --fsdp_version 2 examples/gpt2_zero3.py

The third one needs DeepSpeed: pip install "deepspeed>=0.19.8"
"""

import argparse
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from echelon import Accelerator

TEXT = Path(__file__).resolve().parent / "data" / "reviews" / "reviews.csv"
SEED, LENGTH, BATCH_SIZE = 7, 64, 16


def load_text():
    """Return rows of LENGTH bytes, int64: the tokens of this model are bytes."""
    data = torch.frombuffer(bytearray(TEXT.read_bytes()[: 528 * LENGTH]), dtype=torch.uint8).long().view(-1, LENGTH)
    return data[:-16], data[-16:]  # for training, for evaluation


def build():
    torch.manual_seed(SEED)
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": LENGTH, "vocab_size": 256}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # so that all ways give the same loss
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def evaluate(model, rows):
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    model.train()
    return loss


def num_held(parameter):
    """Return how many elements of the parameter are on this rank."""
    if hasattr(parameter, "ds_tensor"):  # DeepSpeed
        return parameter.ds_tensor.numel()
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="outputs/gpt2", help="folder for the trained model")
    options = parser.parse_args()

    accelerator = Accelerator(parity="exact", seed=SEED)  # BATCH_SIZE samples per update, over all processes
    train_set, test_set = load_text()
    model = build()
    num_parameters = model.num_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    held = sum(num_held(parameter) for parameter in model.parameters())
    print(f"rank {accelerator.process_index} holds {held:,} of {num_parameters:,} parameters", flush=True)

    for rows in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=rows, labels=rows).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    last_loss = accelerator.update_loss()
    # On every rank, because each layer is gathered from all of them.
    test_loss = evaluate(model, test_set.to(accelerator.device))

    state = accelerator.get_state_dict(model)  # on every rank; rank zero gets the whole model
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(options.output, state_dict=state)
        print(f"{accelerator.progress.step} updates, last loss {last_loss:.5f}, test loss {test_loss:.5f}")
        print(f"saved; load it with GPT2LMHeadModel.from_pretrained({options.output!r})")
    accelerator.end_training()


if __name__ == "__main__":
    main()
