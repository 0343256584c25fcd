"""The built-in rewards: `NAME.py` here is what `reward.function = "NAME"` calls, by its function `score`.

To add one, add its file. `score` takes by keyword what a user's own function may take (`functions`) and returns a number or a dict with
the number under "score". A file is imported only in reward processes, and only if a run names it; one that needs a package which fulltilt
does not install by itself raises an ImportError that says how to install it. No file here imports torch or numpy: processes start fast.
"""
