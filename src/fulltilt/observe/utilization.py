"""GPU utilization, as its driver counts it: the share of time in which at least one kernel ran.

Enters: the identity of a GPU. Leaves: a mean over the samples since the last call. Guaranteed: no package is needed, NVML is the driver's
own library; a system or a GPU without this count (no NVML, a slice of a GPU) gives None, never an error. A thread asks the driver four
times a second, and touches neither CUDA nor the run. Free of torch.
"""

from __future__ import annotations

import ctypes
import threading

LIBRARY = "libnvidia-ml.so.1"
INTERVAL_S = 0.25  # drivers sample at intervals of a sixth of a second to a second
SUCCESS = 0


class _Rates(ctypes.Structure):
    """The struct nvmlUtilization_t: percents of time."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuUtilization:
    """Watches a GPU. Example: watch = GpuUtilization.of("8f6f3a2e-..."); ...; watch.take() -> 0.87"""

    def __init__(self, nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._nvml, self._handle = nvml, handle
        self._lock = threading.Lock()
        self._sum, self._count = 0.0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-utilization", daemon=True)
        self._thread.start()

    @staticmethod
    def of(uuid: str) -> GpuUtilization | None:
        """Watch the GPU with this UUID; None: its driver does not report its utilization."""
        try:
            nvml = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if nvml.nvmlInit_v2() != SUCCESS or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) != SUCCESS:
            return None
        return GpuUtilization(nvml, handle) if _busy_share(nvml, handle) is not None else None

    def take(self) -> float | None:
        """Return the mean since the last call; None: there was no sample since then."""
        with self._lock:
            found = self._sum / self._count if self._count else None
            self._sum, self._count = 0.0, 0
        return found

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            share = _busy_share(self._nvml, self._handle)
            if share is not None:
                with self._lock:
                    self._sum, self._count = self._sum + share, self._count + 1


def _busy_share(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> float | None:
    rates = _Rates()
    return rates.gpu / 100 if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == SUCCESS else None
