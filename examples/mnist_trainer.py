"""Level 3: MNIST with the Trainer, which provides the loop, the evaluation and the logs.

Run it as one process, as two processes on this machine, or as two with torch's own launcher:

    python examples/mnist_trainer.py
    echelon launch --cpu --num_processes 2 examples/mnist_trainer.py
    torchrun --nproc-per-node 2 examples/mnist_trainer.py
"""

import argparse
import hashlib
import sys
import tempfile

import torch.nn.functional as F
from mnist_data import mnist
from mnist_net import Net

from echelon import EvalPrediction, Trainer, TrainingArguments, set_seed


class Digits(Trainer):
    """A Trainer that computes the loss itself, in training and evaluation, because Net takes no labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        images, labels = inputs  # already on the device
        loss = F.nll_loss(outputs := model(images), labels)
        return (loss, outputs) if return_outputs else loss


def accuracy(result: EvalPrediction) -> dict[str, float]:
    right = result.predictions.argmax(axis=1) == result.label_ids  # gathered from all ranks, each image exactly once
    return {"accuracy": 100 * float(right.mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=64, help="samples per process and step")
    parser.add_argument("--data", help="folder with MNIST (default: the repository's own copy)")
    parser.add_argument("--limit", type=int, help="use only the first LIMIT images")
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()
    args = TrainingArguments(
        output_dir=f"{tempfile.gettempdir()}/mnist_trainer",
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=1000,
        num_train_epochs=options.epochs,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=50,
        log_level="info",  # logs the sizes of the run before it starts
    )
    set_seed(0)  # the same initial weights on every rank
    trainer = Digits(
        Net(),
        args,
        train_dataset=mnist(True, options.data, options.limit),
        eval_dataset=mnist(False, options.data, options.limit),
        compute_metrics=accuracy,
    )
    set_seed(0, device_specific=True)  # different dropout masks on each rank
    print(f"world: {trainer.accelerator.world}", flush=True)
    steps = trainer.train().global_step
    result = next(entry["eval_accuracy"] for entry in reversed(trainer.state.log_history) if "eval_accuracy" in entry)
    weights = b"".join(value.cpu().numpy().tobytes() for value in trainer.model.state_dict().values())
    print(f"rank {args.process_index}: {steps} steps, weights {hashlib.sha256(weights).hexdigest()[:12]}", flush=True)
    if options.save:
        trainer.accelerator.save(trainer.model.state_dict(), options.save)
    trainer.accelerator.print(f"test accuracy {result:.2f} %")
    trainer.end()  # closes the process group
    if result < 98.0 and options.limit is None:
        sys.exit("the accuracy is below 98.0 %: training failed")


if __name__ == "__main__":
    main()
