"""The machine code of the wgmma kernels, read without a GPU: asynchronous wgmma, no spills, cheap look-ups."""

import shutil
from pathlib import Path

import pytest

from sass_wgmma import assert_asynchronous, assert_nothing_for_sm_80, compile_for
from test_sass import CUOBJDUMP, NVCC, NVDISASM, functions, opcodes

pytestmark = pytest.mark.skipif(
    not (NVCC and CUOBJDUMP and NVDISASM and shutil.which("c++")),
    reason="needs nvcc, a C++ compiler, cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)",
)
SHAPES = 8  # SMALL_WGMMA_SHAPES in csrc/small_wgmma_plan.h


@pytest.fixture(scope="module", params=["f16", "bf16"])
def build(request, tmp_path_factory) -> tuple[Path, str]:
    """The compiled kernels, and what ptxas said about them."""
    return compile_for("90a", f"inst_small_wgmma_{request.param}.cu", tmp_path_factory.mktemp("sass"))


def test_ptxas_keeps_wgmma_asynchronous(build):
    assert_asynchronous(build[1], SHAPES)


def test_a_tile_is_four_wgmma_and_sixteen_look_ups(build):
    cubin, _ = build
    kernels = {name: code for name, code in functions(cubin).items() if "small_wgmma_kernel" in name}
    assert len(kernels) == SHAPES
    for name, code in kernels.items():
        found = opcodes(code)
        count = {op: sum(o.split(".")[0] == op for o in found) for op in {o.split(".")[0] for o in found}}
        assert "LDL" not in count and "STL" not in count, name
        assert count["HGMMA"] in (8, 16), name  # a unit of two tiles, or of four
        # Those of the loop and, in front of it, of the first tile; each one PRMT and one 4-byte load.
        look_ups = 4 * count["HGMMA"] + 16
        assert look_ups <= count["PRMT"] <= look_ups + 64, (name, count["PRMT"])
        assert look_ups <= found.count("LDS") <= look_ups + 64, (name, found.count("LDS"))
        # x, codes and scales come by the copy engine; registers change hands; the kernel before is waited for.
        assert count["UTMALDG"] >= 6 and "UBLKCP" not in count and count["USETMAXREG"] == 2, (name, count)
        assert count["ACQBULK"] == 3 and count["PREEXIT"] == 1, name
        # One thread's copies, known as such: no loop over the lanes around each.
        assert "ELECT" in count and "BRA.U.ANY" not in found, name


def test_other_architectures_get_nothing(tmp_path):
    assert_nothing_for_sm_80("inst_small_wgmma_bf16.cu", SHAPES, tmp_path)
