"""Every argument of the functions around attention: a bad value is refused by name, and nothing is
written."""

import pytest
import torch

from quire.kernels import (
    collapse_streams,
    combine_experts,
    copy_overlap,
    expand_streams,
    expert_mlp,
    gated_product,
    gather_pages,
    norm_rope,
    residual_norm,
    route_tokens,
    sample_tokens,
    scatter_pages,
)
from tests.kernels.pages.test_page_copy import make_call as copy_of_pages
from tests.support.helpers import DEVICE
from tests.support.kernels.edges import (
    IMPLS,
    cases,
    expect_refusal,
    factors,
    integers,
    numbers,
    refused,
    tensors,
    unsupported,
    values,
    zeros,
)

I64, I32, F64 = torch.int64, torch.int32, torch.float64
U8, E4M3 = torch.uint8, torch.float8_e4m3fn
COLUMNS = ("temperature", "top_k", "top_p", "min_p", "u")


def ids(*shape):
    return zeros(*shape, dtype=I64)


def norm():
    return {
        "x": zeros(3, 16), "weight": zeros(16), "eps": 1e-6, "residual": zeros(3, 16),
        "post_weight": zeros(16), "scalar": zeros(1), "out": zeros(3, 16),
    }  # fmt: skip


NORM = [
    *tensors(norm(), "x", ("weight", "residual", "post_weight", "scalar", "out"), (), ("residual", "out")),
    *refused("x", lambda a: zeros(3, 0), blamed="x: size"),
    *refused("weight", lambda a: zeros(15)),
    *factors("eps", -100, 30),
    *refused("eps", None),
    *numbers("offset"),
    *refused("residual", None, lambda a: zeros(2, 16)),
    *refused("residual", lambda a: dict.fromkeys(("residual", "post_weight", "scalar", "weight", "out"))),
    *refused("scalar", lambda a: zeros(2)),
    *refused("out", lambda a: {"weight": None}),
]  # fmt: skip


def rope():
    return {
        "qkv": zeros(3, 6, 16), "cos": zeros(3, 8), "sin": zeros(3, 8), "num_kv_heads": 2,
        "q_weight": zeros(16), "k_weight": zeros(16), "norm_v": True,
    }  # fmt: skip


ROPE = [
    *tensors(rope(), "qkv", ("q_weight", "k_weight")),
    *refused("qkv", lambda a: zeros(3, 6, 0), blamed="qkv: head_dim"),
    *refused("qkv", lambda a: zeros(3, 6, 17)),
    unsupported("qkv", lambda a: {"qkv": zeros(3, 6, 24), "cos": zeros(3, 12), "sin": zeros(3, 12), "q_weight": None, "k_weight": None}),
    *integers("num_kv_heads", 0, 3),
    *refused("has_v", 1, None, "yes"),
    *refused("k_weight", None, lambda a: {"q_weight": None}),
    *refused("norm_v", 1, None, lambda a: {"num_kv_heads": 0, "k_weight": None}),
    *factors("eps", -100, 30),
    *numbers("offset"),
]  # fmt: skip


def gated():
    return {"gate": zeros(3, 16), "up": zeros(3, 16), "activation": "silu"}


OF_A_GATE = [
    *refused("activation", "relu", None, 3),
    *factors("limit", -30, 30),
    *factors("alpha", -30, 30),
    *refused("alpha", lambda a: {"alpha": 2.0, "activation": "gelu_tanh"}),
    *numbers("up_offset"),
]
GATED = [
    *tensors(gated(), "gate", any_stride=("gate", "up")),
    *refused("up", lambda a: zeros(3, 8)),
    *OF_A_GATE,
]


def experts():
    return {
        "x": zeros(5, 40), "ids": ids(5, 2), "gate_up": zeros(4, 2, 24, 40),
        "down": zeros(4, 40, 24), "activation": "silu", "gate_up_bias": zeros(4, 2, 24),
        "down_bias": zeros(4, 40),
    }  # fmt: skip


