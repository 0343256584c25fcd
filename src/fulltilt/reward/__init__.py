"""Rewards: samples enter, scores leave, and nothing a reward function does can stop or stall the run.

`base.RewardPool` is the way in. This file imports nothing: the reward processes start from it and must start fast.

    base       submit and collect groups, failed calls, counts
    calls      calls that wait for a process, and how long one waits before it is tried again
    dispatch   threads that hand calls to worker processes, one thread for each process
    overlap    many calls of asynchronous functions in flight in one process
    process    one worker process as the trainer sees it: start, ask with a deadline, kill with all its descendants
    worker     the same process from inside: limits, loading, calling the user's function
    environment  variables that worker processes get
    confine    what the kernel keeps them from
    functions  what `reward.function` may name, how it is called, what it may return
    sums       weighted sums of several functions
    model      the reward model: the texts it reads, its part in the scores
    rules      the built-in functions, one file each
    guard      a small process that kills the workers when the trainer itself was killed
"""
