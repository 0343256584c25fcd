"""Every constant of the models of memory and time that is not arithmetic, in one place, each for one effect and with its source.

None belongs to a row of a table, to a model, or to a number of GPUs. "GRPO table" is tests/data/published/grpo_qwen2.5_7b.csv, "DAPO table"
is dapo7b.csv; docs/planning.md shows what the models say of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 1 << 30

# ---- workload ----------------------------------------------------------------------------------------------------------------------------

# Standard deviation of the logarithm of response lengths: with a mean of 1,000 theirs is then 800, and 1 in 1,000 has over 6,800.
SPREAD = 0.7

# ---- arithmetic --------------------------------------------------------------------------------------------------------------------------

TILE = 128  # a side of a matrix product as long as one tile costs twice its arithmetic: filling and draining the pipeline of a tile
ATTENTION_SHARE = 0.6  # share of what products reach: FlashAttention-3's paper has 450 to 550 TFLOP/s, both passes, causal, heads of 128
HBM_SHARE = (
    0.8  # share of the nominal bandwidth that kernels reach which read and write once (STREAM-like copies, vendor's and own figures)
)
LINK_SHARE = 0.75  # share of the nominal bandwidth that large collectives reach (nccl-tests: 340 GB/s of 450 on NVLink 4)

# ---- memory traffic, in times the bytes that a layer keeps (`Shape.layer_bytes`) ---------------------------------------------------------

FORWARD_TRAFFIC = 2  # each is written once and read once by the next operation
BACKWARD_TRAFFIC = 4  # read again; its gradient is written and read, and added to another
# Times that, where no kernel is fused: the norms, rotary positions and gates of Hugging Face's Qwen2 read and write 175 bytes for each
# number of the hidden state in a forward pass, counted operation by operation, where it keeps 63.
UNFUSED_TRAFFIC = 1.5
LOGIT_TRAFFIC = 24  # bytes for each number of whole logits in a forward pass: bf16 out, fp32 in, maximum, exponential, sum, choice
STATE_TRAFFIC = 30  # bytes for each parameter of an Adam step: fp32 gradient, master, two moments, bf16 result, norm

# ---- the host ----------------------------------------------------------------------------------------------------------------------------

# Rotary positions that are not fused run over packed sequences one by one, for queries and keys: about 9 launches forward and 11 backward.
ROPE_LAUNCHES = (2 * 9, 2 * 11)
LAUNCH = 8e-6  # seconds of an eager launch from Python with autograd (PyTorch's profiler shows 5 to 10 us)
COLLECTIVE_LATENCY = 20e-6  # seconds of a small all-reduce between GPUs of a machine (nccl-tests)
EXPERT_IMBALANCE = 1.2  # times the mean, that the GPU with the most popular experts has to compute (routers balance over long spans only)


@dataclass(frozen=True)
class SystemCosts:
    """What a system's host code costs, whatever the GPU. Rates are bytes per second; infinite: it does not happen."""

    # Seconds in which Python launches a layer's forward pass, eagerly; a backward pass takes twice as long. Rows without dynamic batches
    # in the GRPO table are bound by it: 4.1 to 5.1 ms a layer remain after their arithmetic is taken off. fulltilt's own took 0.13 s for
    # the 30 layers of SmolLM2-135M, both passes, on an H200 that was idle nine tenths of that time (docs/bench/gsm8k_tuning.json).
    host_layer: float = 1.6e-3
    host_ring: float = 0.7e-3  # more for each further step of a ring of context-parallel GPUs: attention, corrections, sends
    host_experts: float = 1.5e-3  # more for a layer with experts: router, permutation, exchanges, grouped products
    # Of the shorter of host and GPU time, that hides behind the longer: verl reads losses and lengths back in every micro-batch.
    hidden: float = 0.5
    driver_rate: float = 1.5e9  # a Ray driver pickles and hands out padded batches
    megatron_copies: int = 3  # times that rows pass so to Megatron workers, which unpack them, copy them to the ranks of a group, and split
    host_copy: float = 3e9  # to and from host memory that is not pinned, as verl 0.4 offloads, all GPUs of a machine at once
    sync_rate: float = 6e9  # parameters reach the engine gathered and renamed one by one
    pipelines: bool = True  # whether it has pipeline parallelism
    streams_optimizer: bool = False  # offloaded states pass through the GPU in pieces at each optimizer step, and are never there whole
    scoring: float = 0.5e-3  # seconds of the driver for each sample: rewards, advantages, metrics
    engine_step: float = 1.2e-3  # seconds in each decode step: scheduling and sampling of a batch (vLLM: about 1 ms)
    engine_sequence: float = 30e-6  # seconds for each sample in a step: its tokens, stop conditions, blocks
    engine_broadcast: float = 30e-6  # more where several processes share a model: the step's inputs are pickled and sent to them
    eager_layer: float = 0.22e-3  # seconds in which a decode step launches a layer without CUDA graphs: about 30 launches


VERL = SystemCosts()
# The host runs ahead; pinned memory; the engine reads the trainer's parameters; it looks at results every 16 steps.
FULLTILT = SystemCosts(
    host_layer=1.45e-3, hidden=1.0, driver_rate=math.inf, host_copy=math.inf, sync_rate=math.inf, scoring=0.1e-3, pipelines=False,
    streams_optimizer=True, engine_step=0.2e-3, engine_sequence=1e-6, engine_broadcast=0.0,
)  # fmt: skip

# ---- memory ------------------------------------------------------------------------------------------------------------------------------

CONTEXT = GIB // 2  # the CUDA context with its loaded kernels
COMMUNICATOR = GIB // 4  # NCCL's buffers for each kind of group
WORKSPACE = GIB // 2  # cuBLAS, attention, and small tensors of the trainer
ASLEEP = GIB  # what an engine keeps while it sleeps: captured graphs, workspaces, buffers
ENGINE_WORKSPACE = 2 * GIB  # activations of a prefill pass and logits of a batch, inside the engine's share
FRAGMENTED = 0.03  # share of what the trainer holds that its allocator cannot give back or use between phases
LOGIT_BYTES = 8  # bytes for each number of whole logits without gradient: bf16, fp32, and one bf16 copy for the entropy
LOGIT_GRADIENT_BYTES = 4  # more in an update: the gradient in fp32
