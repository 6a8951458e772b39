"""Finding and calling the shared libraries, with small stand-in libraries compiled here."""

import shutil
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from nf4linear import native, ops, reference
from nf4linear.formats import EightBitSpec, FourBitSpec
from operands import fresh_weight, geometry, operands, packed_weight

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
SPEC = FourBitSpec("nf4", 32, 128)

CPU_STUB = """
#include "nf4linear.h"
#include <cstring>
static nf4l_weight last_weight; static nf4l_linear_args last_args;
extern "C" {
NF4L_API int nf4l_cpu_abi_version(void) { return ABI; }
NF4L_API const char* nf4l_cpu_level(void) { return "stub"; }
NF4L_API const char* nf4l_cpu_status_text(int) { return "stub text"; }
NF4L_API int nf4l_cpu_dequantize(const nf4l_weight* w, int32_t, void* out, int32_t threads) {
  last_weight = *w; std::memset(out, 0, 4 * w->n * w->k); static_cast<float*>(out)[0] = 40.0f + threads;
  return STATUS == NF4L_USE_GEMM ? NF4L_OK : STATUS; }
NF4L_API int nf4l_cpu_linear(const nf4l_weight* w, const nf4l_linear_args* a, int32_t) {
  last_weight = *w; last_args = *a; if (STATUS == 0) static_cast<float*>(a->y)[0] = 7.0f; return STATUS; }
NF4L_API void stub_last(nf4l_weight* w, nf4l_linear_args* a) { *w = last_weight; *a = last_args; }
}
"""
CUDA_STUB = """
#include "nf4linear.h"
static void* last_stream; static int calls;
extern "C" {
NF4L_API int nf4l_cuda_abi_version(void) { return ABI; }
NF4L_API const char* nf4l_cuda_architectures(void) { return "80,90a"; }
NF4L_API const char* nf4l_cuda_status_text(int) { return "stub text"; }
NF4L_API int nf4l_cuda_dequantize(const nf4l_weight*, int32_t, void*, void* stream) {
  last_stream = stream; ++calls; return STATUS; }
NF4L_API int64_t nf4l_cuda_workspace_bytes(const nf4l_weight*, const nf4l_linear_args*) { return 0; }
NF4L_API int nf4l_cuda_linear(const nf4l_weight*, const nf4l_linear_args*, void*) { return STATUS; }
NF4L_API void* stub_stream(void) { return last_stream; }
NF4L_API int stub_calls(void) { return calls; }
}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install("cpu", STUB, status) puts a stand-in library where native looks, and forgets what was opened before."""

    def install(kind: str, source: str, status: int = 0, abi: int = native.ABI_VERSION):
        (tmp_path / "stub.cpp").write_text(source)
        output = tmp_path / f"libnf4linear_{kind}.so"
        csrc = __file__.rsplit("/tests/", 1)[0] + "/csrc"
        flags = ["-shared", "-fPIC", "-std=c++17", f"-I{csrc}", f"-DABI={abi}", f"-DSTATUS={status}"]
        subprocess.run([COMPILER, *flags, str(tmp_path / "stub.cpp"), "-o", str(output)], check=True)
        return output

    monkeypatch.setenv("NF4LINEAR_LIBRARY_PATH", str(tmp_path))
    native.library.cache_clear()
    yield install
    native.library.cache_clear()


def test_packed_arguments_are_the_struct():
    values = (2, 1, 5, 0x7000_0000_0010, 4096, 0, 0x7000_0000_0020, 0x7000_0000_0030, 2**40)
    assert native.pack_linear_args(*values) == bytes(native.LinearArgs(*values))


def test_a_missing_library_says_why_and_warns_once(install, tmp_path):
    with pytest.warns(UserWarning, match=r"no libnf4linear_cpu.*slower torch path.*C\+\+ compiler"):
        missing = native.library("cpu")
    assert not missing and str(tmp_path) in missing.why
    packed = packed_weight(SPEC)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.library("cpu") is missing
        got = ops.dequantize(*operands(SPEC, packed), *geometry(SPEC), torch.float32)
    assert torch.equal(got, reference.dequantize(SPEC, fresh_weight(SPEC), torch.float32))


def test_a_file_that_is_no_library_says_so(install, tmp_path):
    (tmp_path / "libnf4linear_cpu.so").write_bytes(b"not a library")
    missing = native.open_library("cpu")
    assert not missing and "cannot be used" in missing.why and "libnf4linear_cpu.so" in missing.why


@needs_compiler
def test_another_abi_is_refused(install):
    install("cpu", CPU_STUB, abi=99)
    missing = native.open_library("cpu")
    assert not missing and "99" in missing.why and f"speaks {native.ABI_VERSION}" in missing.why


@needs_compiler
def test_a_missing_symbol_is_reported(install):
    install("cpu", '#include "nf4linear.h"\nextern "C" NF4L_API int nf4l_cpu_abi_version(void) { return ABI; }')
    missing = native.open_library("cpu")
    assert not missing and "nf4l_cpu_status_text" in missing.why


