"""Proofs that every performance knob does here what it is for: `fulltilt prove`.

A proof is two real steps of a tiny run that differ in one knob (`step`), in a small world of its own (`world`), and a number that the knob
must change (`measure`). Which numbers those are stands in `rollout`, `batches` and `training`, as data; `run` puts it all together.
"""
