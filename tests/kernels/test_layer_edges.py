"""Every argument of the functions around attention: a bad value is refused by name, and nothing is written."""

import pytest
import torch

from quire.kernels import (
    collapse_streams,
    combine_experts,
    copy_overlap,
    expand_streams,
    gated_product,
    norm_rope,
    residual_norm,
    route_tokens,
    sample_tokens,
)
from tests.support.kernels.edges import (
    IMPLS,
    RIGHT,
    expect_all_arguments,
    expect_refusal,
    factors,
    integers,
    no_tensors,
    overlapping,
    refused,
    zeros,
)

F16, I64, I32, F64 = torch.float16, torch.int64, torch.int32, torch.float64


def apart(*names):
    """Rows of tensors whose last dimension has stride 2."""
    return [row for name in names for row in refused(name, _apart(name))]


def _apart(name):
    return lambda a: a[name].repeat_interleave(2, -1)[..., ::2]


def numbers(name):
    """Rows of what is no finite host number."""
    return refused(name, float("nan"), float("inf"), None, True, "1")


IMPL = refused("impl", "cuda", 3)

NORM = [
    *no_tensors("x", F64, first=True),
    *apart("x", "weight", "residual", "post_weight", "out"),
    *refused("x", lambda a: zeros(3, 0), blamed="x: size"),
    *no_tensors("weight", F64),
    *refused("weight", lambda a: zeros(15)),
    *factors("eps", -100, 30),
    *refused("eps", None),
    *numbers("offset"),
    *no_tensors("residual", F16),
    *overlapping("residual"),
    *refused("residual", None, lambda a: zeros(2, 16)),
    *refused("residual", lambda a: dict.fromkeys(("residual", "post_weight", "scalar", "weight", "out"))),
    *no_tensors("post_weight", F64),
    *no_tensors("scalar", F64),
    *refused("scalar", lambda a: zeros(2)),
    *no_tensors("out", F16),
    *overlapping("out"),
    *refused("out", lambda a: {"weight": None}),
    *IMPL,
]  # fmt: skip


def norm_arguments():
    return {
        "x": zeros(3, 16), "weight": zeros(16), "eps": 1e-6, "residual": zeros(3, 16), "post_weight": zeros(16),
        "scalar": zeros(1), "out": zeros(3, 16),
    }  # fmt: skip


ROPE = [
    *no_tensors("qkv", F64, first=True),
    *apart("qkv", "cos", "sin", "q_weight", "k_weight", "out"),
    *refused("qkv", lambda a: {"qkv": zeros(3, 6, 0)}, blamed="qkv: head_dim"),
    *refused("qkv", lambda a: {"qkv": zeros(3, 6, 17)}),
    *no_tensors("cos", F16, optional=False),
    *no_tensors("sin", F16, optional=False),
    *integers("num_kv_heads", 0, 3),
    *refused("has_v", 1, None, "yes"),
    *no_tensors("q_weight", F64),
    *no_tensors("k_weight", F64),
    *refused("k_weight", None, lambda a: {"q_weight": None}),
    *refused("norm_v", 1, None, lambda a: {"num_kv_heads": 0, "k_weight": None, "out": None}),
    *factors("eps", -100, 30),
    *numbers("offset"),
    *no_tensors("out", F16),
    *overlapping("out"),
    *refused("out", lambda a: zeros(3, 5, 16)),
    *IMPL,
]


def rope_arguments():
    return {
        "qkv": zeros(3, 6, 16), "cos": zeros(3, 8), "sin": zeros(3, 8), "num_kv_heads": 2, "q_weight": zeros(16),
        "k_weight": zeros(16), "norm_v": True, "out": zeros(3, 6, 16),
    }  # fmt: skip


GATED = [
    *no_tensors("gate", F64, first=True),
    *no_tensors("up", F16, optional=False),
    *refused("up", lambda a: zeros(3, 8)),
    *refused("activation", "relu", None, 3),
    *factors("limit", -30, 30),
    *factors("alpha", -30, 30),
    *refused("alpha", lambda a: {"alpha": 2.0, "activation": "gelu_tanh"}),
    *numbers("up_offset"),
    *no_tensors("out", F16),
    *overlapping("out"),
    *apart("out"),
    *IMPL,
]


def gated_arguments():
    return {"gate": zeros(3, 16), "up": zeros(3, 16), "activation": "silu", "out": zeros(3, 16)}


