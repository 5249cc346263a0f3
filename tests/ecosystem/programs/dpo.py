"""Direct preference optimization with trl."""

import tiny
from datasets import Dataset
from trl import DPOConfig, DPOTrainer


def main() -> None:
    args = DPOConfig(
        output_dir="out", per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2, learning_rate=1e-3,
        logging_steps=1, save_strategy="no", eval_strategy="epoch", report_to="none", use_cpu=True, max_length=32, seed=7,
        bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip

    def pairs(number: int, seed: int) -> Dataset:
        return Dataset.from_dict(
            {
                "prompt": tiny.texts(number, seed),
                "chosen": [f" {text}" for text in tiny.texts(number, seed + 1)],
                "rejected": [f" {text}" for text in tiny.texts(number, seed + 2)],
            }
        )

    trainer = DPOTrainer(
        model=tiny.causal_model(),
        ref_model=tiny.causal_model(),
        args=args,
        train_dataset=pairs(32, 1),
        eval_dataset=pairs(16, 5),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    names = ("loss", "grad_norm", "rewards/chosen", "rewards/margins", "eval_loss", "eval_rewards/margins")
    tiny.show(**tiny.logged(trainer, *names))


if __name__ == "__main__":
    main()
