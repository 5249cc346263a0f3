"""Supervised fine-tuning with trl; ``--packed`` packs the texts into rows of one length; ``--whole N``: see ``tiny.whole``."""

import sys

import tiny
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main() -> None:
    packed = "--packed" in sys.argv
    args = SFTConfig(
        output_dir="out", per_device_train_batch_size=tiny.share_of(4), gradient_accumulation_steps=2, num_train_epochs=2, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", eval_strategy="epoch", report_to="none", use_cpu=True, max_length=24,
        packing=packed, eval_packing=False, seed=7, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=tiny.causal_model(),
        args=args,
        train_dataset=Dataset.from_dict({"text": tiny.texts(64, 1)}),
        eval_dataset=Dataset.from_dict({"text": tiny.texts(16, 2)}),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    names = (
        "loss",
        "grad_norm",
        "learning_rate",
        "eval_loss",
        "mean_token_accuracy",
        "eval_mean_token_accuracy",
        "num_tokens",
    )
    tiny.show(**tiny.logged(trainer, *names))


if __name__ == "__main__":
    main()
