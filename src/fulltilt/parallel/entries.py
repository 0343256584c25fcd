"""Sizes of the contents of parcels, for the code that packs them (parcels.py) and the prediction of their bytes (traffic.py). No torch."""

from __future__ import annotations

import numpy as np

KIND = "all-to-all"
COUNT = 8  # bytes at the beginning of a parcel: its number of entries; also bytes of the parcel's size, which is sent first
# A row's entry: `fields` has a bit for each of PER_TOKEN_FIELDS that the row has, and a last one for its baseline.
ROW_ENTRY = np.dtype(
    [("index", "i8"), ("tokens", "i8"), ("group", "i8"), ("lag", "i8"), ("fields", "i8"), ("reward", "f8"), ("baseline", "f8")]
)
TOKEN_BYTES = 5  # bytes of a row's token: its id, and whether it is trained on
NUMBER_BYTES = 4  # bytes of a number for a token
NUMBERS_ENTRY = np.dtype([("index", "i8"), ("tokens", "i8")])
MOST_NUMBERS = 40  # most numbers in a parcel of plain numbers: no sum of float64 has more exact parts
