"""Change compiled kernels in one place at a time, and count the changes that a test notices.

    python -m tests.support.ptx_mutations [--mutants 300] [--ptx sm_90] [--json FILE]

For each kernel, waits, barriers and fences are dropped, operands of products exchanged and addresses
moved by one access. A change is noticed if the test that launches the kernel fails.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

import pytest
from _pytest.runner import runtestprotocol

from tests.ptx.instructions import Compiler
from tests.ptx.machine import Program
from tests.ptx.parse import Instruction, parse, vector

# Together they launch every kernel.
TESTS = [
    "attention/test_attention.py::test_against_float64[full-prefill-long-context-bf16]",
    "attention/test_attention.py::test_against_float64[full-split]",
    "latent/test_mla.py::test_against_float64[split-several-tiles]",
    "latent/test_compressed.py::test_against_float64[split-fp8-in-step]",
    "attention/test_merge.py::test_merge_partials[fp16-sinks-triton]",
    "compressor/test_compressor.py::test_compress[index-bf16-triton]",
    "indexer/test_indexer.py::test_exact_scores_give_exactly_the_oracle_s_selection[prefill-chunk-triton]",
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


NOTHING = Instruction("nothing", ["membar", "cta"], [], None)
_ADDRESS = re.compile(r"\[\s*(%?\w+)(?:\s*\+\s*(-?\d+))?\s*\]")


def mutants(program: Program) -> Iterator[tuple[str, int, Instruction]]:
    """(kind, index, instruction instead) of each change of one instruction that has run."""
    for index, op in enumerate(program.kernel.instructions):
        if index not in program.active:
            continue
        if op.name in ("bar", "fence") or "fence" in op.parts:
            yield "barrier" if op.name == "bar" else "fence", index, NOTHING
        elif "wait_group" in op.parts:
            yield "wait", index, NOTHING
        elif op.name == "mma" or "mma_async" in op.parts:
            for i in (1, 2):
                parts = vector(op.operands[i])
                if len(parts) > 1:
                    swapped = f"{{{', '.join([parts[1], parts[0], *parts[2:]])}}}"
                    yield "operands", index, _with(op, i, swapped)
        elif op.name in ("ld", "st", "cp", "ldmatrix", "stmatrix") and "param" not in op.parts:
            for i, operand in enumerate(op.operands):
                if found := _ADDRESS.fullmatch(operand):
                    yield "address", index, _with(op, i, f"[{found[1]}+{int(found[2] or 0) + 16}]")


def _with(op: Instruction, i: int, operand: str) -> Instruction:
    return replace(op, text=operand, operands=[*op.operands[:i], operand, *op.operands[i + 1 :]])


class Mutations:
    """Pytest plugin: runs each test as it is, then once for each of its mutants.

    Args:
        each: mutants of a kernel, in equal parts of each kind.
    """

    def __init__(self, each: int, seed: int = 0):
        self.each, self.random = each, random.Random(seed)
        self.counts: dict[str, Counter] = defaultdict(Counter)
        self.survivors: list[tuple] = []
        self.failed: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        device = getattr(item.config, "ptx_device", None)
        if self._fails(item):
            self.failed.append(item.nodeid)
            return True
        device = item.config.ptx_device
        ran = {launch.ptx: launch.kernel for launch in device.launches}
        for text, kernel in ran.items():
            original = device.programs[text]
            for kind, index, op in self._chosen(kernel, original):
                changed = parse(text)
                was, changed.instructions[index] = changed.instructions[index].text, op
                device.programs[text] = Compiler(changed).program
                noticed = self._fails(item)
                if not noticed and kind in ("operands", "address"):
                    changed.instructions[index] = NOTHING
                    device.programs[text] = Compiler(changed).program
                    if not self._fails(item):  # the test does not use what it computes
                        self.counts[kernel]["none", True] += 1
                        continue
                self.counts[kernel][kind, noticed] += 1
                if not noticed:
                    self.survivors.append((kernel, kind, index, was, op.text, item.name))
                    print("survives:", *self.survivors[-1], file=sys.stderr, flush=True)
            device.programs[text] = original
        device.programs.clear()
        if self._fails(item):
            self.failed.append(f"{item.nodeid} after its mutants")
        return True

    def _chosen(self, kernel: str, program: Program) -> list[tuple[str, int, Instruction]]:
        left = self.each - sum(self.counts[kernel].values())
        left = min(left, -(-self.each // 2))  # of one test
        by_kind = defaultdict(list)
        for mutant in mutants(program):
            by_kind[mutant[0]].append(mutant)
        chosen = []
        for i, kind in enumerate(sorted(by_kind, key=lambda k: len(by_kind[k]))):
            share = -(-left // (len(by_kind) - i))
            some = self.random.sample(by_kind[kind], min(share, len(by_kind[kind])))
            left -= len(some)
            chosen += some
        return chosen

    @staticmethod
    def _fails(item: pytest.Item) -> bool:
        item._initrequest()  # runs a test again, with fixtures of its own
        reports = runtestprotocol(
            item, log=False, nextitem=item.session
        )  # fixtures of the session stay
        return any(report.outcome != "passed" for report in reports)


def main(arguments: list[str] | None = None) -> int:
    """Run; exit status 1 if a test fails as it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutants", type=int, default=400, help="at most so many in all")
    parser.add_argument("--ptx", default="sm_80", help="architecture: sm_80, sm_90")
    parser.add_argument("--json", help="file for the changes that are not noticed")
    options = parser.parse_args(arguments)
    mutations = Mutations(-(-options.mutants // len(TESTS)))
    only = ["-k", "not torch", "-m", "not slow and not nightly"]
    plugins = ["-p", "tests.ptx.plugin", "-p", "no:cacheprovider", "--ptx", options.ptx]
    tests = [f"tests/kernels/{name}" for name in TESTS]
    pytest.main(["-q", "--no-summary", *plugins, *only, *tests], plugins=[mutations])
    noticed, total = 0, 0
    for kernel, counts in sorted(mutations.counts.items()):
        seen = sum(n for (_, good), n in counts.items() if good)
        print(f"{kernel:28} {seen} of {sum(counts.values())}", dict(counts))
        noticed, total = noticed + seen, total + sum(counts.values())
    print(f"{noticed} of {total} noticed; tests that failed unchanged: {mutations.failed}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(mutations.survivors, file, indent=1)
    return bool(mutations.failed)


if __name__ == "__main__":
    sys.exit(main())
