"""Proofs that every performance knob has its intended effect, on this machine: `fulltilt prove`.

A proof is two real steps of a tiny run that differ in one knob (`setup`, `step`), and a measurement that the knob must change (`measure`).
All proofs are in `cases`, as data; `run` runs, judges and prints them.
"""
