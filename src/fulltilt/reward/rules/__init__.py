"""The built-in rewards: `reward.function = "NAME"` calls the function `score` of `NAME.py` in this folder.

To add one, add its file. `score` takes by keyword what a user's own function may take (`functions`) and returns a number or a dict with the
number under "score". A file is imported only in reward processes, and only if a run names it; if it needs a package that fulltilt does not
install by itself, it raises an ImportError that says how to install it. No file here imports torch or numpy: processes start fast.
"""
