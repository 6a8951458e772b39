"""Arrows go downwards only: checkpoint -> modules -> operators -> native -> C ABI -> engines, in Python and in csrc."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nf4linear"
CSRC = ROOT / "csrc"

# From the bottom up. A module not named here belongs to no layer of its own: it may be used by whatever stands above
# everything that it imports itself.
PYTHON_CHAIN = (
    "formats", "layout", "reference", "reorder", "native", "selfcheck", "eager", "ops", "mixed", "bnb", "linear",
    "select", "checkpoint", "model_rules", "hf", "bookkeeping", "patch", "cli",
)  # fmt: skip
C_CHAIN = (
    "nf4linear.h", "layout.h", "codebook.h", "validate.h", "device_info.h", "dequantize_cost.h", "deal.h", "gemm_cut.h",
    "four_bit.h", "small_batch_plan.h", "small_wgmma_plan.h", "gemm_wgmma_shape.h", "gemm_wgmma_plan.h",
    "gemm_wgmma_choice.h", "gemm_mma_plan.h", "small_w8_plan.h", "small_wgmma_w8_plan.h", "gemm_w8_plan.h",
    "dispatch_w8.h", "dispatch.h",
    "status.cuh", "engines.h", "arrivals.h", "launch.cuh", "convert.cuh", "convert8.cuh", "copy.cuh", "mma_sm80.cuh",
    "wgmma_sm90.cuh", "tma.cuh", "scale.cuh", "decode.cuh", "product_table.cuh", "dequant.cuh", "four_bit.cuh",
    "small_batch_load.cuh", "small_batch.cuh", "small_batch_launch.cuh",
    "small_wgmma_load.cuh", "small_wgmma_finish.cuh", "small_wgmma.cuh", "small_wgmma_launch.cuh",
    "small_w8_load.cuh", "small_w8.cuh", "small_w8_launch.cuh",
    "w8_operand.cuh", "small_wgmma_w8_load.cuh", "small_wgmma_w8.cuh", "small_wgmma_w8_launch.cuh",
    "gemm_w8_load.cuh", "gemm_w8_finish.cuh", "gemm_w8.cuh", "gemm_w8_launch.cuh",
    "gemm_wgmma_load.cuh", "gemm_wgmma_finish.cuh", "gemm_wgmma.cuh", "gemm_wgmma_scales.cuh",
    "gemm_wgmma_four_bit.cuh",
    "gemm_wgmma_launch.cuh", "gemm_mma_load.cuh", "gemm_mma_finish.cuh", "gemm_mma.cuh", "gemm_mma_launch.cuh",
    "device.cuh", "entry.cu",
)  # fmt: skip


# ---- Python ----------------------------------------------------------------------------------------------------------


@cache
def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def imports(name: str, lazy: bool = False) -> frozenset[str]:
    """Modules of the package that `name` imports when it is imported itself; with `lazy`, inside functions too."""
    path = modules()[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    found = set()
    for node in _statements(ast.parse(path.read_text()), lazy):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            found |= _imported(base, node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nf4linear":
            found |= _imported(node.module.split(".")[1:], node.names)
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("nf4linear.") for alias in node.names if "nf4linear." in alias.name}
    return frozenset(found & modules().keys() - {name, ""})


def _imported(base: list[str], names: list[ast.alias]) -> set[str]:
    """`from base import names`: each name is a module of base, or something that base itself holds."""
    full = {".".join([*base, alias.name]) for alias in names}
    return {name if name in modules() else ".".join(base) for name in full}


def _statements(tree: ast.AST, lazy: bool):
    """Nodes that run at import; with `lazy`, those of functions too. `if TYPE_CHECKING` never runs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        yield node
        yield from _statements(node, lazy)


def layer_of(name: str) -> int | None:
    top = name.split(".")[0]
    return PYTHON_CHAIN.index(top) if top in PYTHON_CHAIN else None


def reachable(start: str, edges) -> set[str]:
    seen, todo = set(), [start]
    while todo:
        for name in edges(todo.pop()) - seen:
            seen.add(name)
            todo.append(name)
    return seen


def test_every_layer_of_the_chain_exists():
    assert {name.split(".")[0] for name in modules()} >= set(PYTHON_CHAIN)


def test_every_header_has_its_place():
    headers = {path.name for pattern in ("*.h", "*.cuh") for path in CSRC.glob(pattern)}
    assert headers | {"entry.cu"} == set(C_CHAIN)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_down(name):
    layer = layer_of(name)
    below = reachable(name, imports)
    assert name not in below, f"{name} imports itself through {sorted(imports(name))}"
    upward = [other for other in below if layer is not None and (layer_of(other) or 0) > layer]
    assert not upward, f"{name} reaches up to {sorted(upward)}"