COLLAPSE = [
    *no_tensors("streams", F64, first=True),
    *apart("streams", "fn", "base", "scale", "norm_weight"),
    *refused("streams", lambda a: zeros(3, 0, 16), blamed="streams: n"),
    *refused("streams", lambda a: zeros(3, 2, 0), blamed="streams: hidden_size"),
    *no_tensors("fn", F16, optional=False),
    *refused("fn", lambda a: zeros(7, 32)),
    *no_tensors("base", F16, optional=False),
    *no_tensors("scale", F16, optional=False),
    *refused("scale", lambda a: zeros(1)),
    *no_tensors("norm_weight", F64),
    *factors("norm_eps", -100, 30),
    *factors("eps", -100, 30),
    *integers("iterations", 1),
    *IMPL,
]


def collapse_arguments():
    return {
        "streams": zeros(3, 2, 16), "fn": zeros(8, 32), "base": zeros(8), "scale": zeros(3), "norm_weight": zeros(16),
    }  # fmt: skip


EXPAND = [
    *no_tensors("streams", F64, first=True),
    *apart("streams", "y", "post", "comb", "rows", "weights"),
    *no_tensors("y", F16, optional=False),
    *no_tensors("post", F16, optional=False),
    *refused("post", lambda a: zeros(3, 4)[:, :2]),
    *no_tensors("comb", F16, optional=False),
    *refused("comb", lambda a: a["comb"].transpose(0, 1)[[0, 0, 0]]),
    *no_tensors("rows", F16),
    *refused("rows", None, lambda a: zeros(5, 16), lambda a: zeros(6, 24)[:, 8:]),
    *no_tensors("weights", F16),
    *refused("weights", None, lambda a: zeros(3, 4)[:, :2]),
    *refused(
        "weights", lambda a: {"weights": zeros(3, 0), "rows": zeros(0, 16)}, blamed="weights: k"
    ),
    *IMPL,
]


def expand_arguments():
    return {
        "streams": zeros(3, 2, 16), "y": zeros(3, 16), "post": zeros(3, 2), "comb": zeros(3, 2, 2),
        "rows": zeros(6, 16), "weights": zeros(3, 2),
    }  # fmt: skip


ROUTE = [
    *no_tensors("logits", F16, first=True),
    *apart("logits", "bias"),
    *refused("logits", lambda a: zeros(3, 0), blamed="logits: num_experts"),
    *integers("top_k", 1, 8),
    *factors("scale", -30, 30),
    *no_tensors("bias", F16),
    *IMPL,
]
ROUTE_BY_TABLE = [
    *refused("bias", lambda a: zeros(8)),
    *no_tensors("table", I32),
    *refused("table", None, lambda a: a["table"][:, :1]),
    *no_tensors("token_ids", I32),
    *refused("token_ids", None, lambda a: a["token_ids"][:2]),
    *apart("table", "token_ids"),
]


ROUTE_BY_SOFTMAX = [
    *refused("score", "relu", None, 3),
    *factors("logits_factor", -30, 30),
    *refused("logits_factor", lambda a: {"score": "sqrt_softplus", "logits_bias": None, "expert_scale": None}),
    *no_tensors("logits_bias", F64),
    *refused("logits_bias", lambda a: zeros(7), lambda a: {"score": "sqrt_softplus", "logits_factor": 1.0, "expert_scale": None}),
    *no_tensors("expert_scale", F64),
    *refused("expert_scale", lambda a: zeros(7), lambda a: {"score": "sqrt_softplus", "logits_factor": 1.0, "logits_bias": None}),
    *apart("logits_bias", "expert_scale"),
    *refused("bias", lambda a: zeros(8)),
    *refused("table", lambda a: zeros(9, 2, dtype=I64)),
]  # fmt: skip


def softmax_arguments():
    more = {"score": "softmax", "logits_factor": 0.5, "logits_bias": zeros(8), "expert_scale": zeros(8)}  # fmt: skip
    return {"logits": zeros(3, 8), "top_k": 2} | more


def route_arguments():
    return {"logits": zeros(3, 8), "top_k": 2, "bias": zeros(8)}


def table_arguments():
    rows = {"table": zeros(9, 2, dtype=I64), "token_ids": zeros(3, dtype=I64)}
    return {"logits": zeros(3, 8), "top_k": 2} | rows


