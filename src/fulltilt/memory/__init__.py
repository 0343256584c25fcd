"""Memory of one device: recompute, offload, and the account of memory by kind."""
