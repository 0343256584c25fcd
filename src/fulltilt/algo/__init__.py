"""Algorithms: how rewards become per-token numbers, and how those become a loss. `build.build` is the way in."""
