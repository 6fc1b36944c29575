"""Run tests of compiled kernels under compute-sanitizer, where it is installed.

python -m bench.gpu.sanitize --json sanitize.json
"""

from __future__ import annotations

if __name__ == "__main__":
    from quire.models.command import run

    run("quire.bench.gpu.sanitize")

import shutil
import subprocess
import sys
from collections.abc import Sequence

from quire.models.command import Parser, output_file, program

from ..common.results import write_json

INDEXER = "indexer/test_indexer.py::test_exact_scores_give_exactly_the_oracle_s_selection"
# Together they launch every kernel.
KERNEL_TESTS = [
    "attention/test_attention.py::test_against_float64[full-prefill-long-context-bf16]",
    "attention/test_attention.py::test_against_float64[full-split]",
    "latent/test_mla.py::test_against_float64[split-several-tiles]",
    "latent/test_compressed.py::test_against_float64[split-fp8-in-step]",
    "attention/test_merge.py::test_merge_partials[fp16-sinks-triton]",
    "compressor/test_compressor.py::test_compress[index-bf16-triton]",
    f"{INDEXER}[prefill-chunk-triton]",
    f"{INDEXER}[decode-two-turns-triton]",
    "hyper_connections/test_hyper_connections.py::test_collapse[splits-of-two-lengths-triton]",
    "hyper_connections/test_hyper_connections.py::test_expand[fp32-2-triton]",
    "latent_write/test_latent_write.py::test_quantised_bytes[64-dtype0-triton]",
    "layers/test_experts.py::test_expert_mlp[gpt-oss-bf16-triton]",
    "layers/test_routing.py::test_combine[3-2-16-dtype0-True-triton]",
    "layers/test_routing.py::test_route[table-triton]",
    "layers/test_gating.py::test_gated_product[gelu-bf16-triton]",
    "layers/test_rope.py::test_norm_rope[gemma-4-bf16-triton]",
    "layers/test_norm.py::test_residual_norm[norm-offset-bf16-triton]",
    "layers/test_sampling.py::test_sample[bf16-triton]",
    "pages/test_overlap.py::test_copy_overlap[small-triton]",
    "pages/test_page_copy.py::test_copy[views-of-a-pool-gather_pages-triton]",
    "pages/test_write_kv.py::test_rows[scaled-many-heads-bf16-triton]",
]
TOOLS = ("memcheck", "racecheck")
FOUND = 9  # exit status of compute-sanitizer where it found an error


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if a tool found an error or a test failed."""
    args = _parser().parse_args(argv)
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer is not installed: nothing was checked")
    statuses = {}
    for tool in TOOLS if sanitizer else ():
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        tests = ["tests/gpu/test_gpu_smoke.py", *(f"tests/kernels/{name}" for name in KERNEL_TESTS)]
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *pytest, *tests]
        statuses[tool] = subprocess.run(command).returncode
        print(f"{tool}: exit status {statuses[tool]}", flush=True)
    write_json(args.json, {"statuses": statuses})
    return int(any(statuses.values()))


def _parser() -> Parser:
    parser = Parser("bench.gpu.sanitize", __doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result")
    return parser
