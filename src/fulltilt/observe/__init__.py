"""What a run shows: numbers and sampled rollouts on disk (`metrics`), progress for people and machines (`console`)."""
