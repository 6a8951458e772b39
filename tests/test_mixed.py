"""The eight products of a 16-bit and an 8-bit matrix."""

import pytest
import torch

from nf4linear import mixed
from nf4linear.mixed import VARIANTS, WIDE, NarrowOperand

ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
SHAPES = ((1, 1, 1), (5, 7, 33), (16, 48, 64), (33, 20, 96))


def operands(variant: str, m: int, n: int, k: int, device: str = "cpu"):
    """The dense operands a [m, k], b [k, n] and what the variant takes; every code occurs where it can."""
    generator = torch.Generator().manual_seed(m * n + k)
    dense, given = [], []
    for kind, (rows, columns), first in zip(variant.split("_"), ((m, k), (k, n)), (True, False), strict=True):
        if kind in WIDE:
            matrix = torch.randn(rows, columns, generator=generator).to(WIDE[kind]).to(device)
            given.append(matrix)
        else:
            codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
            matrix = (codes.view(torch.int8) if kind == "s8" else codes).to(device)
            given.append(mixed.reorder_a(matrix) if first else mixed.reorder_b(matrix))
        dense.append(matrix)
    return dense, given


def assert_product(got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    assert got.shape == exact.shape and got.is_contiguous()
    assert ((got.double() - exact).abs() <= ROUNDING[got.dtype] * exact.abs() + 1e-5 * size).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_products(variant, shape):
    (a, b), given = operands(variant, *shape)
    got = getattr(mixed, variant)(*given)
    assert got.dtype == WIDE[next(kind for kind in variant.split("_") if kind in WIDE)]
    assert_product(got, a, b)


@pytest.mark.parametrize("dtype", WIDE.values(), ids=str)
@pytest.mark.parametrize("narrow", [torch.int8, torch.uint8], ids=str)
def test_every_code_is_exact(dtype, narrow):
    """A one-hot wide operand gives the codes themselves."""
    codes = torch.arange(256, dtype=torch.uint8).view(narrow).view(16, 16)
    one = torch.eye(16, dtype=dtype)
    assert torch.equal(mixed.matmul(one, mixed.reorder_b(codes)), codes.to(dtype))
    assert torch.equal(mixed.matmul(mixed.reorder_a(codes), one), codes.to(dtype))


def test_operands_that_are_views():
    (a, b), (wide, narrow) = operands("f16_s8", 6, 10, 40)
    assert_product(mixed.f16_s8(wide.t().contiguous().t(), narrow), a, b)
    assert torch.equal(mixed.reorder_b(b.t().contiguous().t()).dense(), b)
    (a, b), (narrow, wide) = operands("u8_bf16", 6, 10, 40)
    assert_product(mixed.u8_bf16(narrow, wide.t().contiguous().t()), a, b)
    assert torch.equal(narrow.dense(), a) and narrow.shape == (6, 40)


def test_nothing_to_multiply():
    _, (wide, narrow) = operands("f16_s8", 3, 4, 16)
    assert mixed.f16_s8(wide[:0], narrow).shape == (0, 4)


def test_operator_contract():
    _, (wide, narrow) = operands("bf16_s8", 3, 5, 32)
    for first in (True, False):
        arguments = (wide, narrow.qweight, narrow.scale, narrow.spec.format, narrow.spec.n, narrow.spec.k, first)
        torch.library.opcheck(torch.ops.nf4linear.mixed_matmul.default, arguments)


def test_compiles_whole():
    _, (wide, narrow) = operands("bf16_s8", 3, 5, 32)
    compiled = torch.compile(lambda x: mixed.matmul(x, narrow) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(wide), mixed.matmul(wide, narrow) + 1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda w, n: mixed.matmul(w, w), TypeError, "NarrowOperand"),
        (lambda w, n: mixed.matmul(n, w), ValueError, "second one"),
        (lambda w, n: mixed.matmul(w.float(), n), TypeError, "float32"),
        (lambda w, n: mixed.matmul(w[:, 1:], n), ValueError, r"\[3, 31\] by \(?\[?32, 5"),
        (lambda w, n: mixed.bf16_s8(w, n), TypeError, "bf16_s8 takes a tensor of torch.bfloat16"),
        (lambda w, n: mixed.f16_u8(w, n), TypeError, "f16_u8 takes a NarrowOperand of torch.uint8"),
        (lambda w, n: mixed.s8_f16(w, n), TypeError, "s8_f16 takes a NarrowOperand"),
        (lambda w, n: mixed.reorder_a(w), TypeError, "int8 or uint8 matrix; got torch.float16"),
        (lambda w, n: mixed.reorder_b(n.dense()[0]), TypeError, "matrix"),
    ],
)
def test_what_is_refused(call, error, text):
    _, (wide, narrow) = operands("f16_s8", 3, 5, 32)
    with pytest.raises(error, match=text):
        call(wide, narrow)


def test_narrow_operands_move():
    _, (_, narrow) = operands("f16_s8", 3, 5, 32)
    assert isinstance(narrow.to("cpu"), NarrowOperand) and narrow.to("cpu").dtype == torch.int8


def test_a_gradient_is_refused_not_lost():
    narrow = mixed.reorder_b(torch.zeros(64, 32, dtype=torch.int8))
    wide = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(TypeError, match="no gradient"):
        mixed.matmul(wide, narrow)
    with torch.no_grad():
        assert mixed.matmul(wide, narrow).shape == (2, 32)
