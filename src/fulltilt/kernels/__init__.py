"""Kernels: one op per file, Triton beside its torch reference; `dispatch` decides which of them runs.

A file loads where triton is not installed; on CPU its op runs the reference.
"""
