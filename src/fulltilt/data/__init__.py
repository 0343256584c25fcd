"""Data: files to prompts for rollout and rows for SFT, and the order in which a run goes through them."""
