"""The shared libraries: found and opened at the first call on a device, argument structs, error codes, streams.

Nothing is opened at import. `library("cuda")` and `library("cpu")` give either a bound library or a `MissingLibrary`,
which is false and says why; the first miss warns once and the operators go on with the torch reference.

Folders searched: those of NF4LINEAR_LIBRARY_PATH if it is set (and no others), else nf4linear/lib of the installation.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
import warnings
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .formats import TILE_K4, WeightSpec, operands_of

ABI_VERSION = 2
OK, USE_GEMM, NO_KERNEL_IMAGE = 0, 1, -2
# Flag of LinearArgs: the launch may start, and read the weight, before the previous kernel of the stream ends.
DEPENDENT_LAUNCH = 1
# Flag of LinearArgs: float32 x may be multiplied in bfloat16 (CPU).
ALLOW_BF16 = 2
# Flag of LinearArgs: y is written transposed, [n, m]. Few engines can; the others leave the call to a GEMM.
TRANSPOSED_OUTPUT = 4
# Shapes that the tuning flags of LinearArgs can name; a library has fewer.
TUNE_SHAPES = 255

FORMAT_IDS = {"nf4": 0, "fp4": 1, "w8_s8": 2, "w8_u8": 3}
LAYOUT_IDS = {"flat": 0, "tile16x64": 1, "tile16x32": 2}
DTYPE_IDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Weight(ctypes.Structure):
    """nf4l_weight. It holds bare pointers: whoever keeps one keeps the tensors it was made from."""

    _fields_ = (
        ("format", c_int32),
        ("layout", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("blocksize", c_int64),
        ("qweight", c_void_p),
        ("scales", c_void_p),
        ("nested_code", c_void_p),
        ("nested_absmax", c_void_p),
        ("nested_offset", c_void_p),
        ("n0", c_int64),
        ("kb0", c_int64),
        ("kb_full", c_int64),
    )


class LinearArgs(ctypes.Structure):
    """nf4l_linear_args."""

    _fields_ = (
        ("dtype", c_int32),
        ("flags", c_int32),
        ("m", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    )


# The same struct as bytes: a third of the time that ctypes takes to build one.
pack_linear_args = struct.Struct("@iiqPqPPPN").pack


def describe_weight(
    spec: WeightSpec,
    qweight: Tensor,
    scales: Tensor,
    nested_code: Tensor | None,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
) -> Weight:
    """The argument struct of one unsharded weight; valid as long as the tensors keep their storage."""
    nested = nested_code is not None
    return Weight(
        FORMAT_IDS[spec.format],
        LAYOUT_IDS[spec.layout],
        spec.n,
        spec.k,
        spec.blocksize,
        qweight.data_ptr(),
        scales.data_ptr(),
        nested_code.data_ptr() if nested else None,
        nested_absmax.data_ptr() if nested else None,
        nested_offset.data_ptr() if nested else None,
        0,
        0,
        spec.k // TILE_K4,
    )


def misfit(spec: WeightSpec, tensors: tuple[Tensor | None, ...]) -> str | None:
    """Why a library would misread these five weight arguments (None: absent), or None where they are as it wants them.

    Each must have its dtype and shape, lie on the device of qweight, and be contiguous.
    """
    expected = operands_of(spec)
    device = tensors[0].device
    for (name, dtype, shape), got in zip(expected, tensors, strict=False):
        if got is None:
            return f"{name} is missing; a {spec.format} weight with double quantization needs it"
        if got.dtype != dtype or got.shape != shape:
            return (
                f"{name} is {got.dtype} {list(got.shape)}, expected {dtype} {list(shape)} for {spec}; "
                "statistics keep their dtype whatever the model's is: load the layer again instead of casting it"
            )
        if got.device != device:
            return f"{name} is on {got.device} but qweight is on {device}; move the whole layer"
        if not got.is_contiguous():
            return f"{name} is not contiguous; pass {name}.contiguous()"
    if any(t is not None for t in tensors[len(expected) :]):
        return f"second-level scales were passed, but {spec} has none; without nested_code, pass None for all of them"
    return None


def tuned(shape: int, cut: int = 0) -> int:
    """Flags of LinearArgs that take a compiled shape, by its number, in place of the launch table's choice; `cut` is
    what csrc/nf4linear.h says of its engine."""
    return (1 + shape) << 8 | cut << 16


class NativeError(RuntimeError):
    """A native call was refused or failed; the text says what and what to do."""


class MissingLibrary:
    """Stands for a library that cannot be used; false, with the reason in `why`."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind = kind
        self.why = why

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"MissingLibrary({self.kind}: {self.why})"


