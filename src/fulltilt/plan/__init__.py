"""The plan: every derived number of a run, without torch. `make` has the whole; each other file decides one kind of number."""
