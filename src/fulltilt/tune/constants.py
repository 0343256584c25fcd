"""All constants of the models of memory and time that do not follow from arithmetic, each for one effect and with its source.

No constant belongs to a row of a table, to a model, or to a number of GPUs. "GRPO table" is tests/data/published/grpo_qwen2.5_7b.csv, "DAPO
table" is dapo7b.csv; docs/planning.md shows what the models predict for both. "Fitted runs" are 25 runs of four models on two H200
(docs/bench/predictions_fit.json): they alone give the constants of fulltilt's own time; those of decoding come also from the runs of
docs/bench/jobs.json. One GPU cannot show `exposed` and `expert_spread`: these are the values for other systems.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 1 << 30

# ---- workload ----------------------------------------------------------------------------------------------------------------------------

# Standard deviation of the logarithm of response lengths: with a mean of 1,000, the standard deviation of the lengths is 800, and 1 in
# 1,000 responses has over 6,800 tokens.
SPREAD = 0.7

# ---- arithmetic --------------------------------------------------------------------------------------------------------------------------

TILE = 128  # a side of a matrix product as long as one tile costs twice its arithmetic: filling and draining the pipeline of a tile
# Share of the rate of products that attention reaches: FlashAttention-3's paper has 450 to 550 TFLOP/s, both passes, causal, heads of 128.
ATTENTION_SHARE = 0.6
HBM_SHARE = (
    0.8  # share of the nominal bandwidth that kernels reach which read and write once (STREAM-like copies, vendor's and own figures)
)
LINK_SHARE = 0.75  # share of the nominal bandwidth that large collectives reach (nccl-tests: 340 GB/s of 450 on NVLink 4)

# ---- memory traffic, as multiples of the bytes that a layer keeps (`Shape.layer_bytes`) --------------------------------------------------

FORWARD_TRAFFIC = 2  # each kept byte is written once and read once by the next operation
BACKWARD_TRAFFIC = 4  # each is read again; its gradient is written and read, and added to another
# Factor of that traffic for layers without fused kernels: the norms, rotary positions and gates of Hugging Face's Qwen2 read and write 175
# bytes for each number of the hidden state in a forward pass, counted operation by operation, and keep 63 of them.
UNFUSED_TRAFFIC = 1.5
LOGIT_TRAFFIC = 24  # bytes for each number of whole logits in a forward pass: bf16 out, fp32 in, maximum, exponential, sum, choice
STATE_TRAFFIC = 30  # bytes for each parameter of an Adam step: fp32 gradient, master, two moments, bf16 result, norm

# ---- the host ----------------------------------------------------------------------------------------------------------------------------

# Rotary positions without a fused kernel run over packed sequences one by one, for queries and keys: about 9 launches forward and 11
# backward.
ROPE_LAUNCHES = (2 * 9, 2 * 11)
# Experts of Hugging Face's unfused layers (transformers 4.5x) are computed one after another, each in about 12 launches of a forward pass:
# which tokens, their rows, three products, the gate, weights and the sum.
EXPERT_LAUNCHES = 12
LAUNCH = 8e-6  # seconds of an eager launch from Python with autograd (PyTorch's profiler shows 5 to 10 us)
COLLECTIVE_LATENCY = 20e-6  # seconds of a small all-reduce between GPUs of a machine (nccl-tests)


@dataclass(frozen=True)
class LogitTraffic:
    """Bytes that passes over whole logits read and write, for each number of the logits."""

    forward: int  # for log-probs
    backward: int
    entropy: int  # for the entropy's value, which every update measures
    entropy_gradient: int  # more, if the loss has the entropy

    def bytes(self, *, learns: bool, entropy: bool) -> int:
        """Return the bytes of a pass. `entropy`: the loss has it."""
        if not learns:
            return self.forward
        return self.forward + self.backward + self.entropy + entropy * self.entropy_gradient


@dataclass(frozen=True)
class SystemCosts:
    """Costs of a system's host code, on any GPU. Rates are bytes per second; infinite: no copy happens."""

    # Seconds in which Python launches a layer's forward pass, eagerly; a backward pass takes twice as long. Rows without dynamic batches in
    # the GRPO table are bound by this: 4.1 to 5.1 ms a layer remain after their arithmetic is subtracted. fulltilt itself took 0.13 s for
    # the 30 layers of SmolLM2-135M, both passes, on an H200 that was idle nine tenths of that time (docs/bench/gsm8k_tuning.json).
    host_layer: float = 1.6e-3
    host_ring: float = 0.7e-3  # more for each further step of a ring of context-parallel GPUs: attention, corrections, sends
    host_experts: float = 1.5e-3  # more for a layer with experts: router, permutation, exchanges, grouped products
    # Share of the shorter of host and GPU time that hides behind the longer: verl reads losses and lengths back in every micro-batch.
    hidden: float = 0.5
    driver_rate: float = 1.5e9  # bytes per second at which a Ray driver pickles and hands out padded batches
    megatron_copies: int = 3  # copies of rows for Megatron workers, which unpack them, copy them to the ranks of a group, and split
    host_copy: float = 3e9  # bytes per second to and from unpinned host memory, as verl 0.4 offloads, all GPUs of a machine at once
    # Parameters reach the engine matrix by matrix, each gathered and renamed: seconds before the first matrix, and for each one. A model of
    # 7B has 196 matrices, hence 0.3 s, and takes 2.2 to 7.6 s with Megatron in the DAPO table, and 0.9 to 1.4 s with FSDP; the 45 thousand
    # of DeepSeek-V3 took 80 s and 120 s in two layouts (verl's issue 5311).
    sync_start: float = 1.5
    sync_matrix: float = 1.4e-3
    syncs_whole: bool = True  # each GPU receives all parameters
    # How far apart the loads of single experts are: `expert_imbalance` of tune/time_model.py computes the imbalance of GPUs from it.
    # Megatron-MoE-ModelZoo has Qwen3-235B, 16 experts on each of 8 GPUs, at four lengths with real and with evenly spread routing: the
    # ratios correspond to 1.69 to 1.71 times the mean. UltraEP (arXiv 2606.04101) saw 1.3 to 4 times.
    expert_spread: float = 3.0
    deduplicates: bool = False  # a token is sent once to a GPU or machine that has several of its experts, as DeepEP does
    # Share of FSDP's all-gathers and reduce-scatters that is not hidden behind the layers' computation: MPT models of 13B to 70B on 8 to 64
    # H100 and Llama 3 70B on 64 (tests/data/independent) need 0.3 to 0.9.
    exposed: float = 0.5
    expert_by_expert: bool = True  # without fused kernels, experts are computed one after another
    pipelines: bool = True  # whether the system has pipeline parallelism
    streams_optimizer: bool = False  # offloaded states pass through the GPU in pieces at each optimizer step, never as a whole
    scoring: float = 0.5e-3  # seconds of the driver for each sample: rewards, advantages, metrics
    engine_step: float = 1.2e-3  # seconds in each decode step: scheduling and sampling of a batch (vLLM: about 1 ms)
    engine_sequence: float = 30e-6  # seconds for each sample in a step: its tokens, stop conditions, blocks
    engine_broadcast: float = 30e-6  # more seconds, if several processes share a model: the step's inputs are pickled and sent to them
    eager_layer: float = 0.22e-3  # seconds in which a decode step launches a layer without CUDA graphs: about 30 launches
    host_unfused: float = 1.6e-3  # seconds of `host_layer` for a layer without fused kernels
    host_again: float = 1.0  # times `host_layer`, for a layer that the backward pass computes again
    host_selective: float = 0.0  # more launches, in forward passes, for a layer that selective recompute follows operation by operation
    tile: int = TILE
    traffic: float = 1.0  # factor of the memory traffic of fused layers
    unfused_traffic: float = UNFUSED_TRAFFIC  # factor of the memory traffic of layers without fused kernels
    expert_traffic: float = 1.0  # another factor in a layer with experts, whose rows are put in the order of experts and back
    gradient_traffic: int = 0  # bytes of each parameter that a micro-batch reads and writes to add its gradients
    stops_early: bool = False  # recompute ends with the last result that is needed: a unit's last product is not computed again
    duplex: float = 0.5  # share of the host link's bandwidth in both directions that copies reach together; 0.5: one direction at a time
    packs: bool = False  # micro-batches are packed evenly under a hard cap, and the head reads only the tokens that are trained on
    graph_layer: float = 0.0  # seconds of a layer in a decode step that neither bytes nor FLOPs explain: kernels that follow one another
    graph_unfused: float = 0.0  # more for a layer without fused kernels
    graph_experts: float = 0.0  # more for a layer with experts: routing, order, grouped products of a few rows
    attention_token: float = 0.0  # seconds of decoding's attention for each token that one program reads in sequence
    attention_traffic: float = 1.0  # factor of the seconds in which the bytes of keys and values are read, beside that
    host_token: float = 0.0  # seconds of the host for each token of a response: samples, texts, records
    logits: LogitTraffic | None = None  # traffic of an unfused head; None: `LOGIT_TRAFFIC` in each pass, and as much for the entropy


