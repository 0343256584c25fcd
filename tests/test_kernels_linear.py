"""The product of few rows: the kernel against torch, and on a GPU, to the bit, against the same rows among many."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from variants import sample_cases

from fulltilt.kernels import linear as module
from fulltilt.kernels.linear import COUNTS, MANY, TILES, Tile, among, few_rows, linear, with_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("rows", "outer", "inner"), sample_cases([(1, 5, 100), (3, 40, 256), (17, 33, 300), (70, 16, 128)], (1, 5, 100), (17, 33, 300))
)
@pytest.mark.parametrize(("biased", "tile"), [(False, tile) for tile in TILES] + [(True, TILES[0])])
def test_kernel_is_the_product(rows: int, outer: int, inner: int, biased: bool, tile: Tile) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(outer) if biased else None
    want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    moved = [None if tensor is None else tensor.to(DEVICE) for tensor in (x, weight, bias)]
    got = few_rows(*moved, tile=tile)
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-4)


def test_elsewhere_it_is_torchs_own() -> None:
    x, weight, bias = torch.randn(2, 3, 4096), torch.randn(8, 4096), torch.randn(8)
    with torch.no_grad():
        assert linear(x, weight, bias).equal(torch.nn.functional.linear(x, weight, bias))


def test_of_the_ways_with_the_right_bits_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that fails is none."""
    weight, ran = torch.randn(8, 32), list[str]()

    def way(name: str, change: float) -> module.Product:
        def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            ran.append(name)
            if name == "broken":
                raise ValueError("no such instruction")
            return F.linear(x, weight, bias) + change

        return run

    ways = {name: way(name, 1e-3 if name == "wrong" else 0.0) for name in ("slow", "wrong", "fast", "broken")}
    times = {"slow": 2.0, "wrong": 0.1, "fast": 1.0}

    def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
        run()
        return times[ran[-1]]

    monkeypatch.setattr(module, "milliseconds", milliseconds)
    with pytest.warns(UserWarning, match="cannot run by broken on this device, and take another way: no such instruction"):
        assert module.fastest(ways, 3, weight, None) is ways["fast"]
    assert module.fastest({name: ways[name] for name in ("slow", "wrong")}, 3, weight, None) is ways["slow"]
    with pytest.raises(AssertionError, match="same bits"):
        module.fastest({"wrong": ways["wrong"]}, 3, weight, None)


def test_of_a_weight_that_is_not_finite_nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weight = torch.randn(8, 32)
    weight[3, 5] = torch.nan
    way = module.way_for(4, weight, None)
    assert not module._found and way(torch.ones(4, 32), weight, None)[:, 3].isnan().all()


def test_a_device_without_memory_is_not_taken_for_a_way_that_fails() -> None:
    def full(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        module.fastest({"full": full}, 3, torch.randn(8, 32), None)


def test_every_count_has_ways_and_others_are_padded() -> None:
    x, weight, bias = torch.randn(5, 16), torch.randn(3, 16), torch.randn(3)
    assert with_rows(x, 8).shape == (8, 16) and with_rows(x, 8)[:5].equal(x)
    torch.testing.assert_close(among(x, weight, bias, rows=64), F.linear(x, weight, bias))
    assert COUNTS[-1] == MANY and all(list(module.ways(rows))[-1] == f"cuBLAS, {module.JUDGES} rows" for rows in COUNTS)


@pytest.mark.kernels
@pytest.mark.skipif(DEVICE == "cuda", reason="below, for real")
@pytest.mark.parametrize("capturing", [False, True])
def test_any_number_of_rows_finds_a_way(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with the kernel interpreted and the times made up."""
    monkeypatch.setattr(module, "_found", {})
    monkeypatch.setattr(module, "milliseconds", lambda run, device: float(run() is None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(module, "unsplit_product", F.linear)  # a setting of cuBLAS
    weight, bias = torch.randn(24, 160).bfloat16(), torch.randn(24).bfloat16()
    with torch.no_grad():
        for rows in (1, 3, 17, 130, 500, MANY + 1):
            x = torch.randn(1, rows, 160).bfloat16()
            found = linear(x, weight, bias)
            assert found.shape == (1, rows, 24)
            torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=2e-2, atol=2e-2)
    assert {key[0] for key in module._found} == (set() if capturing else {1, 4, 24, 192, 512})


# torch's own words. Its C++ writes them to the standard error stream itself, once per process.
EXPERIMENTAL = (
    b"[W1118 09:00:00.000000000 Context.cpp:550] Warning: torch.backends.cuda.preferred_blas_library is an experimental feature. If you "
    b"see any error or unexpected behavior when this flag is set please file an issue on GitHub. (function operator())\n"
)


def test_torchs_line_about_the_choice_of_a_blas_library_reaches_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A build for CPU refuses the choice before it writes the line, so a stand-in writes it here; test_on_a_gpu_... has the real one."""
    chosen = ["cublas"]

    def preferred_blas_library(library: str | None = None) -> str:
        if library == "cublaslt":
            os.write(2, EXPERIMENTAL)
        chosen.append(library or chosen[-1])
        return chosen[-1]

    module.take_warning.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cuda, "preferred_blas_library", preferred_blas_library)
        module.take_warning()
    assert "cublaslt" in chosen and chosen[-1] == "cublas"
    os.write(2, b"the next line")
    assert capfd.readouterr().err == "the next line"
    module.take_warning.cache_clear()


@pytest.mark.skipif(DEVICE != "cpu", reason="torch for CUDA has the library")
def test_a_build_without_the_library_keeps_its_standard_error_stream(capfd: pytest.CaptureFixture[str]) -> None:
    module.take_warning.cache_clear()
    with contextlib.suppress(RuntimeError):  # torch refuses the library; whether it does is not what is tested
        module.take_warning()
    os.write(2, b"the next line")
    assert capfd.readouterr().err == "the next line"


ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize(
    ("inner", "outer", "biased"),
    [(4864, 896, False), (8960, 1536, False), (18944, 3584, False), (3584, 3584, False), (896, 1152, True), (3584, 37888, False)],
)
def test_a_row_does_not_depend_on_how_many_there_are(inner: int, outer: int, biased: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(8192, inner, device="cuda").bfloat16()
    weight = (torch.randn(outer, inner, device="cuda") * 0.02).bfloat16()
    bias = torch.randn(outer, device="cuda").bfloat16() if biased else None
    with torch.no_grad():
        many = linear(x, weight, bias)
        for rows in (*COUNTS, 17, 129, 441, MANY - 1, MANY + 1, 1283, 2047, 4099):
            assert linear(x[:rows], weight, bias).equal(many[:rows]), rows


@pytest.mark.gpu
@ON_GPU
def test_no_setting_of_torch_is_left_changed() -> None:
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction{more}" for kind in ("bf16", "fp16") for more in ("", "_split_k")]

    def settings() -> list[Any]:
        return [torch.backends.cuda.preferred_blas_library(), *(getattr(matmul, name) for name in names)]

    before = settings()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.no_grad():
            linear(torch.randn(4, 4864, device="cuda", dtype=dtype), torch.randn(896, 4864, device="cuda", dtype=dtype))
    assert settings() == before


@pytest.mark.gpu
@ON_GPU
def test_on_a_gpu_a_product_writes_nothing() -> None:
    """In a process of its own: torch writes its line about an experimental setting once."""
    program = """
import torch
from fulltilt.kernels.linear import unsplit_product
x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
unsplit_product(x, x, None)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