COMBINE = [
    *no_tensors("weights", F64, first=True),
    *refused("weights", lambda a: zeros(3, 0), blamed="weights: k"),
    *apart("rows", "weights", "addend"),
    *no_tensors("rows", F64, optional=False),
    *refused("rows", lambda a: zeros(5, 16)),
    *no_tensors("addend", F16),
    *IMPL,
]


def combine_arguments():
    return {"rows": zeros(6, 16), "weights": zeros(3, 2), "addend": zeros(3, 16)}


OVERLAP = [
    *no_tensors("kv", F16, optional=False),
    *no_tensors("gate", F16, optional=False),
    *no_tensors("ape", F16, optional=False),
    *no_tensors("state", F16, optional=False),
    *overlapping("state"),
    *no_tensors("pages", F16, first=True),
    *overlapping("pages"),
    *(
        row
        for name in ("from_pages", "state_index", "state_rows", "tokens", "to_pages")
        for row in no_tensors(name, I32, optional=False)
    ),
    *refused("state_index", lambda a: a["state_index"][:1]),
    *refused("tokens", lambda a: a["tokens"][:3]),
    *refused("to_pages", lambda a: a["to_pages"][:3]),
    *apart("kv", "gate", "ape", "state", "pages", "from_pages", "state_index", "state_rows", "tokens", "to_pages"),
    *IMPL,
]  # fmt: skip


def overlap_arguments():
    def ids(*shape):
        return zeros(*shape, dtype=I64)

    return {
        "kv": zeros(5, 16), "gate": zeros(5, 16), "ape": zeros(4, 16), "state": zeros(3, 8, 2, 16), "pages": zeros(6, 4, 2, 8),
        "from_pages": ids(2), "state_index": ids(2), "state_rows": ids(2, 4), "tokens": ids(4), "to_pages": ids(4),
    }  # fmt: skip


SAMPLE = [
    *no_tensors("logits", F64, first=True),
    *refused("logits", lambda a: {"logits": zeros(3, 0), "probs": None}, blamed="logits: vocab_size"),
    *apart("logits", "temperature", "top_k", "top_p", "min_p", "u", "probs"),
    *(
        row
        for name in ("temperature", "top_k", "top_p", "min_p", "u")
        for row in [*no_tensors(name, F16, optional=False), *refused(name, lambda a: zeros(2))]
    ),
    *no_tensors("probs", F16),
    *overlapping("probs"),
    *refused("probs", lambda a: dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "u"))),
    *IMPL,
]  # fmt: skip


def sample_arguments():
    return {
        "logits": zeros(3, 16), "temperature": zeros(3), "top_k": zeros(3, dtype=I32), "top_p": zeros(3) + 1,
        "min_p": zeros(3), "u": zeros(3, dtype=F64), "probs": zeros(3, 16),
    }  # fmt: skip


TABLES = [
    (residual_norm, norm_arguments, NORM),
    (norm_rope, rope_arguments, ROPE),
    (gated_product, gated_arguments, GATED),
    (collapse_streams, collapse_arguments, COLLAPSE),
    (expand_streams, expand_arguments, EXPAND),
    (route_tokens, route_arguments, ROUTE),
    (route_tokens, table_arguments, ROUTE_BY_TABLE),
    (route_tokens, softmax_arguments, ROUTE_BY_SOFTMAX),
    (combine_experts, combine_arguments, COMBINE),
    (copy_overlap, overlap_arguments, OVERLAP),
    (sample_tokens, sample_arguments, SAMPLE),
]
REFUSED = [
    pytest.param(function, arguments, row, impl, id=f"{function.__name__}-{row}-{impl}")
    for function, arguments, rows in TABLES
    for row in rows
    for impl in IMPLS
    if row.outcome is not RIGHT
]


@pytest.mark.parametrize(("function", "arguments", "row", "impl"), REFUSED)
def test_refused(function, arguments, row, impl):
    expect_refusal(function, row, arguments(), impl)


@pytest.mark.parametrize(("function", "arguments"), [table[:2] for table in TABLES])
@pytest.mark.parametrize("impl", IMPLS)
def test_what_the_rows_change_is_right(function, arguments, impl):
    function(**arguments(), impl=impl)


@pytest.mark.parametrize("function", dict.fromkeys(function for function, _, _ in TABLES))
def test_every_argument_has_a_row(function):
    rows = [row for other, _, rows in TABLES if other is function for row in rows]
    expect_all_arguments(function, rows)
