"""Algorithms: how rewards become per-token numbers, and how those become a loss. `presets.build` is the way in."""
