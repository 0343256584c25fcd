"""Proofs that every performance knob does what it is for, on this machine: `fulltilt prove`.

A proof is two real steps of a tiny run that differ in one knob (`setup`, `step`), and a measurement that the knob must change (`measure`).
All proofs stand in `cases`, as data; `run` runs, judges and prints them.
"""
