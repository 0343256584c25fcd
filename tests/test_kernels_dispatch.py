"""Which form of an op runs: on CPU, in the interpreter, on CUDA, and where triton is missing or of no use.

CUDA tensors are torch's fake ones, which have a device and no memory: what is decided, not what is computed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fulltilt.kernels
from fulltilt.kernels import dispatch, gated, paged_attention, rms_norm, rotary, sampling

FILES = {file.__name__.rpartition(".")[2]: file for file in (gated, paged_attention, rms_norm, rotary, sampling)}
DEVICE = "cuda" if torch.cuda.is_available() and not dispatch.INTERPRETED else "cpu"


def anew(
    monkeypatch: pytest.MonkeyPatch, names: Iterable[str] = (), *, installed: bool = True, cuda: bool = False, interpret: bool = False
) -> list[ModuleType]:
    """`dispatch` and some files as they load where triton is installed, torch is built for CUDA, TRITON_INTERPRET is set, or not."""
    if installed:
        pytest.importorskip("triton")
    else:
        monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: cuda)
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
    loaded = []
    for name in ("dispatch", *names):
        spec = importlib.util.spec_from_file_location(f"fulltilt.kernels.{name}", f"{fulltilt.kernels.__path__[0]}/{name}.py")
        assert spec is not None and spec.loader is not None
        loaded.append(importlib.util.module_from_spec(spec))
        monkeypatch.setitem(sys.modules, spec.name, loaded[-1])
        spec.loader.exec_module(loaded[-1])
    return loaded


def on_cuda() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(1, device="cuda")


def calls(files: dict[str, ModuleType], device: str = "cpu") -> dict[str, Callable[[], torch.Tensor]]:
    """A call of every op on the same numbers; what it returns is what it computed."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(device)
    heads, seeds, slots = x[:, None], torch.arange(3, device=device), torch.tensor([2, -1, 0], device=device)
    keys, values = torch.zeros(2, 16, 1, 8, device=device).unbind()
    attention = files["paged_attention"]
    caches = keys, values, *(torch.tensor([cache.data_ptr()], device=device) for cache in (keys, values))
    table, lengths = torch.zeros(3, 1, dtype=torch.int32, device=device), torch.tensor([3, 0, 9], dtype=torch.int32, device=device)

    def write() -> torch.Tensor:
        attention.write_kv(heads, heads, *caches, slots)
        return keys.clone()

    def finish() -> torch.Tensor:
        progress = files["sampling"].DecodeProgress.make(3, 2, device)
        progress.states.zero_()
        files["sampling"].finish(seeds, x[:, 0], seeds[:2].repeat(3, 1), progress, seeds)
        return progress.states

    return {
        "rms_norm": lambda: files["rms_norm"].rms_norm(x, x[0], 1e-6),
        "gated": lambda: files["gated"].gated(x),
        "gated_pair": lambda: files["gated"].gated(x, up=x),
        "rotary": lambda: files["rotary"].rotary(heads, heads, x, x)[0],
        "paged_attention": lambda: attention.paged_attention(heads, *caches, table, lengths, scale=1.0),
        "write_kv": write,
        "rotate_and_write": lambda: attention.rotate_and_write(heads, heads, heads, x, x, *caches, slots),
        "sample": lambda: files["sampling"].sample(x, seeds, seeds, top_k=3)[0],
        "finish": finish,
    }


CUDA_ONLY = {"paged_attention", "write_kv", "rotate_and_write"}  # on CPU decoding takes another way: tests/test_decode_cpu.py


class Launched(Exception):
    pass


class Launch:
    """Stands where a kernel does, and tells that it would have run."""

    def __getitem__(self, grid: Any) -> Any:
        raise Launched


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if dispatch.triton is None:
        return  # there are none
    kernel = type(rotary._rotary_kernel)
    for file in FILES.values():
        for name, value in list(vars(file).items()):
            if isinstance(value, kernel) and name.startswith("_"):
                monkeypatch.setattr(file, name, Launch())


@pytest.mark.parametrize("name", sorted(calls(FILES).keys() - CUDA_ONLY))
def test_on_cpu_the_reference_runs(name: str, no_kernels: None) -> None:
    assert calls(FILES)[name]().numel()


@pytest.mark.kernels
@pytest.mark.parametrize("name", calls(FILES))
def test_every_op_has_a_kernel_that_runs(name: str, no_kernels: None) -> None:
    """Compiled on CUDA, interpreted on CPU: the tests of kernels compare kernels, and not a reference with itself."""
    with pytest.raises(Launched):
        calls(FILES, DEVICE)[name]()


def test_without_triton_everything_runs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: call() for name, call in calls(FILES).items() if name not in CUDA_ONLY}
    bare, *files = anew(monkeypatch, FILES, installed=False, cuda=True, interpret=True)
    assert bare.triton is None
    found = calls(dict(zip(FILES, files, strict=True)))
    assert all(torch.equal(found[name](), result) for name, result in expected.items())


def test_cuda_without_triton_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in zip(FILES, anew(monkeypatch, FILES, installed=False, cuda=True)[1:], strict=True):
        with pytest.raises(RuntimeError, match=r'need triton, which is not installed: pip install "fulltilt\[gpu\]"'):
            file.runs_triton(on_cuda())
        assert not file.runs_triton(torch.empty(1)), name


def test_cuda_runs_compiled_kernels_and_never_interpreted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    (compiled,) = anew(monkeypatch, cuda=True)
    assert compiled.runs_triton(on_cuda()) and not compiled.runs_triton(torch.empty(1))
    (interpreting,) = anew(monkeypatch, cuda=True, interpret=True)
    with pytest.raises(RuntimeError, match="cannot read CUDA memory: unset it"):
        interpreting.runs_triton(on_cuda())


def test_triton_is_imported_only_where_a_kernel_could_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = lambda: None  # noqa: E731
    (idle,) = anew(monkeypatch)
    assert idle.triton is None and idle.jit(kernel) is kernel and idle.jit(do_not_specialize=["rows"])(kernel) is kernel
    for reason in ({"cuda": True}, {"interpret": True}):
        assert anew(monkeypatch, **reason)[0].triton is not None


def test_interpreting_is_a_matter_of_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    (ours,) = anew(monkeypatch, interpret=True)
    x = torch.empty(1)
    token = ours.interpreting.set(True)
    assert ours.runs_triton(x) and not ours.runs_triton(torch.empty(1, device="meta"))
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(ours.runs_triton, x).result()
    ours.interpreting.reset(token)
    assert not ours.runs_triton(x)
