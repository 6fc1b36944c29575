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

# A call of every kernel of attention, latent attention, compressor, indexer and sampler.
TESTS = ("tests/gpu/test_gpu_smoke.py", "tests/gpu/test_gpu_launch.py")
ONLY = "smoke or serves_other_values"
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
        tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, "-k", ONLY]
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *tests]
        statuses[tool] = subprocess.run(command).returncode
        print(f"{tool}: exit status {statuses[tool]}", flush=True)
    write_json(args.json, {"statuses": statuses})
    return int(any(statuses.values()))


def _parser() -> Parser:
    parser = Parser("bench.gpu.sanitize", __doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result")
    return parser
