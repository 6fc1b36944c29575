"""Peers that are GPU packages of others: installed ones, or files in a folder, for machines that cannot install.

The folder holds, packed or unpacked: ``_vllm_fa3_C.abi3.so`` (FlashAttention-3 as vLLM builds it, its operators registered with torch),
``vllm/v1/attention/ops`` (vLLM's Triton kernels, which need a few modules of vLLM in name only), and the packages ``flashinfer`` and
``tvm_ffi``. FlashInfer compiles its kernels when they are first used; `build_flashinfer` does that ahead, many at once.
"""

from __future__ import annotations

import enum
import importlib
import json
import logging
import lzma
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import types
import zipfile
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.bench.peers import Call, Peer, Unsupported
from quire.bench.problem import Problem

FLASHINFER_WORKSPACE = 256 * 2**20
# vLLM splits the keys of a decode in this many parts, while the batch is at most this many sequences over KV heads.
VLLM_SEGMENTS = 16
VLLM_GRID_2D = 128
# (head_dim, whether there is a window) of the FlashInfer kernels that the named shapes use.
FLASHINFER_KERNELS = ((128, False), (256, True), (128, True), (512, False))
BUILT = "flashinfer_built.json"


def unpack(source: Path, target: Path) -> Path:
    """Unpacks ``*.so.xz``, ``*.tar.xz`` and ``*.whl`` of a folder into another one; files already there are kept.

    Returns: the folder to load from: ``source`` itself when nothing in it is packed.
    """
    packed = [p for p in sorted(source.iterdir()) if p.name.endswith((".xz", ".whl"))]
    if not packed:
        return source
    target.mkdir(parents=True, exist_ok=True)
    for path in packed:
        done = target / f".{path.name}.done"
        if done.exists():
            continue
        if path.name.endswith(".tar.xz"):
            with tarfile.open(path) as archive:
                archive.extractall(target, filter="data")
        elif path.suffix == ".whl":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(target)
        else:
            with lzma.open(path) as compressed, open(target / path.stem, "wb") as file:
                shutil.copyfileobj(compressed, file, 1 << 22)
        done.touch()
    return target


def fa3_peer(folder: Path | None) -> Peer:
    """FlashAttention-3. Raises: FileNotFoundError, OSError where its library cannot be loaded."""
    library = _file(folder, "_vllm_fa3_C.abi3.so")
    torch.ops.load_library(str(library))
    forward = torch.ops._vllm_fa3_C.fwd

    def prepare(problem: Problem) -> list[Call]:
        case, shape = problem.case, problem.case.shape
        if shape.head_dim > 256:
            raise Unsupported("head_dim above 256")
        left = -1 if shape.sliding_window is None else shape.sliding_window - 1
        right = -1 if shape.sliding_window is None else 0
        sinks = None if problem.sinks is None else problem.sinks.to(problem.q.dtype)
        out = torch.full_like(problem.q[0], float("nan"))
        named = {
            "out": out,
            "cu_seqlens_q": problem.cu_seqlens_q,
            "seqused_k": problem.seq_lens,
            "max_seqlen_q": max(case.q_lens),
            "max_seqlen_k": max(case.seq_lens),
            "page_table": problem.block_table,
            "softmax_scale": problem.softmax_scale,
            "is_causal": True,
            "window_size_left": left,
            "window_size_right": right,
            "s_aux": sinks,
        }
        positions = _positions(forward.default._schema, named)

        def call(copy: int) -> Call:
            first = (problem.q[copy], problem.k_pages(copy), problem.v_pages(copy))
            return lambda: (forward(*first, *positions)[0],)

        return [call(copy) for copy in range(problem.copies)]

    return Peer("fa3", "vLLM 0.33.0 build", "num_splits chosen by it", prepare)


# Values of the FA3 operator's arguments that are neither tensors of the problem nor None, by the names of its schema.
FA3_DEFAULTS = {"softcap": 0.0, "is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}  # fmt: skip


def _positions(schema: Any, named: dict[str, Any]) -> list[Any]:
    """Arguments after q, k, v in the order of an operator's schema. Raises: Unsupported when the schema lacks a name."""
    names = [argument.name for argument in schema.arguments]
    lacking = sorted(set(named) - set(names))
    if lacking:
        raise Unsupported(f"the operator has no argument {lacking}")
    values = FA3_DEFAULTS | named
    return [values.get(name) for name in names[3:]]


def vllm_triton_peer(folder: Path | None) -> Peer:
    """vLLM's Triton unified attention. Raises: FileNotFoundError, ImportError."""
    name = "vllm.v1.attention.ops.triton_unified_attention"
    version = _installed("vllm")
    if version is None:
        path = _file(folder, "vllm/v1/attention/ops/triton_unified_attention.py")
        if "vllm" not in sys.modules:
            _stub_vllm(path.parent)
        version = "0.33.0"
    unified = importlib.import_module(name).unified_attention

    def prepare(problem: Problem) -> list[Call]:
        case, shape = problem.case, problem.case.shape
        device = problem.q.device
        rows = max(1, VLLM_GRID_2D // shape.num_kv_heads)
        parts = (max(rows, case.batch), shape.num_heads, VLLM_SEGMENTS)
        out = torch.full_like(problem.q[0], float("nan"))
        window = (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)
        options = {
            "out": out,
            "cu_seqlens_q": problem.cu_seqlens_q,
            "max_seqlen_q": max(case.q_lens),
            "seqused_k": problem.seq_lens,
            "max_seqlen_k": max(case.seq_lens),
            "softmax_scale": problem.softmax_scale,
            "causal": True,
            "window_size": window,
            "block_table": problem.block_table,
            "softcap": 0.0,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            "seq_threshold_3D": rows,
            "num_par_softmax_segments": VLLM_SEGMENTS,
            "softmax_segm_output": torch.empty(*parts, shape.head_dim, device=device),
            "softmax_segm_max": torch.empty(parts, device=device),
            "softmax_segm_expsum": torch.empty(parts, device=device),
            "sinks": problem.sinks,
        }

        def call(copy: int) -> Call:
            first = (problem.q[copy], problem.k_pages(copy), problem.v_pages(copy))

            def run() -> tuple[Tensor]:
                unified(*first, **options)
                return (out,)

            return run

        return [call(copy) for copy in range(problem.copies)]

    return Peer("vllm-triton", version, "its own split rule", prepare)


def _stub_vllm(ops: Path) -> None:
    """Modules that vLLM's attention kernels import, with just the names that they use, so that the rest of vLLM is not needed."""
    import triton
    import triton.language as tl

    modes = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "NVFP4")  # fmt: skip
    platform = types.SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda family: False
    )
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": _logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": enum.IntEnum("KVQuantMode", modes, start=0)},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {"__path__": [str(ops)]},
    }
    for name, names in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []  # a package: its submodules are looked up in sys.modules first
        module.__dict__.update(names)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.debug_once = logger.debug  # vLLM's own addition
    return logger


