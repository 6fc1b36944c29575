"""A decode step of DeepSeek-V4 as a graph needs it: nothing that the host must know, shapes and addresses that stay.

Without a GPU nothing is captured. What a capture forbids is looked for instead: every operation of a step passes by, but for those
within the kernels, whose torch code on a CPU is not what runs on a GPU.
"""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.models import moe, quantized
from quire.models.configs import get_config
from quire.models.deepseek_v4 import paged
from quire.models.quantized import PackedExperts, dequantize_fp8
from quire.models.weights import random_model
from tests.models.test_deepseek_v4_engine import V4Recorder
from tests.models.test_engine import prompt

KERNELS = ("write_latent", "compress", "index_topk", "compressed_attention")
ON_HOST = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")
SHAPES_FROM_VALUES = ("nonzero", "unique", "masked_select", "local_scalar", "equal", "is_nonzero")


class Watch(TorchDispatchMode):
    """Collects operations that wait for the device or whose shapes depend on values, and the shapes of all operations."""

    def __init__(self):
        super().__init__()
        self.found, self.shapes, self.inside = [], [], False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op._schema.name.removeprefix("aten::")
        masks = name.startswith("index") and any(
            i is not None and i.dtype == torch.bool for i in (args[1] if isinstance(args[1], (list, tuple)) else [])
        )  # fmt: skip
        counts = name == "repeat_interleave" and kwargs.get("output_size") is None
        if not self.inside and (masks or counts or any(n in name for n in SHAPES_FROM_VALUES)):
            self.found.append(name)
        out = op(*args, **kwargs)
        if not self.inside and isinstance(out, torch.Tensor):
            self.shapes.append((name, tuple(out.shape)))
        return out


def watched(monkeypatch, work):
    """What a `Watch` saw of a call."""
    watch = Watch()

    def unwatched(original, *args, **kwargs):
        watch.inside, before = True, watch.inside
        try:
            return original(*args, **kwargs)
        finally:
            watch.inside = before

    def on_host(name, original, *args, **kwargs):
        if not watch.inside:
            watch.found.append(name)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        for name in KERNELS:
            patch.setattr(paged, name, partial(unwatched, getattr(paged, name)))
        # On a GPU an operation of its own; on a CPU torch loops over the groups.
        patch.setattr(moe, "grouped_matmul", partial(unwatched, moe.grouped_matmul))
        for name in ON_HOST:
            original = getattr(torch.Tensor, name)
            patch.setattr(
                torch.Tensor, name, lambda *a, n=name, f=original, **k: on_host(n, f, *a, **k)
            )
        with watch:
            work()
    return watch


@pytest.fixture(scope="module")
def model():
    return random_model(get_config("deepseek-v4-tiny"))


def decode_steps(model, monkeypatch):
    """(what `Watch` saw, addresses of the buffers) of every decode step of 3 requests through one graph of 4 rows."""
    run = V4Recorder(model, decode_graphs=True, max_num_seqs=4)
    graphs, seen = run.engine._graphs, []

    def capture(work):
        def replay():
            watch = watched(monkeypatch, work)
            rows, tables = graphs._graphs[4].rows, run.engine._builder.tables
            pool = run.engine.pool
            seen.append((watch, [t.data_ptr() for t in (rows, tables, pool.data, *pool.rings)]))

        return replay

    graphs._capture = capture
    ids = [run.add(prompt(14, seed=n), max_tokens=20) for n in range(3)]
    run.run()
    for request_id in ids:
        run.check(request_id)
    return seen


def test_a_decode_step_has_the_shape_of_a_graph(model, monkeypatch):
    """Also where windows close: entries are written in some steps only, with the same operations."""
    seen = decode_steps(model, monkeypatch)
    assert len(seen) == 19
    first, places = seen[0]
    assert len(first.shapes) > 100
    for watch, where in seen:
        assert watch.found == []
        assert watch.shapes == first.shapes
        assert where == places


@pytest.mark.parametrize("rule", ["a value on the host", "a shape from values"])
def test_what_a_graph_cannot_hold_is_seen(model, monkeypatch, rule):
    original = paged.PagedStep.__call__

    def broken(self, attention, rows):
        out = original(self, attention, rows)
        x = rows.kv
        return out + (0 * x.sum().item() if "host" in rule else 0 * x[x > 0].sum())

    monkeypatch.setattr(paged.PagedStep, "__call__", broken)
    assert all(watch.found for watch, _ in decode_steps(model, monkeypatch))


def test_each_row_by_itself_equals_groups():
    """What replaces a loop over groups while a graph is captured."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, 6, 7, generator=generator)
    for counts in ((3, 0, 20, 1, 0), (0, 0, 0, 0, 40), (1, 1, 1, 1, 1)):
        x = torch.randn(sum(counts), 7, generator=generator)
        offsets = torch.tensor(counts).cumsum(0).int()
        watch = Watch()
        with watch:
            got = moe.row_matmul(x, weights, offsets)
        assert watch.found == []
        groups = torch.arange(5).repeat_interleave(torch.tensor(counts))
        expected = torch.stack([weights[g] @ row for g, row in zip(groups, x, strict=True)])
        assert torch.allclose(got, expected, atol=1e-5)


def test_packed_experts_row_by_row(monkeypatch):
    """fp8 experts while a graph is captured: the same sums, no unique experts looked up."""
    generator = torch.Generator().manual_seed(1)
    experts = PackedExperts("fp8", 6, 32, 48, lambda g, u: g * u, torch.device("cpu"))
    for part in (experts.gate_up_proj, experts.down_proj):
        part.weight.copy_(torch.randn(part.weight.shape, generator=generator).to(part.weight.dtype))
        part.scale.copy_(torch.rand(part.scale.shape, generator=generator))
    x = torch.randn(23, 32, generator=generator)
    ids = torch.randint(6, (23, 2), generator=generator)
    weights = torch.rand(23, 2, generator=generator)
    expected = experts(x, ids, weights)
    gate_up = dequantize_fp8(experts.gate_up_proj.weight, experts.gate_up_proj.scale, x.dtype)
    down = dequantize_fp8(experts.down_proj.weight, experts.down_proj.scale, x.dtype)
    plain = sum(
        weights[:, j, None] * torch.stack([down[e] @ ((gate_up[e, 0] @ v) * (gate_up[e, 1] @ v)) for e, v in zip(ids[:, j], x, strict=True)])
        for j in range(2)
    )  # fmt: skip
    monkeypatch.setattr(quantized, "is_capturing", lambda x: True)
    watch = Watch()
    with watch:
        got = experts(x, ids, weights)
    assert watch.found == []
    for other in (plain, expected):
        assert torch.allclose(got, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())