@needs_compiler
def test_folders_are_searched_in_order(install, tmp_path, monkeypatch):
    path = install("cpu", CPU_STUB)
    monkeypatch.setenv("NF4LINEAR_LIBRARY_PATH", f"/nonexistent:{tmp_path}")
    found = native.open_library("cpu")
    assert found and found.path == path and found.description == "CPU library, stub"


@needs_compiler
def test_cpu_calls_pass_pointers_strides_and_threads(install):
    install("cpu", CPU_STUB)
    library = native.library("cpu")
    packed = packed_weight(SPEC)
    got = ops.dequantize(*operands(SPEC, packed), *geometry(SPEC), torch.float32)
    assert got[0, 0] == 40 + torch.get_num_threads()

    wide = torch.randn(6, 256)
    bias = torch.zeros(32)
    y = ops.linear(wide[::2, :128], *operands(SPEC, packed), bias, *geometry(SPEC))
    assert y.shape == (3, 32) and y[0, 0] == 7
    weight, args = native.Weight(), native.LinearArgs()
    library._dll.stub_last(native.byref(weight), native.byref(args))
    assert (args.m, args.x, args.x_stride, args.dtype) == (3, wide.data_ptr(), 512, 0)
    assert (args.bias, args.y, args.workspace) == (bias.data_ptr(), y.data_ptr(), None)
    assert (weight.format, weight.layout, weight.n, weight.k, weight.blocksize) == (0, 1, 32, 128, 64)
    assert (weight.qweight, weight.scales) == (packed["qweight"].data_ptr(), packed["absmax_q"].data_ptr())
    assert (weight.n0, weight.kb0, weight.kb_full) == (0, 0, 2)


@needs_compiler
def test_use_gemm_falls_back_to_dequantize_and_gemm(install):
    install("cpu", CPU_STUB, status=native.USE_GEMM)
    x = torch.ones(2, 128)
    y = ops.linear(x, *operands(SPEC, packed_weight(SPEC)), None, *geometry(SPEC))
    dequantized = ops.dequantize(*operands(SPEC, packed_weight(SPEC)), *geometry(SPEC), torch.float32)
    assert torch.equal(y, x @ dequantized.T)


@needs_compiler
def test_a_refusal_becomes_an_error_with_its_text(install):
    path = install("cpu", CPU_STUB, status=-1)
    with pytest.raises(native.NativeError, match="dequantize on cpu failed with status -1: stub text") as caught:
        ops.dequantize(*operands(SPEC, packed_weight(SPEC)), *geometry(SPEC), torch.float32)
    assert str(path) in str(caught.value)


@needs_compiler
def test_cuda_launches_use_the_current_stream_of_the_tensors_device(install, monkeypatch):
    install("cuda", CUDA_STUB)
    library = native.library("cuda")
    assert library.description == "CUDA library for 80,90a"
    library._dll.stub_stream.restype = native.c_void_p
    entered = []

    class Guard:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *exc):
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    for device, guards in ((0, []), (3, [3, "left"])):
        entered.clear()
        out = SimpleNamespace(device=SimpleNamespace(index=device), dtype=torch.float16, data_ptr=lambda: 16)
        assert library.dequantize(native.Weight(), out)
        assert library._dll.stub_stream() == 1000 + device
        assert entered == guards


@needs_compiler
def test_a_gpu_the_library_has_no_code_for_warns_once_and_falls_back(install, monkeypatch):
    install("cuda", CUDA_STUB, status=native.NO_KERNEL_IMAGE)
    library = native.library("cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    out = SimpleNamespace(device=SimpleNamespace(index=0), dtype=torch.float16, data_ptr=lambda: 16)
    with pytest.warns(UserWarning, match=r"80,90a, not for cuda:0 \(12.0\).*NF4LINEAR_CUDA_ARCHS=120"):
        assert library.dequantize(native.Weight(), out) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.dequantize(native.Weight(), out) is False
    assert library._dll.stub_calls() == 1


def test_describe_weight_of_eight_bit():
    spec = EightBitSpec("w8_s8", 16, 128, group_size=64)
    packed = packed_weight(spec)
    weight = native.describe_weight(spec, *operands(spec, packed))
    assert (weight.format, weight.layout, weight.blocksize, weight.nested_code) == (2, 2, 64, None)
    assert native.describe_weight(EightBitSpec("w8_s8", 16, 128), *operands(spec, packed)).blocksize == 0


def test_import_opens_nothing_and_prints_nothing():
    program = """
import sys
import nf4linear
import nf4linear.ops
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
assert "libnf4linear" not in maps, "a library was opened at import"
heavy = [name for name in ("bitsandbytes", "transformers", "accelerate", "peft") if name in sys.modules]
assert not heavy, f"imported: {heavy}"
"""
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:nf4linear", "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""
