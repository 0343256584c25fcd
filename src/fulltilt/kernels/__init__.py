"""Kernels: one op per file, Triton beside its torch reference.

A file loads where triton is not installed; on CPU its op then runs the reference.
"""
