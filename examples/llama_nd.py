"""Level 2: one script, any mesh. The flags of the launcher divide a small Llama (or Mixtral) among processes, and the losses stay the same.

python examples/llama_nd.py
echelon launch --cpu --num_processes 4 --parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2 examples/llama_nd.py
echelon launch --cpu --num_processes 4 --parallelism_config_dp_shard_size 2 --parallelism_config_tp_size 2 examples/llama_nd.py
echelon launch --cpu --num_processes 4 --parallelism_config_dp_shard_size 4 --parallelism_config_ep_size 2 examples/llama_nd.py --experts
PARALLELISM_CONFIG_PP_SIZE=2 echelon launch --cpu --num_processes 2 --use_parallelism_config examples/llama_nd.py
"""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from echelon import Accelerator

SEED, EPOCHS, BATCH_SIZE, LENGTH, VOCABULARY, IGNORED = 7, 2, 8, 16, 64, -100


def make_texts(count=48):
    """Return token ids, and as labels the ids of the first 4 to 16 tokens; the other labels are ignored."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 4, (count, LENGTH), generator=random).cumsum(1) % VOCABULARY
    ends = torch.randint(4, LENGTH + 1, (count, 1), generator=random)
    labels = torch.where(torch.arange(LENGTH) < ends, ids, IGNORED)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels)]


def build(has_experts):
    """Return the model, the same on every process, whatever part of it the process keeps."""
    torch.manual_seed(SEED)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH, "use_cache": False,
    }  # fmt: skip
    if has_experts:
        return MixtralForCausalLM(MixtralConfig(intermediate_size=48, num_local_experts=4, **sizes))
    return LlamaForCausalLM(LlamaConfig(intermediate_size=96, **sizes))


def train(has_experts=False):
    """Train, and return the mean loss per token of each epoch."""
    accelerator = Accelerator(
        parity="exact", seed=SEED
    )  # BATCH_SIZE is that of all ranks, and each token has the same weight
    model = build(has_experts)
    layout = accelerator.parallelism_config
    pipeline = accelerator.prepare_pipeline(model) if layout is not None and layout.pp_enabled else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_texts(), batch_size=BATCH_SIZE, shuffle=True)
    if pipeline is None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:  # each rank computes some of the layers
        optimizer, loader = accelerator.prepare(optimizer, loader)
    history = []
    for epoch in range(EPOCHS):
        sums = torch.zeros(2, dtype=torch.float64)  # losses and tokens
        for batch in loader:
            num_tokens = (batch["labels"][:, 1:] != IGNORED).sum()
            if pipeline is None:
                loss = model(**batch).loss
                accelerator.backward(loss, num_items=num_tokens)
            else:
                loss = pipeline.step(batch)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            sums += torch.stack([loss.detach().double() * num_tokens, num_tokens.double()]).cpu()
        total, count = accelerator.reduce(sums.to(accelerator.device), "sum").tolist()
        history.append(total / count)
        accelerator.print(f"epoch {epoch}: loss {history[-1]:.5f} per token")
    accelerator.end_training()
    return history


if __name__ == "__main__":
    train("--experts" in sys.argv)
