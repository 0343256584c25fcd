"""Facts for tests of the plan: those of models that are not loaded, on hardware that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fulltilt.plan.facts import Facts, RoleFacts
from fulltilt.shape import Shape

SMALL = RoleFacts(replace(Shape.named("small"), positions=None), parameter_bytes=2 * 10**6)


def facts(device: str = "cuda", free_bytes: int | None = 10**9, **given: Any) -> Facts:
    """Of a small model on a large device, where nothing is taken for decoding but what is given."""
    known = {"device_bytes": 10**12, "host_bytes": 10**12, "roles": {"actor": SMALL}, "longest": 500, "steps_per_epoch": 1}
    return Facts(device, free_bytes=free_bytes, **{**known, "kv_bytes_per_token": 1000, "decode_bytes": 0, "cores": 8, **given})
