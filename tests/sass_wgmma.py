"""What the machine-code tests of all wgmma engines ask alike."""

import re
import subprocess
from pathlib import Path

from test_sass import CSRC, CUOBJDUMP, NVCC, functions, opcodes, run


def compile_for(arch: str, source: str, folder: Path) -> tuple[Path, str]:
    """The kernels of csrc/`source`, and what ptxas said about them."""
    path = folder / f"{source}-{arch}.cubin"
    flags = ["-cubin", f"-arch=sm_{arch}", "-O3", "-std=c++17", "-Xptxas=-v", f"-I{CSRC}"]
    done = subprocess.run(
        [NVCC, *flags, str(CSRC / source), "-o", str(path)], capture_output=True, text=True, check=True
    )
    return path, done.stderr


def assert_asynchronous(said: str, kernels: int) -> None:
    """ptxas says C75xx where it serialises wgmma or ignores setmaxnreg, and goes on; and it says what spills."""
    assert said.count("Compiling entry function") == kernels
    assert not re.findall(r"\(C75\d\d\)|setmaxnreg", said), said
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == kernels


def assert_nothing_for_sm_80(source: str, kernels: int, folder: Path) -> None:
    path, _ = compile_for("80", source, folder)
    usage = run(CUOBJDUMP, "-res-usage", str(path))
    assert len(re.findall(r"Function \S+:", usage)) == kernels
    for name, code in functions(path).items():
        assert len(opcodes(code)) < 40, name
