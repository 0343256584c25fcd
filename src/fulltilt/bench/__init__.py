"""Benchmarks: fulltilt alone, or compared with other systems on the same requests.

`rollout`, `update`, `step`, `settings` and `learn` are the benchmarks; `options` has the options of the command line and `job` resolves
them; `workload` and `shapes` define what is measured, `native` is fulltilt's engine, `peers` finds the drivers of other systems and runs
them in separate processes, `roofline` and `flops` give the limits of the hardware, `figures` and `report` hold and show the results.
"""
