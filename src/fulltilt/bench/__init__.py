"""Measuring fulltilt beside others on the same requests.

`workload` and `shapes` say what is asked of whom; `native`, `hf` and `vllm` are the engines, one file each; `process` runs a peer apart;
`roofline` says what the hardware would allow; `figures` are the records of what was measured; `rollout` puts them together. `update`
measures forward, backward and optimizer step, `flops` counts what they compute; `step` measures whole steps, beside `trl`; `learn` measures
learning, beside `learn_trl`.
"""
