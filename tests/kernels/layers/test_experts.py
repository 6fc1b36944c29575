"""expert_mlp, both implementations, against the oracle."""

import pytest
import torch

from quire.bench.common.bounds import bounded, bounding, rounded
from quire.kernels import expert_mlp
from quire.kernels.layers import experts
from quire.kernels.layers.experts import Tile
from tests.kernels.oracles import experts as reference
from tests.kernels.oracles.gating import gated_product
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing, wider

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SILU, GELU = {"activation": "silu"}, {"activation": "gelu_tanh"}
GPT_OSS = {"activation": "silu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
SMALL = Tile(16, 16, 32, 4, 2)
# Arguments of `make`; tile: of both products; chunk: rows that are sorted together.
CASES = {
    "small": dict(),
    "one-token": dict(num_tokens=1),
    "no-tokens": dict(num_tokens=0),
    "k-1": dict(k=1),
    "all-experts": dict(num_experts=3, k=3),
    "more-experts-than-rows": dict(num_tokens=3, num_experts=70, hidden=16, width=8, chunk=4),
    "sizes-of-no-tile": dict(num_tokens=7, num_experts=5, hidden=51, width=19, tile=SMALL),
    "all-to-one-in-chunks": dict(num_tokens=37, num_experts=6, k=1, to_one=True, tile=SMALL, chunk=8),
    "all-to-two": dict(num_tokens=37, num_experts=6, hidden=16, width=8, to_one=True, bias=True),
    "three-tiles-an-expert-in-chunks": dict(num_tokens=20, num_experts=2, hidden=16, width=8, bias=True, chunk=2),
    "rows-of-64": dict(num_tokens=70, num_experts=2, k=1, hidden=16, width=8, tile=Tile(64, 32, 32, 4, 2)),
    "gelu-bf16": dict(options=GELU, dtype=BF16, hidden=136, bias=True),
    "fp16": dict(options=SILU | {"limit": 0.5}, dtype=FP16),
    "gpt-oss": dict(options=GPT_OSS, turns=True, bias=True),
    "gpt-oss-bf16": dict(options=GPT_OSS, turns=True, bias=True, dtype=BF16, hidden=128, width=128),
    "fp8": dict(form="fp8", hidden=160, width=136, num_tokens=3),
    "fp8-bf16": dict(form="fp8", dtype=BF16, options=SILU | {"limit": 2.0}, width=130),
    "fp4": dict(form="fp4", hidden=96, width=64),
    "fp4-bf16": dict(form="fp4", hidden=160, width=32, dtype=BF16, bias=True),
    "mxfp4-of-gpt-oss": dict(form="fp4", hidden=64, width=32, dtype=BF16, options=GPT_OSS, turns=True, bias=True),
}  # fmt: skip


def make(
    num_tokens=5, num_experts=4, k=2, hidden=40, width=24, options=SILU, dtype=FP32, form="plain",
    turns=False, bias=False, to_one=False,
):  # fmt: skip
    """Arguments of a call.

    form: of the weights, "plain", "fp8" or "fp4". turns: as gpt-oss has them, gate and up rows in
    turns and plain matrices transposed. to_one: all tokens go to the experts k, k - 1, .. 1.
    """
    generator, normal = drawing(0)

    def integers(low, high, *shape):
        numbers = torch.randint(low, high, shape, generator=generator)
        return numbers.to(DEVICE, torch.uint8)

    def matrices(rows, columns, *lead):
        """A stack, and its scales or None."""
        lead = (num_experts, *lead)
        if form == "plain":
            return (normal(*lead, rows, columns) * columns**-0.5).to(dtype), None
        if form == "fp8":
            values = (normal(*lead, rows, columns) * 100).to(torch.float8_e4m3fn)
            scale = integers(128, 256, *lead, -(-rows // 128), -(-columns // 128))
            return values, scale / 25600 / columns**0.5
        values = integers(0, 256, *lead, rows, columns // 2)
        return values, integers(121, 126, *lead, rows, columns // 32)

    ids = torch.rand(num_tokens, num_experts, generator=generator).topk(k).indices
    if to_one:
        ids = torch.arange(k, 0, -1).expand(num_tokens, -1).contiguous()
    gate_up, gate_up_scale = matrices(width, hidden, 2)
    down, down_scale = matrices(hidden, width)
    call = {
        "x": wider(normal(num_tokens, hidden).to(dtype), before=8), "ids": ids.to(DEVICE),
        "gate_up": gate_up, "down": down, "gate_up_scale": gate_up_scale, "down_scale": down_scale,
        "gate_up_bias": normal(num_experts, 2, width).to(dtype) if bias else None,
        "down_bias": normal(num_experts, hidden).to(dtype) if bias else None,
    }  # fmt: skip
    for name in ("gate_up", "gate_up_bias", "gate_up_scale") if turns else ():
        if call[name] is not None:
            call[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)
    if turns and form == "plain":
        call["gate_up"] = call["gate_up"].permute(0, 3, 2, 1).contiguous().permute(0, 3, 2, 1)
        call["down"] = call["down"].mT.contiguous().mT
    return call | options


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
    out = bounded(call["x"].new_zeros(len(ids), call["x"].shape[1], dtype=torch.float64))
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
    case = {"tile": None, "chunk": experts.CHUNK} | CASES[name]
    tile, chunk = case.pop("tile"), case.pop("chunk")
    monkeypatch.setattr(experts, "CHUNK", chunk)
    if tile is not None:
        monkeypatch.setattr(experts, "select_tile", lambda *_: tile)
    call = make(**case)
    (num_tokens, hidden), k = call["x"].shape, call["ids"].shape[1]
    out = expert_mlp(**call, impl=impl)
    assert out.shape == (num_tokens * k, hidden) and out.dtype == call["x"].dtype
    assert_within_budget("out", out, exact(call, case.get("options", SILU), impl))


@pytest.mark.parametrize("form", ["plain", "fp8", "fp4"])
def test_a_row_depends_on_its_token_and_expert_alone(form, monkeypatch):
    """The same bits again, and beside tokens of NaN; right in another order and beside tokens that
    go elsewhere, where the interpreter's products, but not a device's, may round otherwise."""
    monkeypatch.setattr(experts, "select_tile", lambda *_: SMALL)
    call = make(20, 3, 1, hidden=32, width=32, form=form)
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
