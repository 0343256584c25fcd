"""Hugging Face causal language models, unmodified, seen through one attention function and one head."""
