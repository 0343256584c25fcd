"""Memory of one device: what is recomputed, what lies on the host, and who holds how much."""