def flashinfer_peer(folder: Path | None) -> Peer:
    """FlashInfer. Raises: ImportError, FileNotFoundError."""
    flashinfer = _import_flashinfer(folder)
    built = _built(folder)

    def prepare(problem: Problem) -> list[Call]:
        case, shape = problem.case, problem.case.shape
        if problem.sinks is not None:
            raise Unsupported("sinks")
        if built is not None and [shape.head_dim, shape.sliding_window is not None] not in built:
            raise Unsupported("its kernel for this head_dim was not built")
        if shape.head_dim > 256 and case.phase != "decode":
            raise Unsupported("head_dim above 256 in prefill")
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

    indptr = ints([0, *accumulate(counts)])
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, case.block_size)
    options = {
        "window_left": -1 if shape.sliding_window is None else shape.sliding_window - 1,
        "sm_scale": problem.softmax_scale,
        "q_data_type": problem.q.dtype,
        "kv_data_type": problem.q.dtype,
    }
    scratch = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=device)
    if case.phase == "decode":
        # Grouped heads go over tensor cores, which its kernel has for head_dim up to 256.
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch, "NHD", use_tensor_cores=shape.head_dim <= 256, backend="fa2"
        )
        wrapper.plan(indptr, ints(indices), ints(last), *heads, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend="fa2")
        cu = problem.cu_seqlens_q
        wrapper.plan(cu, indptr, ints(indices), ints(last), *heads, causal=True, **options)
    out = torch.full_like(problem.q[0], float("nan"))

    def call(copy: int) -> Call:
        q, pages = problem.q[copy], (problem.k_pages(copy), problem.v_pages(copy))
        return lambda: (wrapper.run(q, pages, out=out),)

    return [call(copy) for copy in range(problem.copies)]


def build_flashinfer(folder: Path) -> dict[str, str]:
    """Compiles the kernels of ``FLASHINFER_KERNELS`` ahead, and notes in the folder which could be. Needs nvcc.

    Returns: {kernel: "built" or why not}.
    """
    # What is not noted as built is not used: compiling at first use would take minutes of a benchmark.
    (folder / BUILT).write_text("[]")
    _import_flashinfer(folder)
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    build = importlib.import_module("flashinfer.jit.core").build_jit_specs
    bf16 = (torch.bfloat16,) * 3
    result, built = {}, []
    # The first run takes what is known to compile, all at once; the last one is an attempt.
    for group in (FLASHINFER_KERNELS[:-1], FLASHINFER_KERNELS[-1:]):
        try:
            specs = []
            for dim, window in group:
                shape = (*bf16, torch.int32, dim, dim, 0, window, False)
                if dim > 256:
                    specs.append(modules.gen_batch_decode_module(*shape))
                else:
                    specs.append(modules.gen_batch_prefill_module("fa2", *shape, False))
            build(specs, verbose=False, skip_prebuilt=True)
            built += [list(kernel) for kernel in group]
            outcome = "built"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[-300:]
        result |= {f"head_dim {dim}{' window' if window else ''}": outcome for dim, window in group}
        (folder / BUILT).write_text(json.dumps(built))
    return result


def _built(folder: Path | None) -> list[list[Any]] | None:
    """[head_dim, window] of kernels that were compiled ahead; None where nobody tried, and first use compiles."""
    path = None if folder is None else folder / BUILT
    return json.loads(path.read_text()) if path is not None and path.is_file() else None


def _import_flashinfer(folder: Path | None) -> Any:
    if _installed("flashinfer-python") is None and "flashinfer" not in sys.modules:
        root = _file(folder, "flashinfer/__init__.py").parent.parent
        sys.path.insert(0, str(root))
        _compiler_environment(root)
    return importlib.import_module("flashinfer")


def _compiler_environment(root: Path) -> None:
    """Where FlashInfer's compiler finds CUDA on a machine that has nvcc, and CUDA libraries only as wheels of torch."""
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


def _installed(distribution: str) -> str | None:
    """Version of an installed package; a folder of the same name somewhere on the path is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _file(folder: Path | None, name: str) -> Path:
    """A file of the folder. Raises: FileNotFoundError naming what would help."""
    if folder is None:
        raise FileNotFoundError("not installed, and no --peers folder")
    if not (folder / name).exists():
        raise FileNotFoundError(f"not installed, and the folder has no {name}")
    return folder / name