def quantized_experts(dtype):
    fp8 = dtype == E4M3
    scales = (zeros(3, 2, 1, 1), zeros(3, 1, 1))
    if not fp8:
        scales = zeros(3, 2, 32, 2, dtype=U8), zeros(3, 64, 1, dtype=U8)
    matrices = (zeros(3, 2, 32, 64 if fp8 else 32), zeros(3, 64, 32 if fp8 else 16))
    return {
        "x": zeros(2, 64), "ids": ids(2, 1), "gate_up": matrices[0].to(dtype),
        "down": matrices[1].to(dtype), "activation": "silu",
        "gate_up_scale": scales[0], "down_scale": scales[1],
    }  # fmt: skip


def far_matrices(a):
    """Matrices of 2**31 elements, without memory."""
    gate_up = torch.empty(2, 2, 2**15, 2**15, device="meta")
    gate_up = gate_up.as_strided((4, 2, 24, 40), (2**31, 960, 40, 1))
    return {k: v.to("meta") for k, v in a.items() if isinstance(v, torch.Tensor)} | {
        "gate_up": gate_up
    }


EXPERTS = [
    *tensors(experts(), "x", ("gate_up_bias", "down_bias"), ("gate_up", "down", "gate_up_bias", "down_bias")),
    *refused("x", lambda a: zeros(5, 0), blamed="x: hidden_size"),
    *refused("ids", lambda a: ids(4, 2)),
    *refused("ids", lambda a: ids(5, 0), blamed="ids: k"),
    *values("ids", lambda a: a["ids"] + 4, lambda a: a["ids"] - 1),
    *refused("gate_up", lambda a: zeros(4, 2, 24, 39)),
    *refused("gate_up", lambda a: zeros(0, 2, 24, 40), blamed="gate_up: num_experts"),
    *refused("gate_up", lambda a: zeros(4, 2, 0, 40), blamed="gate_up: width"),
    *refused("gate_up", lambda a: zeros(4, 2, 24, 20, dtype=U8)),
    *refused("gate_up", lambda a: a["gate_up"].to(E4M3), blamed="gate_up_scale"),
    unsupported("gate_up", far_matrices),
    *refused("down", lambda a: zeros(4, 40, 23)),
    *refused("gate_up_scale", lambda a: zeros(4, 2, 1, 1)),
    *refused("down_scale", lambda a: zeros(4, 1, 1)),
    *refused("gate_up_bias", lambda a: zeros(4, 2, 23)),
    *refused("down_bias", lambda a: zeros(4, 24)),
    *OF_A_GATE,
]  # fmt: skip
QUANTIZED = [
    *refused("gate_up", lambda a: a["gate_up"].transpose(2, 3).contiguous().mT),
    *refused("gate_up_scale", None, lambda a: a["gate_up_scale"].repeat(1, 1, 2, 1)),
    *refused("down_scale", None, lambda a: a["down_scale"].repeat(1, 1, 2)),
]


def collapse():
    return {
        "streams": zeros(3, 2, 16), "fn": zeros(8, 32), "base": zeros(8), "scale": zeros(3),
        "norm_weight": zeros(16),
    }  # fmt: skip


def wide_streams(n, size):
    """Arguments of ``collapse_streams`` before the head."""
    fn = zeros(n, n * size)
    return {"streams": zeros(1, n, size), "fn": fn, "base": fn[:, 0].clone(), "scale": zeros(1), "norm_weight": zeros(size)}  # fmt: skip


COLLAPSE = [
    *tensors(collapse(), "streams"),
    *refused("streams", lambda a: zeros(3, 0, 16), blamed="streams: n"),
    *refused("streams", lambda a: zeros(3, 2, 0), blamed="streams: hidden_size"),
    unsupported("streams", lambda a: wide_streams(9, 16), "streams: n"),
    unsupported("streams", lambda a: wide_streams(1, 20000), "streams: hidden_size"),
    *refused("fn", lambda a: zeros(7, 32)),
    *refused("scale", lambda a: zeros(1)),
    *factors("norm_eps", -100, 30),
    *factors("eps", -100, 30),
    *integers("iterations", 1),
]


