"""Classify Chinese reviews with the Trainer, and use the saved model with transformers.pipeline.

python examples/reviews_trainer.py
echelon launch --cpu --num_processes 2 examples/reviews_trainer.py
torchrun --nproc-per-node 2 examples/reviews_trainer.py
"""

from reviews_data import load, parse_args
from transformers import pipeline

from echelon import Trainer, TrainingArguments, set_seed


def accuracy(result):
    return {"accuracy": 100 * float((result.predictions.argmax(axis=1) == result.label_ids).mean())}


def main():
    options = parse_args()
    args = TrainingArguments(
        output_dir="outputs/reviews",
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=100,
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        eval_strategy="epoch",
        save_strategy="no",
    )
    set_seed(0)
    train_set, test_set, tokenizer, model = load(options)
    model.accepts_loss_kwargs = False  # its loss is a mean: do not multiply it by the number of processes
    trainer = Trainer(
        model,
        args,
        train_dataset=train_set,
        eval_dataset=test_set,
        processing_class=tokenizer,  # pads the batches, and is saved with the model
        compute_metrics=accuracy,
    )
    if args.process_index > 0:
        set_seed(args.process_index)  # other dropout masks than on rank 0
    trainer.train()
    metrics = trainer.evaluate()
    trainer.accelerator.print(f"test accuracy {metrics['eval_accuracy']:.1f} %")
    trainer.save_model()

    if trainer.is_world_process_zero():
        (answer,) = pipeline("text-classification", model=args.output_dir)(options.text)
        print(f"{options.text} -> {answer['label']} ({100 * answer['score']:.1f} %)")
    trainer.end()


if __name__ == "__main__":
    main()