class _Library:
    """What both libraries share: bound functions, the version check and the status texts."""

    kind: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        version = self._bind("abi_version", c_int)()
        if version != ABI_VERSION:
            raise OSError(f"it speaks ABI version {version}, this package speaks {ABI_VERSION}; install both again")
        self._status_text = self._bind("status_text", c_char_p, c_int)

    def _bind(self, name: str, result: type, *arguments: type):
        function = getattr(self._dll, f"nf4l_{self.kind}_{name}")
        function.restype = result
        function.argtypes = arguments
        return function

    def check(self, status: int, call: str) -> None:
        """Raise NativeError for a negative status."""
        if status < 0:
            text = self._status_text(status).decode()
            raise NativeError(f"nf4linear {call} on {self.kind} failed with status {status}: {text} ({self.path})")


class CpuLibrary(_Library):
    """libnf4linear_cpu: runs on as many threads as torch uses."""

    kind = "cpu"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._dequantize = self._bind("dequantize", c_int, POINTER(Weight), c_int32, c_void_p, c_int32)
        # launch(weight, args, threads) -> status, for callers that have prepared everything; see CudaLibrary.
        self.launch = self._bind("linear", c_int, c_void_p, c_void_p, c_int32)
        level = self._bind("level", c_char_p)().decode()
        self.description = f"CPU library, {level}"
        wanted = os.environ.get("NF4LINEAR_CPU_LEVEL") or level
        if wanted != level:
            warnings.warn(
                f"NF4LINEAR_CPU_LEVEL is {wanted!r}, but {path.name} runs {level!r}: it does not know the other level, "
                "this processor cannot run it, or the library was loaded before the variable was set. Levels are "
                "listed in the README; unset the variable to have the best one.",
                stacklevel=2,
            )

    def dequantize(self, weight: Weight, out: Tensor) -> bool:
        """Writes the weight [n, k] into contiguous `out`."""
        status = self._dequantize(byref(weight), DTYPE_IDS[out.dtype], out.data_ptr(), torch.get_num_threads())
        self.check(status, "dequantize")
        return True

    def linear(self, weight: Weight, x: Tensor, bias: Tensor | None, y: Tensor, flags: int = 0) -> bool:
        """Writes x [m, k] times the weight into y [m, n]; False when the library leaves the call to a GEMM."""
        args = _linear_args(x, bias, y, flags | cpu_flags(x.dtype))
        status = self.launch(byref(weight), byref(args), torch.get_num_threads())
        self.check(status, "linear")
        return status == OK


_MATMUL_SETTINGS = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.9 and later have a switch of its own


def cpu_flags(dtype: torch.dtype) -> int:
    """Flags of a call on the CPU: ALLOW_BF16 after torch.set_float32_matmul_precision("medium"), torch's own switch.

    Asked at every call: the user may turn it between two.
    """
    if dtype is not torch.float32:
        return 0
    precision = getattr(_MATMUL_SETTINGS, "fp32_precision", None)
    allowed = torch.get_float32_matmul_precision() == "medium" if precision is None else precision == "bf16"
    return ALLOW_BF16 if allowed else 0


