"""The machine code of the prefill kernels, read without a GPU: asynchronous wgmma, no spills, cheap look-ups."""

import shutil
from pathlib import Path

import pytest

from sass_wgmma import assert_asynchronous, assert_nothing_for_sm_80, compile_for
from test_sass import CUOBJDUMP, NVCC, NVDISASM, functions, opcodes

pytestmark = pytest.mark.skipif(
    not (NVCC and CUOBJDUMP and NVDISASM and shutil.which("c++")),
    reason="needs nvcc, a C++ compiler, cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)",
)
SHAPES = 10  # GEMM_SHAPES in csrc/gemm_wgmma_shape.h
WIDE = (8, 9)  # those of more than 256 tokens


@pytest.fixture(scope="module", params=["f16", "bf16"])
def build(request, tmp_path_factory) -> tuple[Path, str]:
    """The compiled kernels, and what ptxas said about them."""
    return compile_for("90a", f"inst_gemm_wgmma_{request.param}.cu", tmp_path_factory.mktemp("sass"))


def test_ptxas_keeps_wgmma_asynchronous(build):
    assert_asynchronous(build[1], SHAPES)


def test_a_k_tile_is_four_steps_of_wgmma_and_look_ups(build):
    """Of a step for more than 256 tokens, two wgmma."""
    cubin, _ = build
    kernels = {name: code for name, code in functions(cubin).items() if "gemm_wgmma_kernel" in name}
    assert len(kernels) == SHAPES
    for name, code in kernels.items():
        found = opcodes(code)
        count = {op: sum(o.split(".")[0] == op for o in found) for op in {o.split(".")[0] for o in found}}
        assert "LDL" not in count and "STL" not in count, name
        wide = any(f"Li{shape}E" in name for shape in WIDE)
        assert count["HGMMA"] == (8 if wide else 4), name
        # Those of the loop and of the first step in front of it; each one PRMT and one load.
        look_ups = 4 * (4 + 1)
        assert look_ups <= count["PRMT"] <= look_ups + 32, (name, count["PRMT"])
        assert look_ups <= sum(o.startswith("LDS.64") for o in found) <= look_ups + 8, name
        # x and codes come by the copy engine, each at once, x to several blocks; registers change hands; the kernel
        # before is waited for.
        assert count["UTMALDG"] >= 2 and "UTMALDG.3D.MULTICAST" in found, (name, count)
        assert count["USETMAXREG"] == 2 and count["ACQBULK"] == 2 and count["PREEXIT"] == 1, name


def test_other_architectures_get_nothing(tmp_path):
    assert_nothing_for_sm_80("inst_gemm_wgmma_bf16.cu", SHAPES, tmp_path)
