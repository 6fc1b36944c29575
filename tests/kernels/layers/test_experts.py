"""expert_mlp, both implementations, against the oracle."""

import dataclasses

import pytest
import torch

from quire.bench.common.bounds import bounded, bounding, rounded
from quire.kernels import expert_mlp
from quire.kernels.layers import experts
from quire.kernels.layers.experts import Tile
from tests.kernels.oracles import experts as reference
from tests.kernels.oracles.gating import gated_product
from tests.support.helpers import DEVICE, NAN, assert_within_budget

BF16 = torch.bfloat16
SILU, GELU = {"activation": "silu"}, {"activation": "gelu_tanh"}
GPT_OSS = {"activation": "silu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    form: of the weights, "plain", "fp8" or "fp4".
    layout: "rows", or "gpt-oss": gate and up rows in turns, and plain matrices transposed.
    to_one: all tokens go to the experts k, k - 1, .. 1.
    tile: of both products; None: that of the call.
    chunk: rows that are sorted together.
    """

    num_tokens: int = 5
    num_experts: int = 4
    k: int = 2
    hidden: int = 40
    width: int = 24
    options: dict = dataclasses.field(default_factory=lambda: SILU)
    dtype: torch.dtype = torch.float32
    form: str = "plain"
    layout: str = "rows"
    bias: bool = False
    to_one: bool = False
    tile: Tile | None = None
    chunk: int = experts.CHUNK


SMALL = Tile(16, 16, 32, 4, 2)
CASES = {
    "small": Case(),
    "one-token": Case(num_tokens=1),
    "no-tokens": Case(num_tokens=0),
    "k-1": Case(k=1),
    "all-experts": Case(num_experts=3, k=3),
    "more-experts-than-rows": Case(3, 70, hidden=16, width=8, chunk=4),
    "sizes-of-no-tile": Case(7, 5, 2, hidden=51, width=19, tile=SMALL),
    "all-to-one-in-chunks": Case(37, 6, 1, to_one=True, tile=SMALL, chunk=8),
    "all-to-two": Case(37, 6, 2, hidden=16, width=8, to_one=True, bias=True),
    "three-tiles-an-expert-in-chunks": Case(20, 2, 2, hidden=16, width=8, bias=True, chunk=2),
    "rows-of-64": Case(70, 2, 1, hidden=16, width=8, tile=Tile(64, 32, 32, 4, 2)),
    "gelu-bf16": Case(options=GELU, dtype=BF16, hidden=136, bias=True),
    "fp16": Case(options=SILU | {"limit": 0.5}, dtype=torch.float16),
    "gpt-oss": Case(options=GPT_OSS, layout="gpt-oss", bias=True),
    "gpt-oss-bf16": Case(options=GPT_OSS, layout="gpt-oss", bias=True, dtype=BF16, hidden=72),
    "fp8": Case(form="fp8", hidden=160, width=136, num_tokens=3),
    "fp8-bf16": Case(form="fp8", dtype=BF16, options=SILU | {"limit": 2.0}, hidden=40, width=130),
    "fp4": Case(form="fp4", hidden=96, width=64),
    "fp4-bf16": Case(form="fp4", hidden=160, width=32, dtype=BF16, bias=True),
    "mxfp4-of-gpt-oss": Case(form="fp4", hidden=64, width=32, dtype=BF16, options=GPT_OSS, layout="gpt-oss", bias=True),
}  # fmt: skip


def make(case, seed=0):
    """Arguments of ``expert_mlp`` for a case."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    def matrices(rows, columns, *lead):
        """A stack, and its scales or None."""
        lead = (case.num_experts, *lead)
        if case.form == "plain":
            return (normal(*lead, rows, columns) * columns**-0.5).to(case.dtype), None
        if case.form == "fp8":
            blocks = (-(-rows // 128), -(-columns // 128))
            values = (normal(*lead, rows, columns) * 100).to(torch.float8_e4m3fn)
            scale = (torch.rand(*lead, *blocks, generator=generator) + 0.5) / 100
            return values, scale / columns**0.5
        values = torch.randint(256, (*lead, rows, columns // 2), generator=generator)
        scale = torch.randint(121, 126, (*lead, rows, columns // 32), generator=generator)
        return values.to(torch.uint8), scale.to(torch.uint8)

    hidden, width, experts = case.hidden, case.width, case.num_experts
    if case.to_one:
        ids = torch.arange(case.k, 0, -1).expand(case.num_tokens, -1).contiguous()
    else:
        ids = torch.rand(case.num_tokens, experts, generator=generator).topk(case.k).indices
    gate_up, gate_up_scale = matrices(width, hidden, 2)
    down, down_scale = matrices(hidden, width)
    call = {
        "x": normal(case.num_tokens, hidden + 8).to(case.dtype)[:, 8:],
        "ids": ids,
        "gate_up": gate_up,
        "down": down,
        "gate_up_scale": gate_up_scale,
        "down_scale": down_scale,
        "gate_up_bias": normal(experts, 2, width).to(case.dtype) if case.bias else None,
        "down_bias": normal(experts, hidden).to(case.dtype) if case.bias else None,
    }
    call = {name: None if value is None else value.to(DEVICE) for name, value in call.items()}
    if case.layout == "gpt-oss":
        for name in ("gate_up", "gate_up_bias", "gate_up_scale"):
            if call[name] is not None:  # the same numbers, gate and up in turns
                call[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)
        if case.form == "plain":
            call["gate_up"] = call["gate_up"].permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
            call["down"] = call["down"].mT.contiguous().mT
    return call | case.options


def exact(call, options, impl="triton"):
    """Rows of a call in float64 with bounds; torch keeps each sum in the dtype of x."""
    dtype, ids = call["x"].dtype, call["ids"].flatten()

    def matrices(name):
        """All of a stack; quantized ones are rounded once they are multiplied by their scales."""
        values, scale = call[name].flatten(0, -3), call[f"{name}_scale"]
        if scale is None:
            return values.double()
        scale = scale.flatten(0, -3)
        return rounded(torch.stack([*map(reference.values, values, scale)]), dtype)

    def kept(sums):
        return rounded(sums, dtype) if impl == "torch" else sums

    def bias(name, *index):
        return None if call[name] is None else call[name][index].double()

    gate_up, down = matrices("gate_up"), matrices("down")
    out = torch.zeros(len(ids), call["x"].shape[1], dtype=torch.float64, device=DEVICE)
    out = bounded(out)
    with bounding():
        for e in ids.unique().tolist():
            rows = (ids == e).nonzero()[:, 0]
            x = call["x"][rows // call["ids"].shape[1]].double().T
            gate = reference.product(gate_up[2 * e], x, bias("gate_up_bias", e, 0), kept)
            up = reference.product(gate_up[2 * e + 1], x, bias("gate_up_bias", e, 1), kept)
            h = rounded(gated_product(gate, up, **options), dtype)
            out[rows] = reference.product(down[e], h, bias("down_bias", e), kept).T
    return out


@pytest.mark.parametrize("name", CASES)
def test_expert_mlp(impl, name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(experts, "CHUNK", case.chunk)
    if case.tile is not None:
        monkeypatch.setattr(experts, "select_tile", lambda *_: case.tile)
    call = make(case)
    out = expert_mlp(**call, impl=impl)
    assert out.shape == (case.num_tokens * case.k, case.hidden) and out.dtype == case.dtype
    if case.num_tokens:
        assert_within_budget("out", out, exact(call, case.options, impl))


@pytest.mark.parametrize("form", ["plain", "fp8", "fp4"])
def test_a_row_depends_on_its_token_and_expert_alone(form, monkeypatch):
    """The same bits again, and beside tokens of NaN; right in another order and beside tokens that
    go elsewhere, where the interpreter's products, but not a device's, may round otherwise."""
    monkeypatch.setattr(experts, "select_tile", lambda *_: SMALL)
    call = make(Case(20, 3, 1, hidden=32, width=32, form=form))
    first, expected = expert_mlp(**call, impl="triton"), exact(call, SILU)
    assert expert_mlp(**call, impl="triton").equal(first)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = call | {"x": call["x"][order], "ids": call["ids"][order]}
    assert_within_budget("moved", expert_mlp(**moved, impl="triton"), expected[order])
    changed = call | {"x": call["x"].clone(), "ids": call["ids"].clone()}
    changed["x"][::2] = NAN
    out = expert_mlp(**changed, impl="triton")
    assert out[1::2].equal(first[1::2]) and out[::2].isnan().all()
    changed["ids"][::2] = 2
    out = expert_mlp(**changed, impl="triton")
    assert_within_budget("elsewhere", out[1::2], expected[1::2])
