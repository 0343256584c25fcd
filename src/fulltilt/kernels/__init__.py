"""Kernels: one op per file, Triton beside its torch reference. `dispatch` chooses; without Triton or on CPU the reference runs."""
