"""Everything that a run shows: metrics and sampled rollouts on disk, progress for people and machines, loggers, health, plots."""
