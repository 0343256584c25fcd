"""Activation bytes of the update, predicted from the shape and measured: `python tests/gpu_activation.py [--shape 7B] [--out F]`.

For each recompute and number of tokens: bytes allocated between the end of the forward pass (head included, its logits made again) and the
beginning of the backward pass, less those allocated before the forward pass. On a CPU (tiny shape) only the prediction is printed, and that
the passes run. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from layers import apply_recompute

from fulltilt.bench import shapes
from fulltilt.footprint import HeadOptions, head_bytes
from fulltilt.model import attention
from fulltilt.model.attention import Packed
from fulltilt.model.forward import hidden_states
from fulltilt.model.fuse import fuse, unfuse
from fulltilt.model.heads import Head, token_logprobs
from fulltilt.shape import Recompute, Shape

KINDS = ("none", "selective", "full")


def allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(device)


def one(model, shape: Shape, device: torch.device, tokens: int, documents: int, kind: str, fused: bool) -> dict:
    itemsize = model.dtype.itemsize
    handle = apply_recompute(model, Recompute(kind))
    bounds = np.linspace(0, tokens, documents + 1).astype(np.int64)
    ids = torch.randint(0, shape.vocabulary, (tokens,), device=device)
    positions = torch.cat([torch.arange(int(n), device=device) for n in np.diff(bounds)])
    rows = torch.arange(tokens, device=device)
    found = []
    for _ in range(2):  # the first pass compiles kernels and takes workspaces
        for parameter in model.parameters():
            parameter.grad = None
        before = allocated(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        hidden = hidden_states(model, ids, positions, Packed.of(bounds, device))
        read = hidden[rows]
        del hidden
        layers = allocated(device) - before
        logprobs, entropy = token_logprobs(read, Head.of(model), ids, 1.0, HeadOptions(), entropy="value")
        del read
        kept = allocated(device) - before
        peak_forward = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        logprobs.sum().backward()
        peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
        del logprobs, entropy
        found.append((layers, kept, peak_forward, peak))
    handle.remove()
    predicted = tokens * shape.kept_bytes(itemsize, fused=fused, recompute=Recompute(kind))
    layers, kept, peak_forward, peak = found[-1]
    return {
        "recompute": kind, "tokens": tokens, "documents": documents, "fused": fused, "predicted_bytes": predicted,
        "measured_bytes": kept, "measured_before_the_head": layers, "deviation": kept / predicted - 1 if kept else None,
        "head_peak_predicted": head_bytes(tokens, shape.vocabulary, shape.width, itemsize=itemsize, entropy="value").peak,
        "peak_forward": peak_forward, "peak_with_backward_and_gradients": peak,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="7B")
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = shapes.find(given.shape)
    model, shape = shapes.random_model(source, device, attention.register()), Shape.named(given.shape)
    assert sum(shape.parameters_by_kind().values()) == sum(parameter.numel() for parameter in model.parameters())
    results = []
    for fused in (True, False):
        if fused:
            print(fuse(model), file=sys.stderr)
        else:
            unfuse(model)
        for tokens in map(int, given.tokens.split(",")):
            for kind in KINDS:
                try:
                    results.append(one(model, shape, device, tokens, given.documents, kind, fused))
                except torch.OutOfMemoryError as error:
                    results.append({"recompute": kind, "tokens": tokens, "fused": fused, "out_of_memory": str(error)[:200]})
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    deviations = [abs(found["deviation"]) for found in results if found.get("deviation") is not None]
    document = {"shape": given.shape, "device": name, "worst_deviation": max(deviations, default=None), "results": results}
    text = json.dumps(document, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
