#!/usr/bin/env python3
"""Records the allocations of real PyTorch programs as logs that `xlogmem replay` and the example `memory_held` read.

    bench/traces/record.py OUT            every program, each in a process of its own, into the folder OUT
    bench/traces/record.py OUT gpt2       one of them: gpt2, llama, streams
    bench/traces/record.py OUT --small    shorter runs, for logs that are committed

It needs a GPU, PyTorch and transformers; models have random weights, so nothing is downloaded. For each program it writes
OUT/NAME.csv.gz (RMM's columns: one line for each allocation and each completed free) and prints the peak of requested and of
reserved bytes of PyTorch's own allocator, by default and with expandable segments.
"""

import argparse
import gzip
import json
import os
import pathlib
import random
import subprocess
import sys
import time

PROGRAMS = ("gpt2", "llama", "streams")


def gpt2(torch, small):
    """Training of a GPT-2 with sequences of mixed lengths, on one stream."""
    from transformers import GPT2Config, GPT2LMHeadModel

    chance = random.Random(1)
    model = GPT2LMHeadModel(GPT2Config(n_layer=6 if small else 12)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(8 if small else 30):
        length = chance.randrange(64, 1024)
        tokens = torch.randint(0, 50_000, (8, length), device="cuda")
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


def llama(torch, small):
    """Generation by a Llama with batches and prompts of mixed sizes, on one stream."""
    from transformers import LlamaConfig, LlamaForCausalLM

    chance = random.Random(2)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8 if small else 16,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32_000,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).cuda().eval()
    model.generation_config.eos_token_id = None
    for _ in range(4 if small else 12):
        batch, prompt = chance.randrange(1, 33), chance.randrange(32, 1024)
        tokens = torch.randint(0, 32_000, (batch, prompt), device="cuda")
        with torch.no_grad():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=8 if small else 48,
                do_sample=False,
                pad_token_id=0,
            )
    torch.cuda.synchronize()


def streams(torch, small):
    """Random buffers over four streams: each is filled on one, read on the next, and freed in random order."""
    chance = random.Random(3)
    four = [torch.cuda.Stream() for _ in range(4)]
    live = []
    for step in range(3_000 if small else 20_000):
        scale = 1024 << chance.randrange(16)
        size = scale + chance.randrange(scale)
        own, other = four[step % 4], four[(step + 1) % 4]
        with torch.cuda.stream(own):
            buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
            buffer.fill_(1)
        other.wait_stream(own)
        with torch.cuda.stream(other):
            buffer[: min(size, 4096)].sum()
        buffer.record_stream(other)
        live.append(buffer)
        del buffer
        if len(live) > 100:
            live[chance.randrange(len(live))] = live[-1]
            live.pop()
        if step % 64 == 0:
            torch.cuda.synchronize()
    live.clear()
    torch.cuda.synchronize()


def write_log(path, trace):
    """Writes allocations and completed frees in RMM's columns."""
    lines = ["Thread,Time,Action,Pointer,Size,Stream\n"]
    for event in trace:
        action = {"alloc": "allocate", "free_completed": "free"}.get(event["action"])
        if action is None:
            continue
        micros = int(event.get("time_us", 0)) % 86_400_000_000
        seconds, micros = divmod(micros, 1_000_000)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}"
        lines.append(f"1,{clock},{action},{event['addr']:#x},{event['size']},{event['stream']:#x}\n")
    # Without a time stamp in the header, the same program gives the same file.
    with open(path, "wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
        packed.write("".join(lines).encode())
    return len(lines) - 1


def record(name, path, small):
    """Runs one program in this process. With a path its log is written there."""
    import torch

    torch.manual_seed(0)
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    begin = time.monotonic()
    globals()[name](torch, small)
    seconds = time.monotonic() - begin
    stats = torch.cuda.memory_stats()
    figures = {
        "program": name,
        "requested": stats["requested_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "seconds": round(seconds, 2),
        "torch": torch.__version__,
    }
    if path is not None:
        snapshot = torch.cuda.memory._snapshot()
        figures["operations"] = write_log(path, snapshot["device_traces"][0])
    print(json.dumps(figures), flush=True)


def run(name, path, small, settings):
    """Runs one program in a process of its own; returns its figures."""
    command = [sys.executable, __file__, "--child", name] + (["--small"] if small else [])
    command += [str(path)] if path is not None else ["-"]
    environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF=settings, PYTORCH_ALLOC_CONF=settings)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{name}: failed\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the folder for the logs")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"some of {', '.join(PROGRAMS)}; all by default")
    parser.add_argument("--small", action="store_true", help="shorter runs")
    parser.add_argument("--child", choices=PROGRAMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        record(arguments.child, None if arguments.out == "-" else arguments.out, arguments.small)
        return 0
    unknown = [name for name in arguments.programs if name not in PROGRAMS]
    if unknown:
        parser.error(f"unknown program '{unknown[0]}'; accepted are {', '.join(PROGRAMS)}")
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for name in arguments.programs or PROGRAMS:
        for settings in ("", "expandable_segments:True"):
            path = out / f"{name}.csv.gz" if not settings else None
            figures = run(name, path, arguments.small, settings)
            failed |= figures is None
            if figures is not None:
                ratio = figures["reserved"] / figures["requested"]
                label = "expandable segments" if settings else "default"
                print(f"{name}, PyTorch {figures['torch']} {label}: {ratio:.3f} of {figures['requested'] / 2**20:.1f} MiB, {json.dumps(figures)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
