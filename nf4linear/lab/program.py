"""The stand-alone C++ program (csrc/lab): build it with CMake, run stages on a file."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LADDER = ("v0", "v1", "v2", "v3", "v4")
ALONE = ("v1", "vectors_alone", "shifts_alone")  # each optimisation alone on v0; v1 is the first itself
STAGES = (*LADDER, "vectors_alone", "shifts_alone")
SOURCE = Path(__file__).parents[2] / "csrc" / "lab"

_NAME_ONE = "there is no GPU here whose architecture could be built for; name one, such as --arch 90"
# What CMake and nvcc say in other words -> what to do about it.
_CMAKE_REMEDIES = {
    "Cannot find valid GPU for '-arch=native'": _NAME_ONE,
    "no GPU was detected": _NAME_ONE,
    "No CMAKE_CXX_COMPILER": "no C++ compiler was found; install g++ or clang++, or name one in CXX",
    "No CMAKE_CUDA_COMPILER": "no nvcc was found; put it on PATH or set CUDACXX",
    "unable to find a build program": "cmake found no build program; install make, or `pip install ninja`",
}


class ProgramError(ValueError):
    """The program cannot be built or run; the text is the tool's own, with the next step."""


@dataclass(frozen=True)
class Timing:
    """Times of one stage over its repeats, in milliseconds; gb_per_s is bytes over the median."""

    stage: str
    dtype: str
    protocol: str
    repeats: int
    bytes: int
    mean_ms: float
    median_ms: float
    min_ms: float
    max_ms: float
    gb_per_s: float


def build(folder: Path, architecture: str | None = None) -> Path:
    """Build into `folder`/build; returns the path of nf4l_lab. Raises ProgramError with the tool's output."""
    if not SOURCE.is_dir():
        raise ProgramError(
            f"the program's sources are not installed ({SOURCE}); run `python -m "
            "nf4linear.cli.main lab build` in the root of a checkout"
        )
    if not shutil.which("cmake"):
        raise ProgramError("cmake is not on PATH; `pip install cmake` brings it")
    target = folder / "build"
    arch = [f"-DCMAKE_CUDA_ARCHITECTURES={architecture}"] if architecture else []
    _cmake("-S", str(SOURCE), "-B", str(target), *arch)
    _cmake("--build", str(target), "--parallel")
    program = target / "nf4l_lab"
    if not program.exists():
        raise ProgramError("only the file checker was built: no nvcc was found; put it on PATH or set CUDACXX")
    return program


def _cmake(*arguments: str) -> None:
    try:
        _run(["cmake", *arguments])
    except ProgramError as error:
        for said, remedy in _CMAKE_REMEDIES.items():
            if said in str(error):
                raise ProgramError(remedy) from error
        raise


def find(folder: Path) -> Path:
    """The built program. Raises ProgramError when there is none."""
    program = folder / "build" / "nf4l_lab"
    if not program.exists():
        raise ProgramError(f"{program} is not built yet; run `nf4linear lab build` first")
    return program


def run_stages(
    program: Path,
    weight: Path,
    stages: Sequence[str],
    dtypes: Sequence[str],
    *,
    warmup: int = 20,
    repeats: int = 0,
    protocols: Sequence[str] = ("idle",),
    output: Path | None = None,
) -> list[Timing]:
    """Run stages on one file: times when `repeats` > 0; outputs to `output`-<stage>-<dtype>.raw when it is given."""
    options = ["--stages", ",".join(stages), "--dtypes", ",".join(dtypes), "--protocols", ",".join(protocols)]
    options += ["--warmup", str(warmup), "--repeats", str(repeats)]
    if output is not None:
        options += ["--output", str(output)]
    lines = _run([str(program), str(weight), *options]).splitlines()
    return [Timing(**json.loads(line)) for line in lines]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()}")
    return done.stdout
