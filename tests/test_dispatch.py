"""csrc/dispatch.h on the host: what it picks, against a checked-in table, and that its plans hold.

After a wanted change of the launch table: python tests/test_dispatch.py writes the table anew; read its diff.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nf4linear import eager
from nf4linear.formats import EightBitSpec, FourBitSpec

HOST = Path(__file__).parent / "host"
CSRC = Path(__file__).parents[1] / "csrc"
TABLE = HOST / "dispatch_table.txt"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

# Name -> compute capability, SMs, shared memory a block may use.
DEVICES = {
    "H200": (90, 132, 232448),
    "A100": (80, 108, 166912),
    "A10": (86, 72, 101376),
    "L4": (89, 58, 101376),
    "B200": (100, 148, 232448),
    "RTX 5090": (120, 170, 101376),
}
F32, F16, BF16 = 0, 1, 2
NF4, FP4, W8_S8 = 0, 1, 2
FLAT, TILED, TILED_W8 = 0, 1, 2
SHAPES = (
    (576, 576), (192, 576), (512, 2048), (1024, 3072), (512, 8192), (1024, 4096), (1024, 8192), (1024, 14336),
    (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672),
    (128256, 4096), (2048, 8192), (896, 896), (1152, 896), (2048, 1024),
)  # fmt: skip
TOKENS = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 1536, 3072, 4096, 8192, 8193)
W8_SHAPES = (
    (1024, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (896, 896), (512, 2048), (2048, 4096),
)  # fmt: skip
W8_TOKENS = (1, 8, 16, 32, 64, 65, 100, 192, 256, 512, 3456)
MOST_SPREAD = 8  # blocks that add up a row block together, csrc/small_wgmma_plan.h
AS_W8 = {"format": W8_S8, "layout": TILED_W8, "blocksize": 0, "nested": 0}


def question(device, n, k, m, dtype=BF16, format=NF4, layout=TILED, blocksize=64, nested=1, flags=0, offset=0):
    return " ".join(map(str, (*device, dtype, format, layout, n, k, blocksize, nested, m, flags, offset)))


def compile_dispatch(folder: Path) -> Path:
    """Arithmetic that leaves its type stops the program."""
    program = folder / "dispatch"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    flags += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    subprocess.run([COMPILER, *flags, str(HOST / "dispatch.cpp"), "-o", str(program)], check=True)
    return program


def answers(program: Path, questions: list[str]) -> list[str]:
    text = "\n".join(questions) + "\n"
    return subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout.splitlines()


def table_lines(program: Path) -> list[str]:
    cells = [(name, n, k, m) for name in DEVICES for n, k in SHAPES for m in TOKENS]
    got = answers(program, [question(DEVICES[name], n, k, m) for name, n, k, m in cells])
    lines = [f"{name}  {n}x{k}  m={m}: {answer}" for (name, n, k, m), answer in zip(cells, got, strict=True)]
    cells = [(name, n, k, m) for name in DEVICES for n, k in W8_SHAPES for m in W8_TOKENS]
    got = answers(program, [question(DEVICES[name], n, k, m, **AS_W8) for name, n, k, m in cells])
    return lines + [f"{name}  w8 {n}x{k}  m={m}: {answer}" for (name, n, k, m), answer in zip(cells, got, strict=True)]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return compile_dispatch(tmp_path_factory.mktemp("dispatch"))


def test_the_table(program):
    assert table_lines(program) == TABLE.read_text().splitlines()


@pytest.mark.parametrize(
    ("case", "want"),
    [
        ({"m": 0}, "nothing"),
        ({"dtype": F32}, "gemm"),
        ({"layout": FLAT}, "gemm"),
        (AS_W8, "small_w8"),
        (AS_W8 | {"k": 4128}, "gemm"),  # half a tile of 64 inputs
        (AS_W8 | {"blocksize": 64}, "small_w8"),
        (AS_W8 | {"blocksize": 64, "m": 64}, "small_wgmma_w8"),
        (AS_W8 | {"blocksize": 64, "m": 65}, "gemm"),  # no scales inside that engine's loop
        (AS_W8 | {"m": 64}, "small_wgmma_w8"),
        (AS_W8 | {"m": 65}, "gemm_w8"),
        (AS_W8 | {"n": 1024, "k": 5120, "m": 384}, "gemm_w8"),  # estimated 3 % shorter than dequantize + GEMM
        (AS_W8 | {"n": 1024, "k": 4608, "m": 577}, "gemm_w8"),  # level
        (AS_W8 | {"n": 1024, "k": 2048, "m": 2048}, "gemm"),  # half a percent longer
        (AS_W8 | {"dtype": F32}, "gemm"),
        ({"flags": 4}, "gemm"),  # 4-bit engines do not transpose
        (AS_W8 | {"flags": 4}, "small_w8"),
        ({"offset": 2}, "gemm"),  # rows that start anywhere
        ({"m": 100_000}, "gemm"),
        ({"n": 4080, "m": 2048}, "gemm_wgmma"),
        ({"n": 4080, "m": 2049}, "gemm"),  # few rows and many tokens
        ({"n": 1 << 30, "k": 4096}, "gemm"),  # more blocks than 32-bit indices count
        ({"format": FP4}, "small_batch"),
        ({"nested": 0}, "small_batch"),
        ({"blocksize": 4096}, "small_batch"),
        ({"dtype": F16}, "small_batch"),
        ({"n": 131088, "k": 65536, "m": 8}, "small_batch"),  # 2^33 weights
        ({"n": 131088, "k": 65536, "m": 16}, "small_wgmma"),
    ],
)
def test_what_is_left_to_the_framework(program, case, want):
    asked = {"n": 4096, "k": 4096, "m": 4} | case
    (answer,) = answers(program, [question(DEVICES["H200"], **asked)])
    assert answer.split()[0] == want


@pytest.mark.parametrize(
    ("case", "four_bit", "eight_bit"),
    [
        ({"m": 2**31 - 2000, "n": 2**31 - 2000, "k": 64}, "gemm", "gemm"),
        ({"m": 2**31 - 2000, "n": 2**31 - 2000, "k": 4096}, "gemm", "gemm"),  # the operations leave 64 bits
        ({"m": 2**31 - 2000, "n": 2**31 - 2000, "k": 2**30}, "gemm", "gemm"),  # nor do the nanoseconds fit, or any plan
        ({"m": 8192, "n": 2**31 - 2000, "k": 2**30 - 64}, "gemm_wgmma", "gemm_w8"),  # as the bytes do
        ({"m": 1, "n": 2**20, "k": 2**20}, "gemm", "gemm"),
        ({"m": 4096, "n": 2**20, "k": 2**20}, "gemm_wgmma", "gemm_w8"),
        ({"m": 1, "n": 16, "k": 2**30}, "gemm", "small_w8"),  # activations of a slice that leave an int
        ({"m": 1, "n": 16, "k": 2**31}, "gemm", "small_w8"),
        ({"m": 1, "n": 16, "k": 2**32}, "gemm", "small_w8"),
    ],
)
def test_sizes_beyond_any_memory(program, case, four_bit, eight_bit):
    asked = [question(DEVICES["H200"], **case), question(DEVICES["H200"], **case, **AS_W8)]
    assert [answer.split()[0] for answer in answers(program, asked)] == [four_bit, eight_bit]


@pytest.mark.parametrize("case", [{"nested": 0}, AS_W8], ids=["4 bit", "8 bit"])
def test_activations_that_leave_an_int_are_cut(program, case):
    """Of one slice, on a GPU with one SM, which has no other reason to cut: 2**32 bytes would be none."""
    (answer,) = answers(program, [question((90, 1, 232448), 16, 2**31, 1, **case)])
    assert answer.startswith("small_") and int(answer.split()[3]) > 2**31 * 2 // 232448


@pytest.mark.parametrize(
    ("spec", "case"),
    [(FourBitSpec("nf4", 8192, 8192), {}), (EightBitSpec("w8_s8", 8192, 8192, 64), AS_W8 | {"blocksize": 64})],
    ids=["4 bit", "8 bit, groups"],
)
def test_eager_calls_ask_where_a_kernel_may_answer(program, spec, case):
    most = int(eager.most_fused_tokens(spec))
    beyond = answers(
        program,
        [
            question(device, n, k, m, **case)
            for device in DEVICES.values()
            for n, k in SHAPES
            for m in (most + 1, 2 * most, 10_000, 100_000)
        ],
    )
    assert set(beyond) == {"gemm"}
    assert answers(program, [question(DEVICES["H200"], spec.n, spec.k, most, **case)]) != ["gemm"]


def check_plan(answer: str, device: tuple[int, int, int], n: int, k: int, m: int) -> None:
    """The blocks of a plan cover every row group and every tile once, and fit."""
    row_tiles, tokens, slices, slice_tiles, parts, base, extra, shared, workspace = map(int, answer.split()[1:])
    _, sms, limit = device
    groups, tiles = -(-n // (16 * row_tiles)), k // 64
    assert m <= tokens
    assert parts * base + extra == groups and 0 <= extra < parts and base >= 1
    assert slice_tiles % 4 == 0 and (slices - 1) * slice_tiles < tiles <= slices * slice_tiles
    if parts * slices > sms and parts > 1:  # only where fewer parts would need too many second-level scales
        assert (-(-groups // (parts - 1)) * row_tiles * 16 * tiles // 256 + 2) * 4 > limit / 16
    assert parts <= 256 and shared <= limit
    assert shared >= 65536 + min(tiles, slice_tiles) * tokens * 128
    assert (workspace == 0) == (slices == 1)
    assert slices == 1 or workspace >= slices * groups * row_tiles * 16 * tokens * 4


def check_small_w8(answer: str, device: tuple[int, int, int], n: int, k: int, m: int) -> None:
    row_tiles, tokens, slices, slice_tiles, parts, base, extra, stages, shared, workspace = map(int, answer.split()[1:])
    limit = device[2]
    groups, tiles = -(-n // (16 * row_tiles)), k // 64
    assert m <= tokens and parts * base + extra == groups and 0 <= extra < parts and base >= 1
    assert slice_tiles % 4 == 0 and (slices - 1) * slice_tiles < tiles <= slices * slice_tiles
    assert 1 <= stages <= 3 and parts <= 256 and shared <= limit
    assert shared >= min(tiles, slice_tiles) * tokens * 128 + 8 * stages * row_tiles * 4096
    assert (workspace == 0) == (slices == 1)
    assert slices == 1 or workspace >= slices * groups * row_tiles * 16 * tokens * 4


def check_gemm_w8(answer: str, device: tuple[int, int, int], n: int, k: int, m: int) -> None:
    """Output tiles cover the result; whole ones and those in the line are all dealt."""
    numbers = map(int, answer.split()[1:])
    tokens, consumers, token_tiles, row_blocks, blocks, whole, base, extra, shared, workspace = numbers
    _, sms, limit = device
    assert (token_tiles - 1) * tokens < m <= token_tiles * tokens
    assert row_blocks == -(-n // (64 * consumers))
    left = (token_tiles * row_blocks - whole) * (k // 64)
    assert blocks <= sms and blocks * base + extra == left and 0 <= extra < blocks
    assert shared <= limit and (workspace == 0) == (left == 0)
    assert left == 0 or workspace >= blocks * tokens * consumers * 64 * 4 + 1024


def check_small_wgmma_w8(answer: str, device: tuple[int, int, int], n: int, k: int, m: int) -> None:
    tokens, row_groups, burst, bursts, blocks, base, extra, shared, workspace = map(int, answer.split()[1:])
    _, sms, limit = device
    row_blocks = -(-n // (64 * row_groups))
    assert m <= tokens and bursts == -(-k // (64 * burst)) and blocks <= sms and shared <= limit
    assert blocks * base + extra == row_blocks * bursts and 0 <= extra < blocks
    shares = bursts > 1 and (extra > 0 or base % bursts > 0)
    assert workspace == (blocks * 2 * tokens * 64 * row_groups * 4 + 1024 if shares else 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    device=st.sampled_from(list(DEVICES.values())),
    n=st.integers(1, 70_000),
    tiles=st.integers(1, 600),
    m=st.integers(1, 5000),
    group=st.sampled_from([0, 0, 64]),
    tuned=st.tuples(st.integers(0, 13), st.integers(0, 20)),
)
def test_8_bit_plans_hold(program, device, n, tiles, m, group, tuned):
    flags, case = tuned[0] << 8 | tuned[1] << 16, AS_W8 | {"blocksize": group}
    (answer,) = answers(program, [question(device, n, tiles * 64, m, flags=flags, **case)])
    engine = answer.split()[0]
    checks = {"small_w8": check_small_w8, "small_wgmma_w8": check_small_wgmma_w8, "gemm_w8": check_gemm_w8}
    check = checks.get(engine)
    if check:
        check(answer, device, n, tiles * 64, m)
    assert engine not in ("small_wgmma_w8", "gemm_w8") or device[0] == 90
    assert engine != "gemm_w8" or group == 0
    assert check or tuned[0] or m > 32 or device[2] < 200_000


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    device=st.sampled_from(list(DEVICES.values())),
    n=st.integers(1, 70_000),
    tiles=st.integers(1, 600),
    m=st.integers(1, 32),
    nested=st.integers(0, 1),
    tuned=st.tuples(st.integers(0, 7), st.integers(0, 20)),
)
def test_plans_hold(program, device, n, tiles, m, nested, tuned):
    flags = tuned[0] << 8 | tuned[1] << 16
    (answer,) = answers(program, [question(device, n, tiles * 64, m, nested=nested, flags=flags)])
    if answer.startswith("small_batch"):
        check_plan(answer, device, n, tiles * 64, m)
    elif answer == "gemm" and tuned[0] == 0 and device[2] > 200_000:
        pytest.fail("a GPU with Hopper's shared memory takes every shape up to 32 tokens")


def most_sharers(base: int, extra: int, bursts: int, row_blocks: int) -> int:
    """Of one row block, with units dealt as csrc/deal.h has it."""
    longer = extra * (base + 1)

    def block(unit: int) -> int:
        return unit // (base + 1) if unit < longer else extra + (unit - longer) // base

    return max(block((r + 1) * bursts - 1) - block(r * bursts) + 1 for r in range(row_blocks))


def small_wgmma_cut(answer: str, n: int) -> tuple[int, int, int, int, int] | None:
    """Tiles of a unit, units and number of row blocks, and the deal; None where another engine answers."""
    engine, *words = answer.split()
    if engine not in ("small_wgmma", "small_wgmma_w8"):
        return None
    tokens, row_groups, burst, bursts, _, base, extra, *_ = map(int, words)
    if engine == "small_wgmma":  # has its accumulators in that place
        burst = 2 if tokens == 128 else 4
    return burst, bursts, -(-n // (64 * row_groups)), base, extra


def test_few_share_a_row_block_and_stretches_stay_short(program):
    """One sharer more than can add up together at most, where the least stretch does not divide the row block. A block
    has half as much again as its fair share, rounded up to bursts, at most."""
    cases = [
        (n, k, m, case)
        for n in (256, 384, 640, 1024, 1152, 1280, 2048, 2496, 4096, 8192)
        for k in range(64, 16385, 64)
        for case, tokens in (({}, (17, 33, 65, 97)), (AS_W8, (17, 33)))
        for m in tokens
    ]
    sms = DEVICES["H200"][1]
    got = answers(program, [question(DEVICES["H200"], n, k, m, **case) for n, k, m, case in cases])
    fused = 0
    for (n, k, m, _), answer in zip(cases, got, strict=True):
        if not (cut := small_wgmma_cut(answer, n)):
            continue
        fused += 1
        burst, bursts, row_blocks, base, extra = cut
        assert most_sharers(base, extra, bursts, row_blocks) <= MOST_SPREAD + 1, (n, k, m, answer)
        fair = max(k / 64 / MOST_SPREAD, 4, row_blocks * bursts * burst / sms)
        assert (base + (extra > 0)) * burst <= 1.5 * (fair + burst), (n, k, m, answer)
    assert fused > len(cases) / 2


@pytest.mark.parametrize(
    ("n", "k", "case", "sharers"),
    [
        (1024, 2560, AS_W8, 5),
        (640, 2560, AS_W8, 5),
        (1024, 5120, {}, 5),
        (1280, 13824, {}, 6),
        (1024, 14336, {}, 8),  # the least stretch divides the row block
        (1024, 2304, {}, None),  # half as much again would, which is more than it is worth
        (1024, 11008, {}, None),  # 43 bursts
    ],
)
def test_all_sharers_add_up_where_a_little_more_work_allows_it(program, n, k, case, sharers):
    (answer,) = answers(program, [question(DEVICES["H200"], n, k, 48, **case)])
    _, bursts, row_blocks, base, extra = small_wgmma_cut(answer, n)
    even = extra == 0 and bursts % base == 0
    assert (most_sharers(base, extra, bursts, row_blocks) if even else None) == sharers


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        TABLE.write_text("\n".join(table_lines(compile_dispatch(Path(folder)))) + "\n")
