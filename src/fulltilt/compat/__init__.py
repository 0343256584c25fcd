"""Configurations of other systems, verl's and ChatLearn's, as runs of ours: every key gets an answer, and none is ignored silently."""
