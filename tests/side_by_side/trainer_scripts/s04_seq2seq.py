"""Translation with Seq2SeqTrainer: predict_with_generate, labels padded with -100 and decoded for metrics."""

import numpy as np
import torch
from small import tokenizer_of
from transformers import BartConfig, BartForConditionalGeneration, DataCollatorForSeq2Seq

from echelon import Seq2SeqTrainer, Seq2SeqTrainingArguments

PAIRS = [
    ("中国", "北京"), ("日本", "东京"), ("法国", "巴黎"), ("德国", "柏林"), ("英国", "伦敦"), ("韩国", "首尔"),
    ("俄罗斯", "莫斯科"), ("意大利", "罗马"), ("西班牙", "马德里"), ("加拿大", "渥太华"), ("埃及", "开罗"), ("古巴", "哈瓦那"),
]  # fmt: skip

tokenizer = tokenizer_of([text for pair in PAIRS for text in pair])


def preprocess(pair):
    model_inputs = tokenizer(pair[0], truncation=True)
    model_inputs["labels"] = tokenizer(text_target=pair[1], truncation=True)["input_ids"]
    del model_inputs["token_type_ids"]
    return dict(model_inputs)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    preds = np.where(preds != -100, preds, tokenizer.pad_token_id)
    labels = np.where(labels != -100, labels, tokenizer.pad_token_id)
    decoded_preds = tokenizer.batch_decode(preds, skip_special_tokens=True)
    decoded_labels = tokenizer.batch_decode(labels, skip_special_tokens=True)
    equal = [p == e for p, e in zip(decoded_preds, decoded_labels)]
    lengths = [np.count_nonzero(pred != tokenizer.pad_token_id) for pred in preds]
    return {"exact": sum(equal) / len(equal), "gen_len": float(np.mean(lengths))}


torch.manual_seed(0)
config = BartConfig(
    vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0,
    pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=2, forced_eos_token_id=None,
)  # fmt: skip
model = BartForConditionalGeneration(config)
dataset = [preprocess(pair) for pair in PAIRS]
args = Seq2SeqTrainingArguments(
    "bart-capitals",
    evaluation_strategy="epoch",
    eval_delay=24,
    learning_rate=1e-2,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=5,
    weight_decay=0.01,
    save_strategy="no",
    save_total_limit=3,
    num_train_epochs=25,
    predict_with_generate=True,
    generation_max_length=8,
    fp16=False,
    no_cuda=True,
)
trainer = Seq2SeqTrainer(
    model,
    args,
    train_dataset=dataset * 2,
    eval_dataset=dataset,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    tokenizer=tokenizer,
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
predictions = trainer.predict(dataset, max_length=8, num_beams=2)
answers = [text.replace(" ", "") for text in tokenizer.batch_decode(predictions.predictions, skip_special_tokens=True)]
print(metrics, answers)
