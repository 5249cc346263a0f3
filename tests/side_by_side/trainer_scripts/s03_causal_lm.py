"""A language model from scratch, as in the course of transformers: blocks of text, perplexity, text generation."""

import math

import torch
from small import tokenizer_of
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel

from echelon import Trainer, TrainingArguments

POEM = "床前明月光疑是地上霜举头望明月低头思故乡白日依山尽黄河入海流欲穷千里目更上一层楼"
BLOCK = 20

tokenizer = tokenizer_of([POEM])
ids = tokenizer(POEM * 40, add_special_tokens=False)["input_ids"]
blocks = [ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK, BLOCK)]
lm_datasets = [{"input_ids": block, "attention_mask": [1] * BLOCK} for block in blocks]
split = len(lm_datasets) * 9 // 10

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(tokenizer), n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=2, eos_token_id=3
)
model = GPT2LMHeadModel(config)
training_args = TrainingArguments(
    "gpt2-poem",
    overwrite_output_dir=True,
    evaluation_strategy="epoch",
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    weight_decay=0.1,
    num_train_epochs=8,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=2,
    logging_steps=10,
    save_steps=1000,
    use_mps_device=False,
    no_cuda=True,
)
trainer = Trainer(
    model=model,
    tokenizer=tokenizer,
    args=training_args,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    train_dataset=lm_datasets[:split],
    eval_dataset=lm_datasets[split:],
)
trainer.train()
metrics = trainer.evaluate()
metrics["perplexity"] = math.exp(metrics["eval_loss"])
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)

prompt = tokenizer(POEM[:8], add_special_tokens=False, return_tensors="pt")["input_ids"]
text = trainer.model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
answers = tokenizer.decode(text[0, 8:]).replace(" ", "")
print(metrics, answers)