def expand():
    return {
        "streams": zeros(3, 2, 16), "y": zeros(3, 16), "post": zeros(3, 2), "comb": zeros(3, 2, 2),
        "rows": zeros(6, 16), "weights": zeros(3, 2),
    }  # fmt: skip


EXPAND = [
    *tensors(expand(), "streams", ("rows", "weights")),
    *refused("post", lambda a: zeros(3, 4)[:, :2]),
    *refused("comb", lambda a: a["comb"].transpose(0, 1)[[0, 0, 0]]),
    *refused("rows", None, lambda a: zeros(5, 16), lambda a: zeros(6, 24)[:, 8:]),
    *refused("weights", None, lambda a: zeros(3, 4)[:, :2]),
    *refused("weights", lambda a: {"weights": zeros(3, 0), "rows": zeros(0, 16)}, blamed="weights: k"),
]  # fmt: skip


def route():
    return {"logits": zeros(3, 8), "top_k": 2, "bias": zeros(8)}


def route_by_table():
    return {"logits": zeros(3, 8), "top_k": 2, "table": ids(9, 2), "token_ids": ids(3)}


def route_by_softmax():
    return {
        "logits": zeros(3, 8), "top_k": 2, "score": "softmax", "logits_factor": 0.5,
        "logits_bias": zeros(8), "expert_scale": zeros(8),
    }  # fmt: skip


def softplus(**more):
    """Change of the score alone, beside one argument of the softmax."""
    return {"score": "sqrt_softplus", "logits_factor": 1.0, "logits_bias": None, "expert_scale": None} | more  # fmt: skip


ROUTE = [
    *tensors(route(), "logits", ("bias",)),
    *refused("logits", lambda a: zeros(3, 0), blamed="logits: num_experts"),
    *integers("top_k", 1, 8),
    *factors("scale", -30, 30),
]
ROUTE_BY_TABLE = [
    *tensors(route_by_table(), "logits"),
    *refused("bias", lambda a: zeros(8)),
    *refused("table", lambda a: a["table"][:, :1]),
    *refused("token_ids", lambda a: a["token_ids"][:2]),
    *values("token_ids", lambda a: a["token_ids"] + 9, lambda a: a["token_ids"] - 1),
    *values("table", lambda a: a["table"] + 8, lambda a: a["table"] - 1),
]
ROUTE_BY_SOFTMAX = [
    *tensors(route_by_softmax(), "logits", ("logits_bias", "expert_scale")),
    *refused("score", "relu", None, 3),
    *factors("logits_factor", -30, 30),
    *refused("logits_factor", lambda a: softplus(logits_factor=0.5)),
    *refused("logits_bias", lambda a: zeros(7), lambda a: softplus(logits_bias=zeros(8))),
    *refused("expert_scale", lambda a: zeros(7), lambda a: softplus(expert_scale=zeros(8))),
    *refused("bias", lambda a: zeros(8)),
    *refused("table", lambda a: ids(9, 2)),
]


def combine():
    return {"rows": zeros(6, 16), "weights": zeros(3, 2), "addend": zeros(3, 16)}


COMBINE = [
    *tensors(combine(), "weights", ("addend",)),
    *refused("weights", lambda a: zeros(3, 0), blamed="weights: k"),
    *refused("rows", lambda a: zeros(5, 16)),
]


def overlap():
    return {
        "kv": zeros(5, 16), "gate": zeros(5, 16), "ape": zeros(4, 16), "state": zeros(3, 8, 2, 16),
        "pages": zeros(6, 4, 2, 8), "from_pages": ids(2), "state_index": torch.arange(2, device=DEVICE),
        "state_rows": torch.arange(8, device=DEVICE).view(2, 4), "tokens": ids(4), "to_pages": ids(4),
    }  # fmt: skip


