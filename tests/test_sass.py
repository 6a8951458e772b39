"""The machine code of the dequantize kernels, read without a GPU: no spills, and wide loads and stores."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
WHEEL_TOOLS = [str(path) for path in Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin")]


def tool(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=":".join([*WHEEL_TOOLS, "/usr/local/cuda/bin"]))


NVCC, CUOBJDUMP, NVDISASM = tool("nvcc"), tool("cuobjdump"), tool("nvdisasm")
pytestmark = pytest.mark.skipif(
    not (NVCC and CUOBJDUMP and NVDISASM and shutil.which("c++")),
    reason="needs nvcc, a C++ compiler, cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)",
)


@pytest.fixture(scope="module", params=["f32", "f16", "bf16"])
def cubin(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sass") / f"{request.param}.cubin"
    flags = ["-cubin", "-arch=sm_90a", "-O3", "-std=c++17", f"-I{CSRC}"]
    subprocess.run([NVCC, *flags, str(CSRC / f"inst_dequant_{request.param}.cu"), "-o", str(path)], check=True)
    return path


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions(cubin: Path) -> dict[str, str]:
    """Kernel name -> its instructions."""
    parts = re.split(r"^\s*\.section\s+\.text\.(\S+?),.*$", run(NVDISASM, "-c", str(cubin)), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def opcodes(code: str) -> list[str]:
    """The instructions of a disassembly, with their modifiers and without predicates."""
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", code, re.MULTILINE)


def test_all_byte_orders_are_compiled(cubin):
    names = " ".join(functions(cubin))
    assert all(order in names for order in ("FlatOrder", "Tile64Order", "Tile32Order")), names


def test_nothing_lives_in_local_memory(cubin):
    usage = run(CUOBJDUMP, "-res-usage", str(cubin))
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert len(found) >= 3, usage
    for name, registers, stack, local in found:
        assert (int(stack), int(local)) == (0, 0), name
        # Eight warps a block: at most 64 registers leave room for four blocks, enough stores in flight.
        assert int(registers) <= 64, (name, registers)
    for name, code in functions(cubin).items():
        assert not re.search(r"\b(LDL|STL)\b", code), name


def test_codes_come_and_weights_go_sixteen_bytes_at_a_time(cubin):
    for name, code in functions(cubin).items():
        if "dequantize" in name:
            assert re.search(r"\bLDG\.E\.\S*128", code), name
            assert re.search(r"\bSTG\.E\.\S*128", code), name
