"""Compiled products, copies of tensor descriptors and mbarriers: right, and changed in one place.

They run in a process of their own, since tests here import Triton with its interpreter.
"""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mbarrier
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.support.forked import printed


@triton.jit
def total(x, out, ROWS: tl.constexpr):
    i = tl.program_id(0) * ROWS
    tl.store(out + i + tl.arange(0, ROWS), tl.sum(x.load([i, 0]), 1))


@triton.jit
def double(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    for column in range(0, columns, COLUMNS):
        target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def move(x, out):
    out.store([1, 0, -1, 0, 0], x.load([1, 0, -1, 0, 0]))


@triton.jit
def dot(a, b, out, K: tl.constexpr):
    i = tl.program_id(0) * 64 + tl.arange(0, 64)[:, None]
    j, k = tl.arange(0, 32)[None], tl.arange(0, K)
    out += i * 32 + j
    tl.store(
        out, tl.dot(tl.load(a + i * K + k[None]), tl.load(b + k[:, None] * 32 + j), tl.load(out))
    )


@triton.jit
def matmul(a, b, out, K, BLOCK_K: tl.constexpr):
    acc = tl.zeros((64, 64), tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = tl.dot(a.load([0, k]), b.load([k, 0]), acc)
    out.store([0, 0], acc.to(tl.float16))


@gluon.jit
def write(memory, ready, x):
    memory.store(gl.load(x + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))))
    mbarrier.arrive(ready)


@gluon.jit
def read(memory, ready, out):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(ready, 0)
    gl.store(out + gl.arange(0, 128, layout), memory.load(layout))


@gluon.jit
def hand_over(x, out, SPECIALIZE: gl.constexpr):
    memory = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    if SPECIALIZE:
        gl.warp_specialize([(read, (memory, ready, out)), (write, (memory, ready, x))], [4], [24])
    else:
        write(memory, ready, x)
        read(memory, ready, out)


@triton.autotune(
    [triton.Config({"BLOCK": size}) for size in (16, 32, 64)],
    key=["n"],
    prune_configs_by={"early_config_prune": lambda configs, arguments, **_: configs[1:]},
)
@triton.jit
def tuned(out, n, BLOCK: tl.constexpr):
    tl.store(out, BLOCK)


def run_total(rows=40, padding="zero"):
    x, out = torch.randint(-9, 9, (40, 64)).float(), torch.empty(64)
    strides = [64, 1]
    total[2,](TensorDescriptor(x, [rows, 64], strides, [32, 64], padding), out, ROWS=32)
    fill = 0.0 if padding == "zero" else float("nan")
    assert torch.equal(
        out.nan_to_num(7), torch.cat([x.sum(1), torch.full((24,), fill)]).nan_to_num(7)
    )


def run_double():
    x, out = torch.randn(40, 36), torch.zeros(40, 36)
    double[2,](x, out, 40, 36, ROWS=32, COLUMNS=32)
    assert torch.equal(out, 2 * x)


def run_move():
    x = torch.randint(0, 99, (3, 2, 2, 4, 16), dtype=torch.int8)
    out = torch.zeros_like(x)
    move[1,](*(TensorDescriptor.from_tensor(t, [2, 2, 2, 4, 16]) for t in (x, out)))
    assert torch.equal(out[1:, :, :1], x[1:, :, :1]) and not out[0].any() and not out[:, :, 1].any()


def run_dot(dtype=torch.float16, depth=32):
    a, b = (torch.randint(-4, 5, shape).to(dtype) for shape in ((128, depth), (depth, 32)))
    out = torch.randint(-99, 99, (128, 32)).float()
    expected = a.float() @ b.float() + out
    dot[2,](a, b, out, K=depth)
    assert torch.equal(out, expected)


def run_matmul(depth=64):
    a, b = (torch.randint(-4, 5, shape).half() for shape in ((64, 80), (80, 64)))
    out = torch.empty(64, 64, dtype=torch.float16)
    shapes = (a, [64, depth]), (b, [depth, 64]), (out, [64, 64])
    matmul[1,](*(TensorDescriptor.from_tensor(t, s) for t, s in shapes), 80, BLOCK_K=depth)
    assert torch.equal(out, (a.float() @ b.float()).half())


def run_hand_over(specialize):
    x, out = torch.randn(128), torch.zeros(128)
    hand_over[1,](x, out, specialize)
    assert torch.equal(out, x)


def run_tuned():
    out = torch.zeros(1, dtype=torch.int32)
    tuned[1,](out, 7)
    assert out.item() == 32 and not tuned.cache


