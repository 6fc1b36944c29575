"""FlashInfer beside the others: installed, or from a folder; its kernels compiled at first use, or
ahead, many at once.

Compiling needs nvcc. On a machine where CUDA's libraries came as wheels of torch, the compiler is
told where they are.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..cases.latent_problem import AttentionProblem
from ..cases.problem import Problem
from .folder import BUILT, expect_nvidia, file_in, installed
from .peer import Call, Peer, Unsupported

BACKEND = "fa2"
LAYOUT = "NHD"
WORKSPACE_BYTES = 256 * 2**20
# (head_dim, whether there is a window) of the kernels that the named shapes use.
KERNELS = ((128, False), (256, True), (128, True), (256, False), (512, False))
# Its kernels over tensor cores, which serve grouped heads and prompts, have head_dim up to this.
MOST_CHANNELS = 256
# Channels of V3's latents with and without the roped ones: its kernel is one of its own.
MLA_DIM, MLA_VALUE_DIM = 576, 512
MLA_BACKEND = "fa3"


def flashinfer_peer(folder: Path | None) -> Peer:
    """FlashInfer.

    Raises:
        ImportError, FileNotFoundError.
    """
    flashinfer = import_flashinfer(folder)
    built = built_kernels(folder)

    def prepare(problem: Problem) -> list[Call]:
        case, shape = problem.case, problem.case.shape
        if problem.sinks is not None:
            raise Unsupported("sinks")
        if built is not None and [shape.head_dim, shape.sliding_window is not None] not in built:
            raise Unsupported("its kernel for this head_dim was not built")
        if shape.head_dim > MOST_CHANNELS and case.phase != "decode":
            raise Unsupported(f"head_dim above {MOST_CHANNELS} in prefill")
        return _flashinfer_calls(flashinfer, problem)

    return Peer("flashinfer", flashinfer.__version__, "plan() not timed", prepare)


def _flashinfer_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    case, shape = problem.case, problem.case.shape
    device = problem.q.device
    counts = [-(-n // case.block_size) for n in case.seq_lens]
    tables = problem.block_table.tolist()
    indices = [page for row, count in zip(tables, counts, strict=True) for page in row[:count]]
    last = [n - (c - 1) * case.block_size for n, c in zip(case.seq_lens, counts, strict=True)]

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    rows = ints([0, *accumulate(counts)]), ints(indices), ints(last)
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim, case.block_size
    options = {
        "window_left": -1 if shape.sliding_window is None else shape.sliding_window - 1,
        "sm_scale": problem.softmax_scale,
        "q_data_type": problem.q.dtype,
        "kv_data_type": problem.q.dtype,
    }
    scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if case.phase == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch, LAYOUT, use_tensor_cores=shape.head_dim <= MOST_CHANNELS, backend=BACKEND
        )
        wrapper.plan(*rows, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, LAYOUT, backend=BACKEND)
        wrapper.plan(problem.cu_seqlens_q, *rows, *heads, causal=True, **options)
    out = torch.full_like(problem.q[0], float("nan"))

    def call(copy: int) -> Call:
        q, pages = problem.q[copy], (problem.k_pages(copy), problem.v_pages(copy))
        return lambda: (wrapper.run(q, pages, out=out),)

    return [call(copy) for copy in range(problem.copies)]


def flashinfer_mla_peer(folder: Path | None) -> Peer:
    """FlashInfer's MLA, for V3.

    Raises:
        ImportError, FileNotFoundError.
    """
    flashinfer = import_flashinfer(folder)
    built = built_kernels(folder)

    def prepare(problem: Any) -> list[Call]:
        if not isinstance(problem, AttentionProblem) or problem.case.shape.op != "mla":
            raise Unsupported("no such operator")
        if built is not None and [problem.case.shape.head_dim, False] not in built:
            raise Unsupported("its kernel for latents was not built")
        return _mla_calls(flashinfer, problem)

    return Peer("flashinfer-mla", flashinfer.__version__, "plan() not timed", prepare)


def _mla_calls(flashinfer: Any, problem: AttentionProblem) -> list[Call]:
    case, shape = problem.case, problem.case.shape
    device = problem.q.device
    assert problem.entries is not None and problem.entry_table is not None
    count = -(-case.context // shape.rows)
    indptr = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * count
    scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend=MLA_BACKEND)
    rope_dim = shape.head_dim - shape.head_dim_v
    wrapper.plan(
        problem.cu_seqlens_q,
        indptr,
        problem.entry_table[:, :count].flatten().contiguous(),
        problem.seq_lens,
        shape.num_heads,
        shape.head_dim_v,
        rope_dim,
        shape.rows,
        True,
        shape.softmax_scale,
        problem.q.dtype,
        problem.q.dtype,
    )
    size = (case.num_tokens, shape.num_heads, shape.head_dim_v)
    out = torch.full(size, float("nan"), dtype=problem.q.dtype, device=device)

    def call(copy: int) -> Call:
        q = problem.q[copy].split([shape.head_dim_v, rope_dim], -1)
        pages = problem.entries[copy].split([shape.head_dim_v, rope_dim], -1)
        return lambda: (wrapper.run(*q, *pages, out=out),)

    return [call(copy) for copy in range(problem.copies)]


def build_flashinfer(folder: Path) -> dict[str, str]:
    """Compiles the kernels of ``KERNELS`` ahead, and notes in the folder which could be. Needs
    nvcc.

    Returns:
        {kernel: "built" or why not}.
    """
    # What is not noted as built is not used: compiling at first use would take minutes of a
    # benchmark.
    (folder / BUILT).write_text("[]")
    import_flashinfer(folder)
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    build = importlib.import_module("flashinfer.jit.core").build_jit_specs
    # Pages whose K and V have equal strides are served by a module of their own since 0.7; before,
    # one module served all.
    prefill = getattr(
        modules, "_gen_batch_prefill_primary_module", modules.gen_batch_prefill_module
    )
    bf16 = (torch.bfloat16,) * 3
    result, built = {}, []
    # The first run takes what is known to compile, all at once; the others are attempts.
    for group in (KERNELS[:-1], ((MLA_DIM, False),), KERNELS[-1:]):
        try:
            specs = []
            for dim, window in group:
                shape = (*bf16, torch.int32, dim, dim, 0, window, False)
                if dim == MLA_DIM:
                    rope_dim = MLA_DIM - MLA_VALUE_DIM
                    shape = (*bf16, torch.int32, MLA_VALUE_DIM, rope_dim, False)
                    specs.append(modules.gen_batch_mla_module(MLA_BACKEND, *shape))
                elif dim > MOST_CHANNELS:
                    specs.append(modules.gen_batch_decode_module(*shape))
                else:
                    specs.append(prefill(BACKEND, *shape, False))
            build(specs, verbose=False, skip_prebuilt=True)
            built += [list(kernel) for kernel in group]
            outcome = "built"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[-300:]
        result |= {f"head_dim {dim}{' window' if window else ''}": outcome for dim, window in group}
        (folder / BUILT).write_text(json.dumps(built))
    return result


def built_kernels(folder: Path | None) -> list[list[Any]] | None:
    """[head_dim, window] of kernels that were compiled ahead; None where nobody tried, and first
    use compiles.
    """
    path = None if folder is None else folder / BUILT
    return json.loads(path.read_text()) if path is not None and path.is_file() else None


def import_flashinfer(folder: Path | None) -> Any:
    """The package: installed, or in the folder, which is then on the path.

    Raises:
        ImportError, FileNotFoundError.
        NotImplementedError: under ROCm.
    """
    expect_nvidia("FlashInfer")
    if installed("flashinfer-python") is None and "flashinfer" not in sys.modules:
        root = file_in(folder, "flashinfer/__init__.py").parent.parent
        sys.path.insert(0, str(root))
        _compiler_environment(root)
    return importlib.import_module("flashinfer")


def _compiler_environment(root: Path) -> None:
    """Where FlashInfer's compiler finds CUDA on a machine that has nvcc, and CUDA libraries only as
    wheels of torch.
    """
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    environment = os.environ
    environment.setdefault("CUDA_HOME", str(Path(compiler).resolve().parent.parent))
    environment.setdefault("FLASHINFER_WORKSPACE_BASE", str(root / "ws"))
    environment.setdefault("MAX_JOBS", str(os.cpu_count()))
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        suffix = "a" if major >= 9 else ""
        environment.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{suffix}")
    packages = Path(sysconfig.get_paths()["purelib"])
    includes = [*packages.glob("nvidia/cu13/include"), *packages.glob("nvidia/curand/include")]
    _prepend("CPATH", includes)  # searched after -I, so the toolkit's own headers win
    # The linker wants the libraries under their plain names.
    links = root / "lib"
    links.mkdir(exist_ok=True)
    runtime = next(iter(packages.glob("nvidia/cu13/lib/libcudart.so.13")), None)
    for name, target in (("libcudart.so", runtime), ("libcuda.so", _driver_library())):
        if target is not None and not (links / name).exists():
            (links / name).symlink_to(target)
    _prepend("LIBRARY_PATH", [links])


def _prepend(variable: str, paths: list[Path]) -> None:
    parts = [*map(str, paths), os.environ.get(variable, "")]
    os.environ[variable] = ":".join(part for part in parts if part)


def _driver_library() -> Path | None:
    try:
        listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    except OSError:
        listed = ""
    lines = [line.rpartition("=> ")[2] for line in listed.splitlines() if "libcuda.so.1 " in line]
    paths = [Path(line) for line in lines] + list(Path("/usr/local/nvidia").glob("lib*/libcuda.so.1"))  # fmt: skip
    return paths[0] if paths else None
