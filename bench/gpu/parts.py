"""Parts of `bench.gpu`, in order, with their time limits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

DRY_RUN_FACTOR = 4  # limits are of a GPU's time
COMPARED = "quire,quire-in-step,flashinfer,fa3,vllm-triton,sdpa"
LATENT_COMPARED = "quire,quire-in-step,flashmla,flashinfer-mla"
JOBS, PEER_JOBS = 12, 4  # processes that compile

# Tests of a CPU that compute on the GPU where there is one. Left out is what says nothing of a
# device: random cases, which each would be compiled for, and refused arguments.
ATTENTION_TESTS = """
    tests/kernels/attention/test_attention.py tests/kernels/attention/test_fp8.py
    tests/kernels/attention/test_merge.py tests/gpu/test_gpu_shapes.py
    tests/gpu/test_gpu_launch.py tests/gpu/test_gpu_bits.py
"""
V4_TESTS = """
    tests/kernels/latent/test_compressed.py tests/kernels/latent/test_flash_mla.py
    tests/kernels/compressor/test_compressor.py
    tests/kernels/indexer/test_indexer.py tests/kernels/latent_write/test_latent_write.py
    tests/kernels/latent/test_mla.py
    tests/models/deepseek_v4/test_engine.py::test_models_without_some_kind_of_layer
    tests/models/deepseek_v4/test_engine.py::test_outputs_do_not_depend_on_drafts
"""
# What a new device is most likely to refuse: conversions of e4m3, a large pool, a captured graph.
SMOKE_TESTS = """
    tests/gpu/test_gpu_smoke.py tests/kernels/common/test_e4m3.py
    tests/gpu/test_gpu_launch.py::test_a_captured_decode_serves_other_values
"""
# What models have around attention.
OPERATOR_TESTS = """
    tests/gpu/test_gpu_sampling.py
    tests/kernels/hyper_connections/test_hyper_connections.py tests/kernels/layers
    tests/kernels/pages
"""
ENGINE_TESTS = """
    tests/gpu/test_gpu_engine.py tests/models/engine/test_engine.py
    tests/models/engine/test_replays.py
    tests/models/engine/test_tiering.py::test_pages_come_back_as_they_left
    tests/models/layers/test_fp8_cache.py
"""


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        limit: seconds it may take.
        arguments: arguments of python; {json} and {peers} are replaced.
        background: True if it runs beside the next parts, until one that waits for it.
        waits: names of background parts that must have ended before.
        tests: True for a run of pytest, whose outcomes are recorded test by test.
        vital: True if its failure ends the run.
    """

    name: str
    limit: float
    arguments: tuple[str, ...]
    background: bool = False
    waits: tuple[str, ...] = ()
    tests: bool = False
    vital: bool = False


def plan(dry_run: bool, num_gpus: int = 1) -> list[Part]:
    """The parts in order; in a dry run tiny, with limits `DRY_RUN_FACTOR` times as long."""

    def run(module: str, real: str = "", dry: str = "") -> tuple[str, ...]:
        return ("-m", module, "--json", "{json}", *shlex.split(dry if dry_run else real))

    def kernels(real: str, dry: str) -> tuple[str, ...]:
        return (*run("bench.kernels", real, dry), "{peers}")

    def tests(files: str) -> tuple[str, ...]:
        # In a dry run only those that no CPU runs otherwise.
        names = [name for name in files.split() if not dry_run or name.startswith("tests/gpu/")]
        return ("-m", "pytest", "-vv", "-rs", "--color=no", "-p", "no:cacheprovider", *names)

    job = "bench.prefill_decode"
    tiny = "--model gemma4-tiny --limit 1 --scale 0.1 --no-baseline --check 1"
    tiny_kernels = "--set tiny --skip tiny-latents --per-call 0.01"
    compile_tiny = "--set tiny --only decode --compile 2 --impl"
    # Limits: what an H100 beside 16 cores took, where that is known, and at least a fifth more.
    # Without background parts they add up to 20 minutes at most, and 22 with several GPUs.
    parts = [
        # A first launch, versions, copy and matmul rates.
        Part("environment", 30, run("bench.gpu.machine"), vital=True),
        Part("smoke", 40, tests(SMOKE_TESTS), tests=True),
        # FlashInfer compiles its kernels with nvcc.
        Part("peers", 260, kernels(
            f"--set headline --impl flashinfer,flashinfer-mla --compile {PEER_JOBS}",
            f"{compile_tiny} flashinfer"), background=True),
        # Compiles the kernels of the main job.
        Part("warm-up", 200, run(job, "--limit 2 --num-pages 2000 --no-baseline --check 1", tiny),
             background=True),
        # Attention against float64: case tables, real shapes, graphs, no host sync.
        Part("attention", 170, tests(ATTENTION_TESTS), tests=True),
        # Kernels and engine of DeepSeek-V4, and V3's, against float64 and full passes.
        Part("v4", 115, tests(V4_TESTS), tests=True),
        Part("operators", 42, tests(OPERATOR_TESTS), tests=True),
        # Engines of all families: caches in e4m3, drafts, preemption, replay, graphs.
        Part("engine", 130, tests(ENGINE_TESTS), tests=True),
        Part("sanitize", 120, run("bench.gpu.sanitize")),
        # The kernels that are timed next, in parallel.
        Part("compile", 70, kernels(
            f"--set headline --impl quire,quire-in-step,vllm-triton --compile {JOBS}",
            f"{compile_tiny} quire")),
        Part("prefill-decode", 25, run(job, "--no-baseline --check 4", tiny), waits=("warm-up",)),
        # Attention beside peers, the cases that matter most.
        Part("kernels", 110, kernels(
            f"--set attention --impl {COMPARED} --seconds 92",
            f"{tiny_kernels} --only decode --impl quire,quire-in-step,sdpa"), waits=("peers",)),
        # DeepSeek-V4 and V3 beside FlashMLA.
        Part("latents", 115, kernels(
            f"--set latents --impl {LATENT_COMPARED} --seconds 97",
            "--set tiny-latents --only decode --per-call 0.01 --impl quire")),
        # Peers as a second, independent oracle.
        Part("oracle", 75, tests("tests/gpu/test_gpu_peers.py"), waits=("peers",), tests=True),
        # More batches, contexts, shards and page sizes, as far as time goes.
        Part("kernels-rest", 20, kernels(
            f"--set all --skip headline --impl {COMPARED},flashmla,flashinfer-mla "
            "--per-call 0.1 --seconds 8",
            "--set tiny --only mixed --per-call 0.01 --impl quire,sdpa")),
    ]  # fmt: skip
    if num_gpus > 1:
        size = 2 ** min(3, num_gpus.bit_length() - 1)
        ranks = run(job, "--limit 4 --num-pages 2000 --no-baseline --check 2", tiny)
        parts.append(Part("ranks", 150, (*ranks, "--tensor-parallel-size", str(size))))
    parts.append(Part("tune", 90, run("bench.tune", "--seconds 55", "--dry-run --seconds 1")))
    # Without a file, pytest would run all tests.
    parts = [part for part in parts if not part.tests or part.arguments[-1].startswith("tests/")]
    factor = DRY_RUN_FACTOR if dry_run else 1
    return [replace(part, limit=part.limit * factor) for part in parts]