class CudaLibrary(_Library):
    """libnf4linear_cuda: launches on torch's current stream of the tensors' device, and never waits for it."""

    kind = "cuda"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # On the current device, for callers that have prepared everything: launch(weight, args, stream) -> status and
        # launch_dequantize(weight, dtype, out, stream) -> status. The structs are pointers to ctypes' or, args, bytes
        # of pack_linear_args.
        self.launch = self._bind("linear", c_int, c_void_p, c_void_p, c_void_p)
        self.launch_dequantize = self._bind("dequantize", c_int, c_void_p, c_int32, c_void_p, c_void_p)
        self._workspace_bytes = self._bind("workspace_bytes", c_int64, POINTER(Weight), POINTER(LinearArgs))
        self.architectures = self._bind("architectures", c_char_p)().decode()
        self.description = f"CUDA library for {self.architectures}"
        self._foreign_devices: set[int] = set()

    def lacks_code_for(self, device: int) -> bool:
        """Whether a launch on CUDA device `device` has found that the library holds no code for it."""
        return device in self._foreign_devices

    def dequantize(self, weight: Weight, out: Tensor) -> bool:
        """Writes the weight [n, k] into contiguous `out`; False when the library has no code for this GPU."""
        return self._on_device(out.device.index, self._launch_dequantize, weight, out)

    def linear(self, weight: Weight, x: Tensor, bias: Tensor | None, y: Tensor, flags: int = 0) -> bool:
        """Writes x [m, k] times the weight into y [m, n]; False when the library leaves the call to a GEMM.

        `flags` are those of nf4l_linear_args. The weight and x (16-byte aligned rows) are read, never written.
        """
        return self._on_device(x.device.index, self._launch_linear, weight, x, bias, y, flags)

    def _on_device(self, device: int, launch, *args) -> bool:
        """Kernels go to the thread's current device, so a tensor of another GPU needs it switched for the launch."""
        if self.lacks_code_for(device):
            return False
        if device == torch.cuda.current_device():
            return self._launched(device, launch(device, *args))
        with torch.cuda.device(device):
            return self._launched(device, launch(device, *args))

    def _launched(self, device: int, status: int) -> bool:
        if status == NO_KERNEL_IMAGE:
            self._foreign_devices.add(device)
            major, minor = torch.cuda.get_device_capability(device)
            warnings.warn(
                f"nf4linear: {self.path} holds code for {self.architectures}, not for cuda:{device} ({major}.{minor}); "
                f"it uses the slower torch path. Install again with NF4LINEAR_CUDA_ARCHS={major}{minor}.",
                stacklevel=2,
            )
        else:
            self.check(status, "launch")
        return status == OK

    def _launch_dequantize(self, device: int, weight: Weight, out: Tensor) -> int:
        stream = torch._C._cuda_getCurrentRawStream(device)
        return self.launch_dequantize(byref(weight), DTYPE_IDS[out.dtype], out.data_ptr(), stream)

    def workspace_bytes(self, weight: Weight, args: LinearArgs) -> int:
        """Bytes of scratch that `launch` needs for these arguments on the current device; 0 for most."""
        size = self._workspace_bytes(byref(weight), byref(args))
        self.check(min(size, 0), "workspace query")
        return size

    def _launch_linear(self, device: int, weight: Weight, x: Tensor, bias: Tensor | None, y: Tensor, flags: int) -> int:
        args = _linear_args(x, bias, y, flags)
        # Scratch of this call alone: torch gives it to the next operation of the stream, and CUDA graphs replay it.
        if size := self.workspace_bytes(weight, args):
            workspace = x.new_empty(size, dtype=torch.uint8)
            args.workspace, args.workspace_bytes = workspace.data_ptr(), size
        return self.launch(byref(weight), byref(args), torch._C._cuda_getCurrentRawStream(device))


def _linear_args(x: Tensor, bias: Tensor | None, y: Tensor, flags: int) -> LinearArgs:
    return LinearArgs(
        DTYPE_IDS[x.dtype],
        flags,
        x.shape[0],
        x.data_ptr(),
        x.stride(0),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        None,
        0,
    )


_KINDS: dict[str, type[_Library]] = {"cuda": CudaLibrary, "cpu": CpuLibrary}
_ADVICE = {
    "cuda": "Install nf4linear where nvcc is found, with NF4LINEAR_CUDA_ARCHS set if no GPU is present then",
    "cpu": "Install nf4linear where a C++ compiler is found",
}


def library_folders() -> list[Path]:
    """Folders where the libraries are looked for, in order."""
    if override := os.environ.get("NF4LINEAR_LIBRARY_PATH"):
        # An empty part, as after a trailing colon, would be the working directory.
        return [Path(folder).absolute() for folder in override.split(os.pathsep) if folder]
    # An editable installation has two folders: the sources and the one CMake installed into.
    return [Path(folder) / "lib" for folder in sys.modules[__package__].__path__]


def open_library(kind: str) -> _Library | MissingLibrary:
    """Opens libnf4linear_<kind>, without a warning and without remembering it; `library` is the cached way."""
    name = f"nf4linear_{kind}.dll" if sys.platform == "win32" else f"libnf4linear_{kind}.so"
    if sys.platform == "darwin":
        name = f"libnf4linear_{kind}.dylib"
    folders = library_folders()
    for path in (folder / name for folder in folders):
        if path.is_file():
            try:
                return _KINDS[kind](path)
            except (OSError, AttributeError) as error:  # AttributeError: a symbol is missing
                return MissingLibrary(kind, f"{path} cannot be used: {error}")
    return MissingLibrary(kind, f"no {name} in {', '.join(map(str, folders))}")


@functools.cache
def library(kind: str) -> _Library | MissingLibrary:
    """The library for tensors of device type `kind` ("cuda" or "cpu"), opened once; a miss warns once."""
    found = open_library(kind)
    if not found:
        warnings.warn(
            f"nf4linear: {found.why}; {kind} tensors use the slower torch path. {_ADVICE[kind]}.", stacklevel=2
        )
    return found
