"""Models of memory and time, from shapes and a hardware table alone: what a run needs, how long it takes, and why. No torch."""
