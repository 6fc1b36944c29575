"""Parts of `bench.gpu`, in order, with their time limits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

# Limits are of a GPU's time. A dry run checks that parts work, however slow or busy its CPU is.
RANKS_SECONDS = 150.0
DRY_RUN_FACTOR = 4
# All but FlexAttention, whose compilation takes long for each case.
COMPARED = "quire,quire-in-step,flashinfer,fa3,vllm-triton,sdpa"
LATENT_COMPARED = "quire,quire-in-step,flashmla,flashinfer-mla"
JOBS = 12  # processes that compile

# Tests of a CPU that compute on the GPU where there is one. Left out is what says nothing of a
# device: random cases, which each would be compiled for, and refused arguments.
ATTENTION_TESTS = """
    tests/kernels/attention/test_attention.py tests/kernels/attention/test_fp8.py
    tests/kernels/attention/test_merge.py tests/gpu/test_gpu_attention.py
    tests/gpu/test_gpu_launch.py
"""
V4_TESTS = """
    tests/kernels/latent/test_compressed.py tests/kernels/latent/test_flash_mla.py
    tests/kernels/compressor/test_compressor.py::test_a_gate_of_minus_infinity
    tests/kernels/compressor/test_compressor.py::test_an_entry_without_a_slot_is_not_made
    tests/kernels/compressor/test_compressor.py::test_any_cut_gives_the_same_bits
    tests/kernels/compressor/test_compressor.py::test_compress
    tests/kernels/compressor/test_compressor.py::test_more_sequences_than_a_program_looks_at_once
    tests/kernels/compressor/test_compressor.py::test_padding_rows
    tests/kernels/compressor/test_compressor.py::test_rejected_drafts_leave_no_trace
    tests/kernels/indexer/test_indexer.py tests/kernels/latent_write/test_latent_write.py
    tests/gpu/test_gpu_compressed.py tests/gpu/test_gpu_indexer.py tests/gpu/test_gpu_latent.py
    tests/gpu/test_gpu_v4.py
    tests/kernels/latent/test_mla.py tests/gpu/test_gpu_mla.py
    tests/models/deepseek_v4/test_engine.py::test_aborts
    tests/models/deepseek_v4/test_engine.py::test_decode_through_fixed_buffers
    tests/models/deepseek_v4/test_engine.py::test_hits_of_every_kind
    tests/models/deepseek_v4/test_engine.py::test_outputs_do_not_depend_on_drafts
    tests/models/deepseek_v4/test_engine.py::test_preempted_requests_resume
"""
# What models have around attention.
OPERATOR_TESTS = """
    tests/gpu/test_gpu_page_copy.py tests/gpu/test_gpu_sampling.py
    tests/kernels/hyper_connections/test_hyper_connections.py::test_collapse
    tests/kernels/hyper_connections/test_hyper_connections.py::test_expand
    tests/kernels/hyper_connections/test_hyper_connections.py::test_no_part_of_fn_is_lost
    tests/kernels/hyper_connections/test_hyper_connections.py::test_no_token_reads_the_rows_of_another
    tests/kernels/hyper_connections/test_hyper_connections.py::test_padding_rows
    tests/kernels/hyper_connections/test_hyper_connections.py::test_rows_are_added_in_their_order
    tests/kernels/layers/test_gating.py tests/kernels/layers/test_norm.py
    tests/kernels/layers/test_rope.py tests/kernels/layers/test_routing.py
    tests/kernels/layers/test_sampling.py tests/kernels/pages
"""
# One asks transformers, of which a borrowed machine may have a version without these models.
ENGINE_TESTS = """
    --deselect=tests/models/engine/test_engine.py::test_prefill_and_forced_decode_equal_transformers
    tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_packed.py tests/models/engine/test_engine.py
    tests/models/engine/test_replays.py
    tests/models/engine/test_tiering.py::test_conversations_in_a_pool_that_is_too_small
    tests/models/engine/test_tiering.py::test_pages_come_back_as_they_left
    tests/models/layers/test_fp8_cache.py tests/kernels/layers/test_experts.py::test_order
"""


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        limit: seconds it may take.
        what: for the plan.
        arguments: of python; {json}, {peers}, {unpack}, {target} are replaced.
        background: whether it runs beside the parts behind it, until one that waits for it.
        waits: names of the background parts that must have ended before.
        needs_peers: whether it is skipped without a folder of peers.
        tests: whether it is a run of pytest, one test after the other on record.
        vital: whether nothing else is worth trying when it fails.
    """

    name: str
    limit: float
    what: str
    arguments: tuple[str, ...]
    background: bool = False
    waits: tuple[str, ...] = ()
    needs_peers: bool = False
    tests: bool = False
    vital: bool = False


