"""residual_norm and gated_product through FlashInfer's functions, for which a stand-in computes, against the oracles; and all that these do not take.

On a GPU: `tests.gpu.test_gpu_flashinfer`.
"""

import sys

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import gated_product, residual_norm
from quire.kernels.gating import reference as gating
from quire.kernels.norms import reference as norms
from quire.models.flashinfer import planner
from tests.support import flashinfer_stand_in
from tests.support.helpers import assert_within_budget

BF16, FP16 = torch.bfloat16, torch.float16
EPS = 1e-2  # large enough to be seen


@pytest.fixture
def package(monkeypatch):
    return flashinfer_stand_in.install(monkeypatch)


def rows(num_rows, size, dtype, *, padding=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((num_rows, size + padding), torch.nan, dtype=dtype)
    wide[:, :size] = 3 * torch.randn(num_rows, size, generator=generator)
    return wide[:, :size]


def arguments(num_rows=3, size=72, dtype=BF16, *, offset=0.0, padding=0, residual=True):
    return {
        "x": rows(num_rows, size, dtype, padding=padding),
        "weight": (1 - offset + rows(1, size, dtype, seed=1)[0] / 9).to(dtype),
        "eps": EPS,
        "offset": offset,
        "residual": rows(num_rows, size, dtype, padding=2 * padding, seed=2) if residual else None,
    }


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("offset", [0, 1.0])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("padding", [0, 8])
def test_residual_norm(package, dtype, offset, residual, padding):
    given = arguments(dtype=dtype, offset=offset, padding=padding, residual=residual)
    x, before = given["x"], given["x"].clone()
    with bounding():
        exact = x.double()
        if residual:
            exact = norms.new_residual(x, given["residual"], eps=EPS)
        normed = norms.norm(exact, given["weight"], eps=EPS, offset=offset)
    out = residual_norm(**given, impl="flashinfer")
    assert x.equal(before) and out.dtype == dtype and out.is_contiguous()
    assert_within_budget("out", out, normed)
    if residual:
        assert_within_budget("residual", given["residual"], exact)
        # The gaps between its rows are as they were.
        assert not given["residual"].isnan().any()


def test_the_result_may_take_the_place_of_x(package):
    for residual in (False, True):
        given, same = arguments(residual=residual), arguments(residual=residual)
        expected = residual_norm(**given, impl="flashinfer")
        out = residual_norm(**same, out=same["x"], impl="flashinfer")
        assert out is same["x"] and out.equal(expected)
        place = torch.full((3, 80), torch.nan, dtype=BF16)
        again = arguments(residual=residual)
        out = residual_norm(**again, out=place[:, :72], impl="flashinfer")
        assert out.equal(expected) and place[:, 72:].isnan().all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("with_out", [False, True])
def test_gated_product(package, dtype, activation, with_out):
    gate, up = rows(5, 48, dtype).chunk(2, dim=1)
    with bounding():
        exact = gating.gated_product(gate, up, activation=activation)
    out = torch.full((5, 24), torch.nan, dtype=dtype) if with_out else None
    got = gated_product(gate, up, activation=activation, out=out, impl="flashinfer")
    assert (out is None or got is out) and got.dtype == dtype and got.shape == (5, 24)
    assert_within_budget("out", got, exact)


def test_no_rows(package):
    given = arguments(num_rows=0)
    assert residual_norm(**given, impl="flashinfer").shape == (0, 72)
    gate, up = rows(0, 48, BF16).chunk(2, dim=1)
    assert gated_product(gate, up, activation="silu", impl="flashinfer").shape == (0, 24)


def other(name, **shape):
    """One argument of another case."""
    return lambda: {name: arguments(**shape)[name]}


REFUSED = {
    "post_weight": (other("weight"), r"post_weight=None, got a tensor", "post_weight"),
    "scalar": (lambda: {"scalar": torch.ones(1)}, r"scalar=None, got a tensor", None),
    "no-weight": (lambda: {"weight": None}, r"a weight, got None", None),
    "offset": (lambda: {"offset": 0.5}, r"an offset in \[0.0, 1.0\], got 0.5", None),
    "fp32": (lambda: arguments(dtype=torch.float32), r"x in fp16 or bf16, .*, got torch.float32", None),
    "fp32-weight": (other("weight", dtype=torch.float32), r"weight in .* one dtype for all, got torch.float32", None),
    "fp32-out": (lambda: {"out": torch.zeros(3, 72)}, r"out in .* one dtype for all, got torch.float32", None),
    "size": (lambda: arguments(size=68), r"x in rows of whole 16 bytes, aligned, got \[3, 68\]", None),
    "stride": (other("residual", padding=2), r"residual in rows of whole 16 bytes, .* strides \(76, 1\)", None),
    "place": (lambda: {"x": rows(3, 80, BF16)[:, 4:76]}, r"x in rows of whole 16 bytes, .* at 0x\w*8$", None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_its_norms_do_not_take(package, name):
    change, message, place = REFUSED[name]
    change = change()
    if place is not None:
        change = dict.fromkeys([place], *change.values())
    given = arguments() | change
    before = given["residual"].clone()
    with pytest.raises(
        NotImplementedError, match=f"^impl: 'flashinfer' is supported with {message}"
    ):
        residual_norm(**given, impl="flashinfer")
    assert given["residual"].equal(before)


HALVES = r"gate and up that are the halves of contiguous rows, got strides"
REFUSED_PRODUCTS = {
    "limit": ({"limit": 7.0}, r"limit=None, got 7.0"),
    "alpha": ({"alpha": 1.702}, r"alpha=1, got 1.702"),
    "up_offset": ({"up_offset": 1.0}, r"up_offset=0, got 1.0"),
    "in turns": ({"gate": rows(5, 48, BF16)[:, 0::2], "up": rows(5, 48, BF16)[:, 1::2]}, HALVES),
    "changed": ({"gate": rows(5, 48, BF16)[:, 24:]}, HALVES),
    "apart": ({"gate": rows(5, 24, BF16), "up": rows(5, 24, BF16)}, HALVES),
    "wide": (dict(zip(("gate", "up"), rows(5, 48, BF16, padding=8).chunk(2, dim=1), strict=True)), HALVES),
    "out": ({"out": rows(5, 24, BF16, padding=8)}, r"a contiguous out, got strides \(32, 1\)"),
    "width": (dict(zip(("gate", "up"), rows(5, 40, BF16).chunk(2, dim=1), strict=True)), "gate in rows of whole 16 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_PRODUCTS)
def test_what_its_products_do_not_take(package, name):
    change, message = REFUSED_PRODUCTS[name]
    gate, up = rows(5, 48, BF16).chunk(2, dim=1)
    given = {"gate": gate, "up": up, "activation": "silu"} | change
    with pytest.raises(
        NotImplementedError, match=f"^impl: 'flashinfer' is supported with {message}"
    ):
        gated_product(**given, impl="flashinfer")


def test_arguments_are_checked_as_ever(package):
    with pytest.raises(ValueError, match=r"^weight: expected .* \[72\]"):
        residual_norm(**arguments() | {"weight": torch.ones(8, dtype=BF16)}, impl="flashinfer")
    gate, up = rows(5, 48, BF16).chunk(2, dim=1)
    with pytest.raises(ValueError, match=r"^activation: expected one of"):
        gated_product(gate, up, activation="relu", impl="flashinfer")


def test_where_it_cannot_run(monkeypatch):
    """Not installed; on a CPU."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(
        NotImplementedError, match=r"where the package flashinfer-python is installed"
    ):
        residual_norm(**arguments(), impl="flashinfer")
    flashinfer_stand_in.install(monkeypatch)
    monkeypatch.setattr("quire.kernels.common.flashinfer.DEVICES", ("cuda",))
    with pytest.raises(NotImplementedError, match=r"x on \['cuda'\], got a tensor on 'cpu'"):
        residual_norm(**arguments(), impl="flashinfer")


def test_under_rocm_it_says_so(package, monkeypatch):
    """Even where a package of that name is there."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    message = r"^impl: 'flashinfer' is supported with NVIDIA GPUs, got a torch for ROCm 7.0$"
    with pytest.raises(NotImplementedError, match=message):
        residual_norm(**arguments(), impl="flashinfer")
    gate, up = rows(5, 48, BF16).chunk(2, dim=1)
    with pytest.raises(NotImplementedError, match=message):
        gated_product(gate, up, activation="silu", impl="flashinfer")
    monkeypatch.setattr(planner, "expect_supported", lambda model, config: None)
    with pytest.raises(NotImplementedError, match=message):
        planner.FlashInfer(None, None)
