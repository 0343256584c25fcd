"""Every constant of the models of memory and time that is not arithmetic, in one place, each for one effect and with its source.

None belongs to a row of a table, to a model, or to a number of GPUs. "GRPO table" is tests/data/published/grpo_qwen2.5_7b.csv, "DAPO table"
is dapo7b.csv; docs/planning.md shows what the models say of both.
"""

from __future__ import annotations

GIB = 1 << 30

# ---- workload ----------------------------------------------------------------------------------------------------------------------------

SPREAD = 0.7  # of the logarithm of response lengths: a mean of 1,000 then has a standard deviation of 800, and 1 in 1,000 has over 6,800

# ---- arithmetic --------------------------------------------------------------------------------------------------------------------------

TILE = 128  # a side of a matrix product as long as one tile costs twice its arithmetic: filling and draining the pipeline of a tile
ATTENTION_SHARE = 0.6  # of what matrix products reach: FlashAttention-3's paper has 450 to 550 TFLOP/s, both passes, causal, heads of 128
HBM_SHARE = 0.8  # of the nominal bandwidth that kernels reach which read and write once (STREAM-like copies, vendor and own measurement)
LINK_SHARE = 0.75  # of the nominal bandwidth that large collectives reach (nccl-tests: 340 GB/s of 450 on NVLink 4)

# ---- memory traffic, in times the bytes that a layer keeps (`Shape.layer_bytes`) -----------------------------------------------------------

FORWARD_TRAFFIC = 2  # each is written once and read once by the next operation
BACKWARD_TRAFFIC = 4  # read again; its gradient is written and read, and added to another
UNFUSED_TRAFFIC = 1.5  # times that, where no kernel is fused: Hugging Face's norms, rotary positions and gates read and write 175 hidden sizes
LOGIT_TRAFFIC = 24  # bytes for each number of whole logits in a forward pass: bf16 out, fp32 in, maximum, exponential, sum, choice
STATE_TRAFFIC = 30  # bytes for each parameter of an Adam step: fp32 gradient, master, two moments, bf16 result, norm

# ---- the host ------------------------------------------------------------------------------------------------------------------------------

# Seconds in which Python launches a layer's forward pass, eagerly, through the modules of Megatron and Transformer Engine or FSDP's hooks.
# A backward pass takes twice as long. Rows without dynamic batches in the GRPO table are bound by it: 4.1 to 5.1 ms a layer remain after
# their arithmetic is taken off.
HOST_LAYER = 1.6e-3
HOST_RING = 0.7e-3  # more for each further step of a ring of context-parallel GPUs: kernels of attention, corrections, sends
HOST_EXPERTS = 1.5e-3  # more for a layer with experts: router, permutation, exchanges, grouped products
HIDDEN = 0.5  # of the shorter of host and GPU time that hides behind the longer: losses and lengths are read back in every micro-batch
# Rotary positions that are not fused run over packed sequences one by one, for queries and keys: about 9 launches forward and 11 backward.
ROPE_LAUNCHES = (2 * 9, 2 * 11)
LAUNCH = 8e-6  # seconds of an eager launch from Python with autograd (PyTorch's profiler shows 5 to 10 us)

# ---- other systems' drivers -------------------------------------------------------------------------------------------------------------------

DRIVER_RATE = 1.5e9  # bytes/s in which a Ray driver pickles and hands out padded batches, once for each GPU that computes the same rows
HOST_COPY = 3e9  # bytes/s to and from host memory that is not pinned, as verl 0.4 offloads, all GPUs of a machine at once
SYNC_RATE = 6e9  # bytes/s in which parameters reach the engine, gathered and renamed one by one
SCORING = 0.5e-3  # seconds of the driver for each sample: rewards, advantages, metrics

# ---- rollout ---------------------------------------------------------------------------------------------------------------------------------

ENGINE_STEP = 1.2e-3  # seconds of the host in each decode step: scheduling and sampling of a batch (vLLM's V1 engine: about 1 ms)
ENGINE_SEQUENCE = 30e-6  # seconds of the host for each sample in a step: its tokens, stop conditions, blocks
ENGINE_BROADCAST = 30e-6  # more for each sample where several processes share a model: the step's inputs are pickled and sent to them
EAGER_LAYER = 0.22e-3  # seconds in which a decode step launches a layer without CUDA graphs: about 30 launches
COLLECTIVE_LATENCY = 20e-6  # seconds of a small all-reduce between GPUs of a machine

# ---- memory ------------------------------------------------------------------------------------------------------------------------------------

CONTEXT = GIB // 2  # the CUDA context with its loaded kernels
COMMUNICATOR = GIB // 4  # NCCL's buffers for each kind of group
WORKSPACE = GIB // 2  # cuBLAS, attention, and small tensors of the trainer
ASLEEP = GIB  # what an engine keeps while it sleeps: captured graphs, workspaces, buffers
ENGINE_WORKSPACE = 2 * GIB  # activations of a prefill pass and logits of a batch, inside the engine's share
FRAGMENTED = 0.03  # of what the trainer holds, that its allocator cannot give back or use between phases
LOGIT_BYTES = 8  # bytes for each number of whole logits without gradient: bf16, fp32, and one bf16 copy for the entropy
LOGIT_GRADIENT_BYTES = 4  # more in an update: the gradient in fp32
