"""Algorithms: how rewards become per-token numbers, and how these become a loss. `build.build` is the entry point."""
