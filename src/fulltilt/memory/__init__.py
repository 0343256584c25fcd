"""Memory of one device: recompute, offload, and the account of who uses how much."""