@pytest.mark.parametrize("name", sorted(modules()))
def test_no_circle_is_hidden_in_functions(name):
    assert name not in reachable(name, lambda other: imports(other, lazy=True))


@pytest.mark.parametrize("name", [name for name in sorted(modules()) if layer_of(name) is not None])
def test_the_chain_has_no_hidden_imports_upwards(name):
    upward = [other for other in imports(name, lazy=True) if (layer_of(other) or 0) > layer_of(name)]
    assert not upward, f"{name} reaches up to {upward}"


def test_the_walk_can_fail(tmp_path, monkeypatch):
    """An upward import in a copy of the tree is found."""
    broken = dict(modules())
    copy = tmp_path / "layout.py"
    copy.write_text(broken["layout"].read_text() + "\nfrom .ops import linear\n")
    broken["layout"] = copy
    imports.cache_clear()
    monkeypatch.setitem(globals(), "modules", lambda: broken)
    with pytest.raises(AssertionError, match="reaches up to"):
        test_imports_go_down("layout")
    imports.cache_clear()


def test_key_names_of_bitsandbytes_stay_in_checkpoint():
    for name, path in modules().items():
        if name.split(".")[0] != "checkpoint":
            assert "quant_state.bitsandbytes__" not in path.read_text(), path


# ---- C and CUDA ------------------------------------------------------------------------------------------------------


@cache
def sources() -> dict[str, Path]:
    """Path inside csrc -> file."""
    kinds = (".h", ".cuh", ".cu", ".cpp")
    return {str(path.relative_to(CSRC)): path for path in CSRC.rglob("*") if path.suffix in kinds}


@cache
def includes(name: str) -> frozenset[str]:
    path = sources()[name]
    quoted = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
    # As the compilers look: beside the file, then in csrc.
    candidates = [[(path.parent / q).resolve(), (CSRC / q).resolve()] for q in quoted]
    known = {path.resolve(): other for other, path in sources().items()}
    return frozenset(known[c] for pair in candidates for c in pair if c in known)


@pytest.mark.parametrize("name", sorted(sources()))
def test_includes_go_down(name):
    below = reachable(name, includes)
    assert name not in below, f"{name} includes itself"
    if name in C_CHAIN:
        upward = [other for other in below if other in C_CHAIN and C_CHAIN.index(other) > C_CHAIN.index(name)]
        assert not upward, f"{name} reaches up to {upward}"
    # cpu/ stands on csrc and on itself; so do, together, the laboratory and its ports. Nothing stands on them.
    family = {"lab": ("lab", "portable"), "portable": ("lab", "portable")}.get(Path(name).parts[0], ())
    folders = {Path(name).parent, *Path(name).parents, *map(Path, family)}
    for other in includes(name):
        assert Path(other).parent in folders, f"{name} includes {other}"
        assert Path(other).suffix in (".h", ".cuh"), f"{name} includes {other}"
        # A .h compiles with any host compiler.
        assert not (name.endswith((".h", ".cpp")) and other.endswith(".cuh")), f"{name} includes {other}"


@pytest.mark.parametrize("name", sorted(sources()))
def test_no_framework_headers(name):
    system = re.findall(r"^\s*#\s*include\s+<([^>]+)>", sources()[name].read_text(), re.MULTILINE)
    assert not [h for h in system if h.split("/")[0] in ("torch", "ATen", "c10", "pybind11") or h == "Python.h"]


# ---- size ------------------------------------------------------------------------------------------------------------

COLUMNS = 120
C_KINDS = (".h", ".cuh", ".cu", ".cpp", ".maca", ".mu")


def long_lines(folder: Path) -> list[str]:
    """File and number of each line of C++ or CUDA under `folder` that is too long; Python's are ruff's to find."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in C_KINDS)
    assert files, folder
    lines = ((path, i, line) for path in files for i, line in enumerate(path.read_text().splitlines(), 1))
    return [f"{path}:{i}: {len(line)} columns" for path, i, line in lines if len(line) > COLUMNS]


@pytest.mark.parametrize("folder", ["csrc", "tests"])
def test_lines_stay_short(folder):
    assert not long_lines(ROOT / folder)


def test_a_long_line_is_found(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/x.cuh").write_text("// fits\n" + "x" * COLUMNS + "\n" + "x" * (COLUMNS + 1) + "\n")
    assert [line.split(":", 1)[1] for line in long_lines(tmp_path)] == ["3: 121 columns"]


def test_files_stay_small():
    files = [*modules().values(), *sources().values()]
    sizes = {path: len(path.read_text().splitlines()) for path in files}
    # The engines of cpu/ are headers, compiled once a level.
    limits = {path: 250 if path.suffix == ".h" and path.parent.name != "cpu" else 400 for path in files}
    assert not {str(path): size for path, size in sizes.items() if size > limits[path]}
