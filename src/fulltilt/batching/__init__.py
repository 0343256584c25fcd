"""Batching: which rows are computed together, and how much each token counts. numpy and plain Python; no torch."""