CASES = {  # name: (architecture, what runs, the error or "")
    **{f"dot {dtype} {arch}": (arch, partial(run_dot, dtype), "")
       for dtype in (torch.float16, torch.bfloat16, torch.float32) for arch in ("sm_80", "sm_90")},
    "sum": ("sm_90", run_total, ""),
    "sum without tensor maps": ("sm_80", run_total, ""),
    "NaN outside": ("sm_90", partial(run_total, padding="nan"), ""),
    "a box outside": ("sm_90", partial(run_total, rows=41), "in no tensor"),
    "own descriptors": ("sm_90", run_double, ""),
    "five dimensions": ("sm_90", run_move, ""),
    "first configuration": ("sm_80", run_tuned, ""),
    "hand over": ("sm_80", partial(run_hand_over, False), ""),  # mbarrier.test_wait
    "warp specialization": ("sm_90", partial(run_hand_over, True), ""),  # setmaxnreg
    **{f"boxes of {2 * k} bytes": ("sm_90", partial(run_matmul, k), "") for k in (16, 32, 64)},
}  # fmt: skip
DOT, BOXES = "dot torch.float16 sm_90", "boxes of 128 bytes"
UNTIL, AT_ONCE = "mbarrier.try_wait.parity", "setp.eq.u32 complete, 0, 0; //"
NOTHING = "membar.cta; //"
STORED, GOING = r"bulk\.wait_group(\.read)? \t0;", "bulk.commit_group;"
TO_FLAG = r"(?s)wgmma\.fence(.*?%rd\d+), %p\d+,"  # of the next product: whether it accumulates
CHANGED = {  # name: (case, a pattern of what is replaced in its PTX, by what, the error)
    "registers not fenced": (DOT, r"wgmma\.fence", NOTHING, "accumulates in registers"),
    "registers overwritten": (DOT, TO_FLAG, NOTHING + r"\1, 0,", "accumulates in registers"),
    "memory not fenced": (DOT, "fence.proxy", NOTHING, "fence.proxy"),
    "wgmma not waited for": (DOT, "wgmma.wait_group", NOTHING, "under way reads"),
    "load not waited for": (BOXES, UNTIL, AT_ONCE, "a copy is on its way"),
    "an end before the wait": ("sum", UNTIL, AT_ONCE, "not waited for"),
    "arrival not waited for": ("warp specialization", UNTIL, AT_ONCE, "never written"),
    "no arrival": ("hand over", "mbarrier.arrive", NOTHING, "deadlock"),
    "few bytes announced": ("sum", r"\], 8192;", "], 4096;", "not waited for"),
    "many bytes announced": ("sum", r"\], 8192;", "], 9216;", "deadlock"),
    "too many arrivals": ("sum", r"b64 \[%r1\], 1;", "b64 [%r1], 0;", "more arrivals"),
    "store not fenced": ("own descriptors", "fence.proxy.async", NOTHING, "fence.proxy"),
    "store not waited for": (BOXES, STORED, GOING, "not waited for"),
    "a source changed": ("own descriptors", STORED, GOING, "bulk copy under way reads"),
}


def run_cases():
    """Print {case: its error or ""}."""
    from . import device
    from .instructions import compile_ptx

    def allocate(size, align, stream):
        memory = torch.empty(size + align, dtype=torch.int8)
        return memory[-memory.data_ptr() % align :][:size]

    triton.set_allocator(allocate)
    errors, compiled = {}, {}

    def record(name, emulated, run):
        errors[name] = ""
        try:
            run()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        else:
            compiled[name] = [*emulated.programs][-1]

    for name, (arch, run, _) in CASES.items():
        with device.emulated(arch) as emulated:
            record(name, emulated, run)
    for name, (case, old, new, _) in CHANGED.items():
        arch, run, _ = CASES[case]
        with device.emulated(arch) as emulated:
            text = compiled.get(case, "")
            changed, count = re.subn(old, new, text)
            if count:
                emulated.programs[text] = compile_ptx(changed)
                record(name, emulated, run)
            else:
                errors[name] = f"no {old} in {text or case}"
    print(json.dumps(errors))


@pytest.fixture(scope="module")
def errors():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = root = str(Path(__file__).parents[2])
    code = f"from {__name__} import run_cases; run_cases()"
    return json.loads(printed(code, cwd=root, env=environment).splitlines()[-1])


@pytest.mark.parametrize("name", CASES | CHANGED)
def test_a_compiled_kernel(name, errors):
    message = (CASES | CHANGED)[name][-1]
    assert message in errors[name] and bool(message) == bool(errors[name]), errors[name]
