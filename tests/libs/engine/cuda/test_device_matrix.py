"""Matrices in 8 bits, where torch has their products on a CPU too; and what devices can't do."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.config import EngineConfig
from penstock.engine.kernels.cuda import setup
from penstock.engine.kernels.cuda.capability import check_dtype
from penstock.engine.kernels.cuda.matrix import Float8Matrix, Int8Matrix, refusal
from penstock.engine.layers.stacks import Stack

CPU = torch.device("cpu")
KINDS = {
    "int8, torch's product": lambda matrix, bias: Int8Matrix.of(matrix, bias, True),
    "int8, made bfloat16": lambda matrix, bias: Int8Matrix.of(matrix, bias, False),
    "float8": Float8Matrix.of,
}


@pytest.fixture(params=KINDS)
def kind(request):
    reason = refusal(lambda x, matrix: KINDS[request.param](matrix, None).product(x), CPU, 0.1)
    if reason is not None:
        pytest.skip(f"not on a CPU with this torch: {reason}")
    return KINDS[request.param]


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_are_near(kind, rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 128, generator=generator).bfloat16()
    sizes = torch.logspace(-2, 2, 96)
    matrix = (torch.randn(128, 96, generator=generator) * sizes).bfloat16()
    bias = (torch.randn(96, generator=generator) * sizes).bfloat16()
    right = x.float() @ matrix.float()
    held = kind(matrix, bias)
    assert held.shape == (128, 96)
    answer = held.product(x)
    assert answer.dtype == torch.bfloat16
    off = (answer.float() - bias.float() - right).abs() / (x.float().norm(dim=1, keepdim=True) * sizes)
    assert off.max() < 0.15, "of each column's own size, however unlike the columns are"
    part = held.columns(32, 80)
    assert part.shape == (128, 48)
    torch.testing.assert_close(part.product(x), answer[:, 32:80], rtol=0.02, atol=0.1)


def test_rows_of_float8_are_rounded_by_themselves():
    """A loud row takes no steps away from a quiet one."""
    generator = torch.Generator().manual_seed(1)
    x, matrix = torch.randn(2, 64, generator=generator), torch.randn(64, 32, generator=generator).bfloat16()
    x[1] *= 1e4
    if refusal(lambda x, matrix: Float8Matrix.of(matrix, None).product(x), CPU, 0.1) is not None:
        pytest.skip("not on a CPU with this torch")
    held = Float8Matrix.of(matrix, None)
    assert torch.equal(held.product(x.bfloat16())[:1], held.product(x[:1].bfloat16()))


def test_zero_columns_and_rows(kind):
    matrix = torch.zeros(32, 32).bfloat16()
    assert not kind(matrix, None).product(torch.randn(2, 32).bfloat16()).any()
    assert not kind(torch.ones(32, 32).bfloat16(), None).product(torch.zeros(2, 32).bfloat16()).any()


def test_a_product_that_is_wrong_is_refused():
    assert "off by" in (refusal(lambda x, matrix: (x @ matrix) * 1.5, CPU, 0.1) or "")
    assert "KeyError" in (refusal(lambda x, matrix: {}["kernel"], CPU, 0.1) or "")
    assert refusal(lambda x, matrix: x @ matrix, CPU, 0.1) is None


def test_the_head_of_a_float8_model_stays_as_it_is():
    matrix, odd = torch.randn(64, 32).bfloat16(), torch.randn(64, 20).bfloat16()
    if refusal(lambda x, matrix: Float8Matrix.of(matrix, None).product(x), CPU, 0.1) is not None:
        pytest.skip("not on a CPU with this torch")
    keep = setup.keep_for("float8", CPU)
    assert isinstance(keep(Stack("0.qkv", ()), lambda: matrix, None)[0], Float8Matrix)
    assert keep(Stack("head", ()), lambda: matrix, None) == (matrix, None)
    assert keep(Stack("0.qkv", ()), lambda: odd, None)[0] is odd, "sizes that the product does not take"


@pytest.mark.parametrize(
    ("dtype", "capability", "says"),
    [
        ("float8", (8, 0), "float8 needs compute capability 8.9 or later, this device has 8.0: .*bfloat16 or int8"),
        ("bfloat16", (7, 5), "bfloat16 needs compute capability 8.0 or later, this device has 7.5: use float32$"),
        ("int8", (7, 0), "use float32$"),
    ],
)
def test_what_a_device_cannot_do(dtype, capability, says):
    with pytest.raises(ValueError, match=says):
        check_dtype(dtype, capability)
    check_dtype(dtype, (9, 0))
    check_dtype("float32", (7, 0))


def test_devices_and_types_of_a_config(tmp_path):
    with pytest.raises(ValueError, match="dtype = 'float8': needs a CUDA device"):
        EngineConfig(tmp_path, dtype="float8")
    assert EngineConfig(tmp_path, dtype="float8", device="cuda:1").device == "cuda:1"
    for device in ("gpu", "cuda:", "cuda:x", "cpu:0x", ""):
        with pytest.raises(ValueError, match=r"device = .*: must be cpu, cuda, or cuda and its number"):
            EngineConfig(tmp_path, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device_is_said_so():
    with pytest.raises(ValueError, match="finds no CUDA device: use cpu"):
        setup.check("bfloat16", torch.device("cuda"))