def plan(dry_run: bool, num_gpus: int = 1) -> list[Part]:
    """The parts in order. In a dry run their limits are `DRY_RUN_FACTOR` times as long.

    Args:
        num_gpus: of the machine; with several there is a part that runs one model on them.
    """

    def size(real: str, dry: str) -> tuple[str, ...]:
        return tuple(shlex.split(dry if dry_run else real))

    def tests(files: str) -> tuple[str, ...]:
        # In a dry run only those that no CPU runs otherwise.
        names = [name for name in files.split() if not dry_run or name.startswith("tests/gpu/")]
        return ("-m", "pytest", "-vv", "-rs", "--color=no", "-p", "no:cacheprovider", *names)

    kernels = ("-m", "bench.kernels", "--json", "{json}", "{peers}")
    job = ("-m", "bench.prefill_decode", "--json", "{json}")
    tiny = "--model gemma4-tiny --limit 1 --scale 0.1 --no-baseline --check 1"
    parts = [
        Part("environment", 35, "machine, versions, a first launch, copy and matmul rates",
             ("-m", "bench.environment", "--json", "{json}", "{peers}"), vital=True),
        Part("peers", 170, "unpack and load peers, compile FlashInfer's kernels",
             ("-m", "bench.environment", "--json", "{json}", "{unpack}"), background=True, needs_peers=True),
        Part("warm-up", 100, "the main job in small, which compiles its kernels",
             (*job, *size("--limit 2 --num-pages 2000 --no-baseline --check 1", tiny)), background=True),
        Part("attention", 80, "attention against float64: case tables, real shapes, graphs, no host sync",
             tests(ATTENTION_TESTS), tests=True),
        Part("prefill-decode", 60, "the main job: bench.prefill_decode",
             (*job, *size("--no-baseline --check 4", tiny)), waits=("warm-up",)),
        Part("v4", 70, "kernels and engine of DeepSeek-V4, and V3's, against float64 and full passes",
             tests(V4_TESTS), tests=True),
        Part("operators", 26, "what models have around attention, against float64",
             tests(OPERATOR_TESTS), tests=True),
        Part("compile", 25, "the kernels that are timed next, in parallel",
             (*kernels, *size(f"--set headline --impl quire,quire-in-step,vllm-triton --compile {JOBS}", "--set tiny --only decode --impl quire --compile 1"))),
        Part("kernels", 40, "attention kernels and peers side by side, the cases that matter most",
             (*kernels, *size(f"--set attention --impl {COMPARED} --seconds 31", "--set tiny --skip tiny-latents --only decode --per-call 0.01 --impl quire,quire-in-step,sdpa")), waits=("peers",)),
        Part("latents", 35, "kernels of DeepSeek-V4 and V3, and FlashMLA",
             (*kernels, *size(f"--set latents --impl {LATENT_COMPARED} --seconds 30", "--set tiny-latents --only decode --per-call 0.01 --impl quire"))),
        Part("engine", 40, "engines of all families: caches in e4m3, drafts, preemption, replay, graphs",
             tests(ENGINE_TESTS), tests=True),
        Part("oracle", 15, "peers as a second, independent oracle",
             tests("tests/gpu/test_gpu_peers.py"), waits=("peers",), tests=True),
        Part("kernels-rest", 12, "more batches, contexts, shards and page sizes, as far as time goes",
             (*kernels, *size(f"--set all --skip headline --impl {COMPARED},flashmla,flashinfer-mla --per-call 0.1 --seconds 8", "--set tiny --only mixed --per-call 0.01 --impl quire,sdpa"))),
        Part("flex", 10, "FlexAttention beside quire",
             (*kernels, *size("--set attention --impl quire,flex --seconds 6", "--set tiny --skip tiny-latents --only 'global decode' --per-call 0.01 --impl flex"))),
    ]  # fmt: skip
    if num_gpus > 1:
        ranks = 2 ** min(3, num_gpus.bit_length() - 1)
        parts.append(Part(
            "ranks", RANKS_SECONDS, f"the main job on {ranks} GPUs beside one",
            (*job, *size("--limit 4 --num-pages 2000 --no-baseline --check 2", tiny), "--tensor-parallel-size", str(ranks)),
        ))  # fmt: skip
    factor = DRY_RUN_FACTOR if dry_run else 1
    return [replace(part, limit=part.limit * factor) for part in parts]


def print_plan(parts: list[Part], seconds: float) -> None:
    """The time plan: when a part starts at the latest if all before it use up their limits."""
    print(f"{'latest start':>12}  {'limit':>6}  part")
    start = 0.0
    for part in parts:
        beside = " (beside the next parts)" if part.background else ""
        print(f"{start:10.0f} s  {part.limit:4.0f} s  {part.name:16} {part.what}{beside}")
        start += 0 if part.background else part.limit
    print(f"{min(start, seconds):10.0f} s  in all, at most {seconds:.0f} s")
