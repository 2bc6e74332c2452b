"""A program on one allocator: `compare.py native|expandable|xlogmem training|generation`. Models have random weights.

It prints its number of steps, and then answers each line of its input. `N` runs step N and prints its milliseconds; `memory` prints the peaks.
"""

import json
import os
import random
import sys
import time

ALLOCATOR, PROGRAM = sys.argv[1:]
if ALLOCATOR == "expandable":
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

try:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    print(error)
    sys.exit(77)

import xlogmem

if ALLOCATOR == "xlogmem":
    xlogmem.torch.enable()


def training():
    """A GPT-2 with sequences of mixed lengths: its steps."""
    chance = random.Random(1)
    with torch.device("cuda"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(length):
        tokens = torch.randint(0, 50_000, (8, length), device="cuda")
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, [chance.randrange(64, 1024) for _ in range(11)]


def generation():
    """A Llama with batches and prompts of mixed sizes: its steps."""
    chance = random.Random(2)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32_000,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None

    def step(shape):
        tokens = torch.randint(0, 32_000, shape, device="cuda")
        with torch.no_grad():
            model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, pad_token_id=0)

    return step, [(chance.randrange(1, 33), chance.randrange(32, 1024)) for _ in range(5)]


torch.manual_seed(0)
step, shapes = {"training": training, "generation": generation}[PROGRAM]()
torch.cuda.synchronize()
print(len(shapes), flush=True)
for line in sys.stdin:
    if line.strip() == "memory":
        stats = torch.cuda.memory_stats()
        print(json.dumps([stats["requested_bytes.all.peak"], stats["reserved_bytes.all.peak"]]), flush=True)
        continue
    begin = time.perf_counter()
    step(shapes[int(line)])
    torch.cuda.synchronize()
    print(1000 * (time.perf_counter() - begin), flush=True)
