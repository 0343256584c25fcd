"""Forward and backward over packed micro-batches, the optimizer, the roles, checkpoints. Knows nothing of algorithms."""
