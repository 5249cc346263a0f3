"""LoRA by transformers' Trainer: save, reload, merge."""

import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments


def main() -> None:
    tokenizer = tiny.tokenizer()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model = get_peft_model(tiny.causal_model(), config)
    args = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2, learning_rate=1e-2,
        logging_steps=1, save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True, report_to="none",
        use_cpu=True, seed=7, disable_tqdm=True,
    )  # fmt: skip

    def rows(number: int, seed: int) -> list[dict[str, list[int]]]:
        return [{"input_ids": tokenizer(text)["input_ids"]} for text in tiny.texts(number, seed)]

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows(32, 1),
        eval_dataset=rows(16, 2),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model("adapter")
    trainer.accelerator.wait_for_everyone()
    inputs = torch.tensor([[1, 5, 6, 7]])
    reloaded = PeftModel.from_pretrained(tiny.causal_model(), "adapter").eval()
    merged = reloaded.merge_and_unload()
    with torch.no_grad():
        trained, loaded = model.eval()(inputs).logits, merged(inputs).logits
    assert torch.allclose(trained, loaded, atol=1e-5), (trained - loaded).abs().max()
    tiny.show(
        **tiny.logged(trainer, "loss", "grad_norm", "eval_loss"), evaluated=evaluated, logits=trained[0, -1, :4].tolist(),
        best=(trainer.state.best_model_checkpoint or "").rpartition("/")[2],
    )  # fmt: skip


if __name__ == "__main__":
    main()
