"""Benchmarks: fulltilt alone, or beside other systems on the same requests.

`rollout`, `update`, `step` and `learn` are the four of them; `options` has what the command line asks for and `job` prepares it; `workload`
and `shapes` say what is measured, `native` is our engine, `peers` finds the drivers of other systems and runs them in processes of their
own, `roofline` and `flops` say what the hardware would allow, `figures` and `report` hold and show the results.
"""
