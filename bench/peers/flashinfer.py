"""FlashInfer, installed or from a folder. nvcc compiles its kernels at first use, or ahead."""

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

from ..cases.problem import Problem
from ..cases.shapes import LatentShape
from .folder import expect_nvidia, file_in, installed
from .peer import Call, Peer, Unsupported

BACKEND = "fa2"
LAYOUT = "NHD"
WORKSPACE_BYTES = 256 * 2**20
# (head_dim, has a window) of the kernels that the named shapes use.
KERNELS = ((128, False), (256, True), (128, True), (256, False), (512, False))
TENSOR_CORE_DIM = 256  # largest head_dim of the kernels for grouped heads and prompts
MLA_DIM, MLA_VALUE_DIM = 576, 512
MLA_BACKEND = "fa3"
BUILT = "flashinfer_built.json"  # in the folder: kernels that were compiled ahead


def flashinfer_peer(folder: Path | None) -> Peer:
    """FlashInfer's attention; raises ImportError, FileNotFoundError or NotImplementedError."""
    flashinfer = import_flashinfer(folder)

    def prepare(problem: Problem) -> list[Call]:
        case, shape = problem.case, problem.case.shape
        if problem.shared["sinks"] is not None:
            raise Unsupported("sinks")
        _expect_built(folder, shape.head_dim, shape.sliding_window is not None)
        if shape.head_dim > TENSOR_CORE_DIM and case.phase != "decode":
            raise Unsupported(f"head_dim above {TENSOR_CORE_DIM} in prefill")
        return _attention_calls(flashinfer, problem)

    return Peer("flashinfer", flashinfer.__version__, "plan() not timed", prepare)


def flashinfer_mla_peer(folder: Path | None) -> Peer:
    """FlashInfer's MLA; raises ImportError, FileNotFoundError or NotImplementedError."""
    flashinfer = import_flashinfer(folder)

    def prepare(problem: Problem) -> list[Call]:
        if problem.case.shape.op != "mla":
            raise Unsupported("no such operator")
        _expect_built(folder, problem.case.shape.head_dim, False)
        return _mla_calls(flashinfer, problem)

    note, version = "plan() not timed", flashinfer.__version__
    return Peer("flashinfer-mla", version, note, prepare, (LatentShape,))


def _attention_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    device, dtype = shared["seq_lens"].device, problem.results["out"].dtype
    count = -(-case.context // shape.block_size)
    last = case.context - (count - 1) * shape.block_size

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    indices = shared["block_table"][:, :count].flatten().contiguous()
    rows = ints([0, *accumulate([count] * case.batch)]), indices, ints([last] * case.batch)
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size
    options = {
        "window_left": -1 if shape.sliding_window is None else shape.sliding_window - 1,
        "sm_scale": shape.softmax_scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
    }
    scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    if case.phase == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch, LAYOUT, use_tensor_cores=shape.head_dim <= TENSOR_CORE_DIM, backend=BACKEND
        )
        wrapper.plan(*rows, *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, LAYOUT, backend=BACKEND)
        wrapper.plan(shared["cu_seqlens_q"], *rows, *heads, causal=True, **options)
    out = torch.full_like(problem.results["out"], float("nan"))

    def call(tensors: dict[str, Any]) -> Call:
        q, pages = tensors["q"], (tensors["k_pages"], tensors["v_pages"])
        return lambda: (wrapper.run(q, pages, out=out),)

    return [call(tensors) for tensors in problem.each]


def _mla_calls(flashinfer: Any, problem: Problem) -> list[Call]:
    case, shape, shared = problem.case, problem.case.shape, problem.shared
    device, dtype = shared["seq_lens"].device, problem.results["out"].dtype
    count = -(-case.context // shape.rows)
    scratch = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(scratch, backend=MLA_BACKEND)
    parts = [shape.head_dim_v, shape.head_dim - shape.head_dim_v]
    wrapper.plan(
        shared["cu_seqlens_q"],
        torch.arange(case.batch + 1, dtype=torch.int32, device=device) * count,
        shared["block_table"][:, :count].flatten().contiguous(),
        shared["seq_lens"],
        shape.num_heads,
        *parts,
        shape.rows,
        True,
        shape.softmax_scale,
        dtype,
        dtype,
    )
    out = torch.full_like(problem.results["out"], float("nan"))

    def call(tensors: dict[str, Any]) -> Call:
        inputs = (*tensors["q"].split(parts, -1), *tensors["pages"].split(parts, -1))
        return lambda: (wrapper.run(*inputs, out=out),)

    return [call(tensors) for tensors in problem.each]


def build_flashinfer(folder: Path) -> dict[str, str]:
    """Compile the kernels of ``KERNELS`` and MLA ahead, and note in the folder which could be.

    Returns:
        {kernel: "built" or the reason why not}.
    """
    # A kernel that is not noted is not used: compiling at first use takes minutes of a benchmark.
    (folder / BUILT).write_text("[]")
    import_flashinfer(folder)
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    build = importlib.import_module("flashinfer.jit.core").build_jit_specs
    # 0.7 has a module of its own for pages whose K and V have equal strides.
    prefill = getattr(
        modules, "_gen_batch_prefill_primary_module", modules.gen_batch_prefill_module
    )

    def spec(dim: int, window: bool) -> Any:
        shape = (*(torch.bfloat16,) * 3, torch.int32, dim, dim, 0, window, False)
        if dim == MLA_DIM:
            parts = (MLA_VALUE_DIM, MLA_DIM - MLA_VALUE_DIM)
            return modules.gen_batch_mla_module(MLA_BACKEND, *shape[:4], *parts, False)
        if dim > TENSOR_CORE_DIM:
            return modules.gen_batch_decode_module(*shape)
        return prefill(BACKEND, *shape, False)

    result, built = {}, []
    # The first group is known to compile; the others are attempts.
    for group in (KERNELS[:-1], ((MLA_DIM, False),), KERNELS[-1:]):
        try:
            build([spec(*kernel) for kernel in group], verbose=False, skip_prebuilt=True)
            built += [list(kernel) for kernel in group]
            outcome = "built"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[-300:]
        result |= {f"head_dim {dim}{' window' if window else ''}": outcome for dim, window in group}
        (folder / BUILT).write_text(json.dumps(built))
    return result


def _expect_built(folder: Path | None, head_dim: int, window: bool) -> None:
    """Raise Unsupported if kernels were compiled ahead, but not this one."""
    noted = None if folder is None else folder / BUILT
    if noted is None or not noted.is_file():
        return
    if [head_dim, window] not in json.loads(noted.read_text()):
        raise Unsupported("its kernel for this head_dim was not built")


def import_flashinfer(folder: Path | None) -> Any:
    """The package: installed, or in the folder, which is put on the path.

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
    """Set where FlashInfer's compiler finds CUDA, whose libraries may be wheels of torch only."""
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
    paths = [Path(line) for line in lines]
    paths += Path("/usr/local/nvidia").glob("lib*/libcuda.so.1")
    return paths[0] if paths else None