OVERLAP = [
    *tensors(overlap(), "pages", written=("state", "pages")),
    *refused("state_index", lambda a: a["state_index"][:1]),
    *refused("tokens", lambda a: a["tokens"][:3]),
    *refused("to_pages", lambda a: a["to_pages"][:3]),
    *values("from_pages", lambda a: a["from_pages"] + 6, lambda a: a["from_pages"] - 1),
    *values("state_index", lambda a: a["state_index"] + 3, lambda a: a["state_index"] - 2),
    *values("state_rows", lambda a: a["state_rows"] + 8, lambda a: a["state_rows"] - 1),
    *values("to_pages", lambda a: a["to_pages"] + 6, lambda a: a["to_pages"] - 1),
    *values("tokens", lambda a: {"tokens": a["tokens"] + 5, "to_pages": a["to_pages"] + 1}),
]


def sample():
    return {
        "logits": zeros(3, 16), "temperature": zeros(3), "top_k": zeros(3, dtype=I32),
        "top_p": zeros(3) + 1, "min_p": zeros(3), "u": zeros(3, dtype=F64), "probs": zeros(3, 16),
    }  # fmt: skip


SAMPLE = [
    *tensors(sample(), "logits", ("probs",), (), ("probs",)),
    *refused("logits", lambda a: {"logits": zeros(3, 0), "probs": None}, blamed="logits: vocab_size"),
    unsupported("logits", lambda a: dict.fromkeys((*COLUMNS, "probs")) | {"logits": zeros(1, 2**20 + 1)}),
    *(row for name in COLUMNS for row in refused(name, lambda a: zeros(2))),
    *refused("probs", lambda a: dict.fromkeys(COLUMNS)),
    *(row for name in COLUMNS for row in values(name, lambda a, name=name: a[name] - 2)),
    *values("temperature", lambda a: a["temperature"] + float("nan")),
    *(row for name in ("min_p", "u") for row in values(name, lambda a, name=name: a[name] + 2)),
]  # fmt: skip


# Four pages of 3 * 1168 bytes, of 7; a buffer of 6 rows.
COPY = [
    *refused("pages", None, 3, lambda a: [*a["pages"].tensors]),
    *refused("page_ids", None, 3, lambda a: a["page_ids"].int(), lambda a: a["page_ids"][None]),
    *values("page_ids", lambda a: a["page_ids"] + 7, lambda a: a["page_ids"] - 7),
    *refused("buffer", None, 3, lambda a: a["buffer"].int(), lambda a: zeros(6, 16, dtype=U8)),
    *refused("buffer", lambda a: a["buffer"].to("meta")),
    *refused("buffer", lambda a: zeros(6, 3508, dtype=U8)[:, :3504]),
    *refused("buffer", lambda a: zeros(6, 3520, dtype=U8)[:, 4:3508]),
    *refused("rows", None, 3, lambda a: a["rows"].int(), lambda a: a["rows"][:2]),
    *values("rows", lambda a: a["rows"] + 6, lambda a: a["rows"] - 6),
    *refused("impl", "cuda", 3),
]
GATHER = [*COPY, *refused("buffer", lambda a: a["buffer"][:1].expand(6, -1))]


TABLES = [
    (residual_norm, norm, NORM),
    (norm_rope, rope, ROPE),
    (gated_product, gated, GATED),
    (expert_mlp, experts, EXPERTS),
    (expert_mlp, lambda: quantized_experts(E4M3), QUANTIZED),
    (expert_mlp, lambda: quantized_experts(U8), QUANTIZED),
    (collapse_streams, collapse, COLLAPSE),
    (expand_streams, expand, EXPAND),
    (route_tokens, route, ROUTE),
    (route_tokens, route_by_table, ROUTE_BY_TABLE),
    (route_tokens, route_by_softmax, ROUTE_BY_SOFTMAX),
    (combine_experts, combine, COMBINE),
    (copy_overlap, overlap, OVERLAP),
    (sample_tokens, sample, SAMPLE),
    (gather_pages, copy_of_pages, GATHER),
    (scatter_pages, copy_of_pages, COPY),
]


@cases(*TABLES, right=False)
def test_refused(function, arguments, row, impl):
    expect_refusal(function, row, arguments(), impl)


@pytest.mark.parametrize(("function", "arguments"), [table[:2] for table in TABLES])
@pytest.mark.parametrize("impl", IMPLS)
def test_what_the_rows_change_is_right(function, arguments, impl):
    function(**arguments(), impl=impl)
