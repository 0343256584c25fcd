"""Several workers that compute one model together: who they are, and what each of them holds."""
