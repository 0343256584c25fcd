"""Benchmarks: fulltilt alone, or beside other systems on the same requests.

`rollout`, `update`, `step` and `learn` are the four of them; `job` has their options and prepares them, `workload` and `shapes` say what is
measured, `native` and `hf` are the engines that run in this process, `peers` finds the drivers of other systems and `process` runs them
apart, `roofline` and `flops` say what the hardware would allow, `figures` and `report` hold and show the results.
"""
