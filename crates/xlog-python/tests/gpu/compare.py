"""Peak memory and median step time of two programs on one allocator: `compare.py native|expandable|xlogmem`. Models have random weights."""

import json
import os
import random
import statistics
import sys
import time

ALLOCATOR = sys.argv[1]
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


def measured(prepare, step, shapes):
    """Runs the steps twice: the first round warms up, each step of the second one is timed."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    state = prepare()
    for shape in shapes:
        step(state, shape)
    torch.cuda.synchronize()
    times = []
    for shape in shapes:
        begin = time.perf_counter()
        step(state, shape)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    stats = torch.cuda.memory_stats()
    return {
        "requested": stats["requested_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "milliseconds": 1000 * statistics.median(times),
    }


def training():
    """A GPT-2 with sequences of mixed lengths."""
    chance = random.Random(1)

    def prepare():
        with torch.device("cuda"):
            model = GPT2LMHeadModel(GPT2Config(n_layer=6))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(state, length):
        model, optimizer = state
        tokens = torch.randint(0, 50_000, (8, length), device="cuda")
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return measured(prepare, step, [chance.randrange(64, 1024) for _ in range(11)])


def generation():
    """A Llama with batches and prompts of mixed sizes."""
    chance = random.Random(2)

    def prepare():
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
        return model

    def step(model, shape):
        tokens = torch.randint(0, 32_000, shape, device="cuda")
        with torch.no_grad():
            model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, pad_token_id=0)

    return measured(prepare, step, [(chance.randrange(1, 33), chance.randrange(32, 1024)) for _ in range(5)])


torch.manual_seed(0)
figures = {}
for program in (training, generation):
    figures[program.__name__] = program()
print(json.dumps(figures))
