"""expert_mlp, both implementations, against the oracle."""

import dataclasses
import math

import pytest
import torch

from quire.bench.common.bounds import bounded, bounding, rounded
from quire.kernels import expert_mlp
from quire.kernels.common import launching
from quire.kernels.common.arch import named
from quire.kernels.layers import experts
from quire.kernels.layers.experts import Tile
from tests.kernels.oracles import experts as reference
from tests.kernels.oracles.gating import gated_product
from tests.support.helpers import DEVICE, NAN, assert_within_budget

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
BF16 = torch.bfloat16
SILU, GELU = {"activation": "silu"}, {"activation": "gelu_tanh"}
GPT_OSS = {"activation": "silu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    form: of the weights, "plain", "fp8" or "fp4"; layout: "rows", or "gpt-oss": gate and up rows in turns, and plain matrices transposed.
    to_one: all tokens go to the experts k, k - 1, .. 1. tile: of both products; None: that of the call.
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


SMALL = Tile(16, 16, 32, 4, 2)
CASES = {
    "small": Case(),
    "one-token": Case(num_tokens=1),
    "no-tokens": Case(num_tokens=0),
    "k-1": Case(k=1),
    "all-experts": Case(num_experts=3, k=3),
    "more-experts-than-rows": Case(3, 70, hidden=16, width=8),
    "sizes-of-no-tile": Case(7, 5, 2, hidden=51, width=19, tile=SMALL),
    "all-to-one": Case(37, 6, 1, to_one=True, tile=SMALL),
    "all-to-two": Case(37, 6, 2, hidden=16, width=8, to_one=True, bias=True),
    "tiles-by-number": Case(20, 2, 2, hidden=16, width=8, bias=True),
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
            return values, (torch.rand(*lead, *blocks, generator=generator) + 0.5) / 100 / columns**0.5  # fmt: skip
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
    """Rows of a call in float64, with bounds, expert by expert. torch keeps each sum in the dtype of x."""
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


@IMPLS
@pytest.mark.parametrize("name", CASES)
def test_expert_mlp(impl, name, monkeypatch):
    case = CASES[name]
    if case.tile is not None:
        monkeypatch.setattr(experts, "select_tile", lambda *_: case.tile)
    call = make(case)
    out = expert_mlp(**call, impl=impl)
    assert out.shape == (case.num_tokens * case.k, case.hidden) and out.dtype == case.dtype
    if case.num_tokens:
        assert_within_budget("out", out, exact(call, case.options, impl))


@pytest.mark.parametrize(
    ("ids", "num_experts", "block_m"),
    [
        ([[2, 0], [2, 1], [0, 2], [2, 3]], 4, 2),
        ([[1]] * 9, 3, 4),
        ([[e] for e in range(9) for _ in range(3)], 9, 2),
        ([[4]], 6, 16),
        ([[5]] * 40, 6, 16),
    ],
)
@pytest.mark.parametrize("chunk", [4, 8, experts.CHUNK])
def test_order(ids, num_experts, block_m, chunk, monkeypatch):
    """Each row is in one tile, of its expert, after those of earlier tokens; no tile is listed twice."""
    monkeypatch.setattr(experts, "CHUNK", chunk)
    monkeypatch.setattr(experts, "select_tile", lambda *_: Tile(block_m, 16, 32, 4, 2))  # fmt: skip
    ids = torch.tensor(ids, device=DEVICE)
    flat, num_rows = ids.flatten(), ids.numel()
    weights = torch.zeros(num_experts, 2, 8, 8, device=DEVICE)
    found = {}
    launch = launching.launch

    def keep(kernel, grid, **named):
        if kernel is experts._order_kernel:  # no product has tiles of so few rows
            found.update(named)
            launch(kernel, grid, **named)

    monkeypatch.setattr(launching, "launch", keep)
    expert_mlp(torch.zeros(len(ids), 8, device=DEVICE), ids, weights, weights[:, 0], activation="silu", impl="triton")  # fmt: skip
    written = found["order"]
    order, tiles = written[:num_rows].long(), written[num_rows:].view(-1, 3)
    assert order.equal(flat.sort(stable=True).indices)
    tiles = [tile for tile in tiles.tolist() if tile[2]]
    assert all(0 < rows <= block_m for *_, rows in tiles)
    covered = [start + i for _, start, rows in tiles for i in range(rows)]
    assert sorted(covered) == list(range(num_rows)) and len(tiles) == sum(
        math.ceil(count / block_m) for count in flat.bincount().tolist()
    )
    for expert, start, rows in tiles:
        assert (flat[order[start : start + rows]] == expert).all()


@pytest.mark.parametrize("form", ["plain", "fp8", "fp4"])
def test_a_row_depends_on_its_token_and_expert_alone(form, monkeypatch):
    """The same bits again, and beside tokens of NaN; right in another order and beside tokens that go elsewhere, where the interpreter's
    products, but not a device's, may round otherwise."""
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


def test_three_launches_and_no_value_read(monkeypatch):
    """On tensors without values."""
    launches = []
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, **named: launches.append(grid))
    call = make(CASES["mxfp4-of-gpt-oss"])
    call = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    monkeypatch.setattr(launching, "arch_and_sms", lambda tensor: (named("sm_90"), 2))
    assert expert_mlp(**call, impl="triton").is_meta
    assert len(launches) == 3


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


U8, E4M3 = torch.uint8, torch.float8_e4m3fn
REFUSED = [
    ({"x": zeros(5, 40, dtype=torch.float64)}, "x: expected .*, got float64"),
    ({"x": zeros(40, 5).T}, "x: expected stride 1 in the last dimension"),
    ({"ids": zeros(4, 2, dtype=torch.int64)}, r"ids: expected int64 \[5, \*\], got int64 \[4, 2\]"),
    ({"ids": zeros(5, 2, dtype=torch.int32)}, r"ids: expected int64 .*, got int32"),
    ({"ids": zeros(5, 0, dtype=torch.int64)}, "ids: k: expected an int >= 1, got 0"),
    ({"gate_up": zeros(4, 48, 40)}, r"gate_up: expected .* \[\*, 2, \*, \*\], got float32 \[4, 48, 40\]"),
    ({"gate_up": zeros(4, 2, 24, 39)}, r"gate_up: expected float32 \[4, 2, 24, 40\], got float32"),
    ({"gate_up": zeros(4, 2, 24, 40, dtype=BF16)}, "gate_up: expected .*, got bfloat16"),
    ({"gate_up": zeros(0, 2, 24, 40)}, "gate_up: num_experts: expected an int >= 1, got 0"),
    ({"down": zeros(4, 40, 23)}, r"down: expected float32 \[4, 40, 24\], got float32 \[4, 40, 23\]"),
    ({"down": zeros(4, 40, 24, dtype=BF16)}, "down: expected float32 .*, got bfloat16"),
    ({"gate_up_scale": zeros(4, 2, 1, 1)}, "gate_up_scale: expected None with plain weights, got a tensor"),
    ({"down_scale": zeros(4, 1, 1)}, "down_scale: expected None with plain weights, got a tensor"),
    ({"gate_up": zeros(4, 2, 24, 20, dtype=U8)}, "gate_up: expected rows of a multiple of 32 values in uint8, got 40"),
    ({"gate_up": zeros(4, 2, 24, 40, dtype=E4M3)}, r"gate_up_scale: expected float32 \[4, 2, 1, 1\], got NoneType"),
    ({"gate_up_bias": zeros(4, 48)}, r"gate_up_bias: expected .* \[4, 2, 24\], got float32 \[4, 48\]"),
    ({"down_bias": zeros(4, 24)}, r"down_bias: expected .* \[4, 40\], got float32 \[4, 24\]"),
    ({"activation": "relu"}, "activation: expected one of .*, got 'relu'"),
    ({"limit": -1.0}, "limit: expected a finite number > 0, got -1.0"),
    ({"alpha": 0.0}, "alpha: expected a finite number > 0, got 0.0"),
    ({"up_offset": NAN}, "up_offset: expected a finite number, got nan"),
    ({"impl": "cuda"}, "impl: expected 'triton', 'torch' or None, got 'cuda'"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED, ids=[m[:50] for _, m in REFUSED])
def test_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        expert_mlp(**make(CASES["small"]) | changes)


def test_scales_have_the_shape_of_their_weights():
    for name, changes in (
        ("fp8", {"down_scale": zeros(4, 1, 1)}),
        ("fp4", {"gate_up_scale": zeros(4, 2, 64, 2, dtype=U8)}),
        ("fp4", {"down_scale": zeros(4, 96, 2)}),
        ("fp8", {"gate_up": make(CASES["fp8"])["gate_up"].transpose(2, 3).contiguous().mT}),
    ):
        with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
            expert_mlp(**make(CASES[name]) | changes)


def test_matrices_of_32_bits():
    wide = torch.empty(2, 2, 2**15, 2**15, device="meta").as_strided((2, 2, 24, 40), (2**31, 960, 40, 1))  # fmt: skip
    call = make(Case(num_experts=2, k=1)) | {"gate_up": wide}
    call = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    with pytest.raises(NotImplementedError, match=r"^gate_up: matrices of < 2\*\*31 elements"):
        expert_mlp(**call, impl="triton")
