"""Putting the parts of a run on devices. One device here; more are one file each."""
