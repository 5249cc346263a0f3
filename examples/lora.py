"""Level 3: LoRA with peft and the Trainer: train, save and reload the adapter, and merge it into the base model.

python examples/lora.py
python examples/lora.py --model outputs/gpt2        # the model that gpt2_zero3.py has trained
echelon launch --cpu --num_processes 2 examples/lora.py
torchrun --nproc-per-node 2 examples/lora.py
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from echelon import Trainer, TrainingArguments

TEXT = Path(__file__).resolve().parent / "data" / "reviews" / "reviews.csv"
LENGTH = 64


def load_text():
    """Return samples of LENGTH bytes: the tokens of this model are bytes."""
    data = torch.frombuffer(bytearray(TEXT.read_bytes()[: 272 * LENGTH]), dtype=torch.uint8).long().view(-1, LENGTH)
    samples = [{"input_ids": row, "labels": row} for row in data]
    return samples[:-16], samples[-16:]  # for training, for evaluation


def base_model(folder):
    if folder:
        return GPT2LMHeadModel.from_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": LENGTH, "vocab_size": 256}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder of a pretrained GPT-2 (default: a small one with random weights)")
    parser.add_argument("--output", default="outputs/lora", help="folder for the adapter")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(base_model(options.model), config)
    train_set, test_set = load_text()
    args = TrainingArguments(
        output_dir=options.output,
        parity="exact",  # the same updates on any number of processes
        global_batch_size=16,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model, args, train_dataset=train_set, eval_dataset=test_set)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    trainer.accelerator.print(f"training {trainable:,} of {model.num_parameters():,} parameters")
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # only the adapter

    if trainer.is_world_process_zero():
        merged = PeftModel.from_pretrained(base_model(options.model), options.output).merge_and_unload().eval()
        rows = torch.stack([sample["input_ids"] for sample in test_set])
        with torch.no_grad():
            loss = merged(input_ids=rows, labels=rows).loss.item()
        print(f"test loss {before:.5f} before, {after:.5f} after; of the saved adapter, merged: {loss:.5f}")
    trainer.end()


if __name__ == "__main__":
    main()
