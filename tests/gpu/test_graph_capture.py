"""The operators on a GPU: results, devices and streams, CUDA-graph capture."""

import pytest
import torch

from nf4linear import ops, reference, reorder
from nf4linear.formats import EightBitSpec, FourBitSpec
from operands import SPECS, fresh_weight, geometry, operands, spec_id

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("library"),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
LAYERS = (FourBitSpec("nf4", 256, 512), FourBitSpec("nf4", 96, 100), EightBitSpec("w8_s8", 128, 512))


def packed_on(spec, device="cuda", seed=0):
    return reorder.pack(spec, fresh_weight(spec, seed, device))


def call(spec, packed, x, bias=None):
    return ops.linear(x, *operands(spec, packed), bias, *geometry(spec))


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 3, 16, 33, 130])
def test_linear_against_float64(spec, dtype, m):
    canonical = fresh_weight(spec, device="cuda")
    x = torch.randn(m, spec.k, device="cuda").to(dtype)
    bias = torch.randn(spec.n, device="cuda").to(dtype)
    exact = x.double() @ reference.dequantize(spec, canonical, torch.float32).double().T + bias.double()
    got = call(spec, reorder.pack(spec, canonical), x, bias)
    assert got.dtype == dtype and got.shape == exact.shape
    assert (got.double() - exact).abs().max() <= TOLERANCE[dtype] * exact.abs().max()
    assert torch.equal(got, call(spec, reorder.pack(spec, canonical), x, bias)), "two calls differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_that_are_not_plain_tensors(dtype):
    spec = FourBitSpec("nf4", 64, 128)
    packed = packed_on(spec)
    base = torch.randn(260, 400, device="cuda").to(dtype)
    views = (base[:128, :3].t(), base[:3, :256:2], base[:3, 1:129], base[:1, :128].expand(3, -1), base[5, :128])
    for x in views:
        got, want = call(spec, packed, x), call(spec, packed, x.contiguous().clone())
        assert (got.float() - want.float()).abs().max() <= TOLERANCE[dtype] * want.float().abs().max()
    for shape in ((0, 128), (2, 0, 128)):
        assert call(spec, packed, torch.empty(shape, device="cuda", dtype=dtype)).shape == (*shape[:-1], 64)


@pytest.mark.parametrize("spec", LAYERS, ids=spec_id)
@pytest.mark.parametrize("m", [1, 16, 100])
def test_a_captured_linear_replays_on_new_inputs(spec, m):
    packed = packed_on(spec)
    bias = torch.randn(spec.n, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, spec.k, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(spec, packed, x, bias)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(spec, packed, x, bias)
    for _ in range(3):
        fresh = torch.randn_like(x)
        x.copy_(fresh)
        graph.replay()
        assert torch.equal(y, call(spec, packed, fresh, bias))


def test_a_capture_without_warm_up():
    """Nothing about the first call may synchronise or allocate outside of torch."""
    spec = FourBitSpec("nf4", 80, 256)
    packed = packed_on(spec, seed=3)
    x = torch.randn(4, 256, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight = ops.dequantize(*operands(spec, packed), *geometry(spec), torch.float16)
    graph.replay()
    assert torch.equal(weight, ops.dequantize(*operands(spec, packed), *geometry(spec), torch.float16))
    assert torch.isfinite(call(spec, packed, x)).all()


def test_two_captured_graphs_on_two_streams():
    """Each replays at the same time as the other, over and over: nothing is shared."""
    spec = FourBitSpec("nf4", 1024, 1024)
    packed = packed_on(spec)
    inputs = [torch.randn(8, 1024, device="cuda", dtype=torch.float16) for _ in range(2)]
    want = [call(spec, packed, x) for x in inputs]
    graphs, outputs = [], []
    for x in inputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            y = x
            for _ in range(4):
                y = call(spec, packed, x)
        outputs.append(y)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, w) for y, w in zip(outputs, want, strict=True))


def test_side_stream_with_a_pending_producer():
    spec = FourBitSpec("nf4", 256, 512)
    packed = packed_on(spec)
    source = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    want = call(spec, packed, source)
    x = torch.zeros_like(source)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        x.copy_(source)
        got = call(spec, packed, x)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(got, want)


def test_gradients_on_the_gpu():
    spec = FourBitSpec("nf4", 64, 128)
    canonical = fresh_weight(spec, device="cuda")
    x = torch.randn(5, 128, device="cuda", requires_grad=True)
    upstream = torch.randn(5, 64, device="cuda")
    call(spec, reorder.pack(spec, canonical), x).backward(upstream)
    want = upstream @ reference.dequantize(spec, canonical, torch.float32)
    torch.testing.assert_close(x.grad, want, rtol=1e-3, atol=1e-3)


def test_opcheck_on_the_gpu():
    spec = FourBitSpec("nf4", 48, 128)
    x = torch.randn(2, 3, 128, device="cuda", requires_grad=True)
    torch.library.opcheck(ops.linear.default, (x, *operands(spec, packed_on(spec)), None, *geometry(spec)))


@pytest.mark.slow
def test_compiled_with_cuda_graphs():
    """What generate() compiles: fullgraph, captured and replayed by torch itself."""
    spec = FourBitSpec("nf4", 256, 256)
    packed = packed_on(spec)

    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def model(x):
        for _ in range(3):
            x = torch.nn.functional.silu(call(spec, packed, x))
        return x

    for _ in range(4):
        x = torch.randn(2, 256, device="cuda", dtype=torch.bfloat16)
        want = x
        for _ in range(3):
            want = torch.nn.functional.silu(call(spec, packed, want))
        got = model(x)
        assert (got.float() - want.float()).abs().max() <= 0.02 * want.float().abs().max()


def test_tensors_of_two_devices_are_refused():
    spec = FourBitSpec("nf4", 48, 128)
    packed = packed_on(spec)
    with pytest.raises(ValueError, match=r"input is on cuda:0 but the layer is on cpu"):
        call(spec, packed_on(spec, "cpu"), torch.randn(2, 128, device="cuda"))
    with pytest.raises(ValueError, match="nested_absmax is on cpu"):
        call(spec, packed | {"nested_absmax": packed["nested_absmax"].cpu()}, torch.randn(2, 128, device="cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_layer_on_another_gpu():
    spec = FourBitSpec("nf4", 48, 128)
    assert torch.cuda.current_device() == 0
    x = torch.randn(3, 128)
    on = {f"cuda:{i}": call(spec, packed_on(spec, f"cuda:{i}"), x.to(f"cuda:{i}")).cpu() for i in (1, 0)}
    assert torch.equal(on["cuda:0"], on["cuda:1"])
    assert torch.cuda.current_device() == 0