VERL = SystemCosts()
# fulltilt's host runs ahead; memory is pinned; the engine reads the trainer's parameters, and looks at results every 16 steps while the
# next steps run.
FULLTILT = SystemCosts(
    host_layer=1.35e-3, host_unfused=2.0e-3, host_again=1.93, host_selective=4.6, host_experts=0.0, hidden=1.0, driver_rate=math.inf,
    host_copy=math.inf, sync_start=0.0, sync_matrix=0.0, syncs_whole=False, scoring=0.1e-3, pipelines=False, streams_optimizer=True,
    expert_by_expert=False, engine_step=0.0, engine_sequence=0.0, engine_broadcast=0.0, tile=229, traffic=1.12, unfused_traffic=2.29,
    expert_traffic=1.37, gradient_traffic=8, stops_early=True, duplex=0.88, packs=True, graph_layer=32e-6, graph_unfused=84e-6,
    graph_experts=117e-6, attention_token=33.5e-9, attention_traffic=0.24, host_token=1.65e-6,
    # Bytes counted kernel by kernel in `model.heads.plain_logprobs`, whose logits are in float32. Forward: the product 4, the temperature
    # 8, logsumexp 24 (maximum, difference, exponential, sum). Backward: logsumexp 24, the chosen logits 4, both together 12, temperature 8,
    # products 10. Entropy: logsumexp 24, softmax 16, their product 12, its sum 4; its gradient 104, and the entropy a second time.
    logits=LogitTraffic(forward=36, backward=58, entropy=56, entropy_gradient=160),
)  # fmt: skip

# ---- memory ------------------------------------------------------------------------------------------------------------------------------

CONTEXT = GIB // 2  # the CUDA context with its loaded kernels
COMMUNICATOR = GIB // 4  # NCCL's buffers for each kind of group
WORKSPACE = GIB // 2  # cuBLAS, attention, and small tensors of the trainer
ASLEEP = GIB  # memory that an engine keeps while it sleeps: captured graphs, workspaces, buffers
OWN_WORKSPACE = GIB // 10  # the same of fulltilt (context and workspace), without its graphs: 0.10 to 0.13 GiB in the fitted runs
GRAPHS = 6 * GIB // 10  # memory of captured graphs that torch's allocator counts as free: 0.26 to 0.75 GiB in the fitted runs
ENGINE_WORKSPACE = 2 * GIB  # activations of a prefill pass and logits of a batch, inside the engine's share
FRAGMENTED = 0.03  # share of the trainer's memory that its allocator cannot free or use between phases
LOGIT_BYTES = 8  # bytes for each number of whole logits without gradient: bf16, fp32, and one bf16 copy for the entropy
LOGIT_GRADIENT_BYTES = 4  # more in an update: the gradient in fp32
