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
from dataclasses import dataclass, replace

import pytest
from _pytest.runner import runtestprotocol

import bench  # noqa: F401  makes `quire` importable where it is not installed
from quire.bench.gpu.sanitize import KERNEL_TESTS
from tests.ptx.instructions import Compiler
from tests.ptx.machine import Program
from tests.ptx.parse import Instruction, parse, vector

NOTHING = Instruction("nothing", ["membar", "cta"], [], None)
_ADDRESS = re.compile(r"\[\s*(%?\w+)(?:\s*\+\s*(-?\d+))?\s*\]")
# Added to the descriptor of a matrix of wgmma: 16 bytes to its start or between its atoms, or to the
# code of its swizzle.
DESCRIPTORS = (1, 1 << 32, 1 << 62)


@dataclass
class Mutant:
    """One instruction that has run, and what stands in its place.

    Attributes:
        useful: True if dropping the instruction is no such change already: a test that passes without it
            does not use what it computes.
    """

    kind: str
    index: int
    instead: list[Instruction]
    useful: bool = False

    def program(self, text: str, instead: list[Instruction] | None = None) -> Program:
        """The changed program; instead: other instructions at its place."""
        kernel = parse(text)
        instead = instead or self.instead
        kernel.add_register("%moved", 8)
        kernel.instructions[self.index : self.index + 1] = instead
        for label, at in kernel.labels.items():
            kernel.labels[label] = at + (len(instead) - 1) * (at > self.index)
        return Compiler(kernel).program


def mutants(program: Program) -> Iterator[Mutant]:
    """All changes of one instruction that has run."""
    for index, op in enumerate(program.kernel.instructions):
        if index not in program.active:
            continue
        if op.name in ("bar", "fence") or "fence" in op.parts:
            yield Mutant("barrier" if op.name == "bar" else "fence", index, [NOTHING])
        elif "wait_group" in op.parts:
            yield Mutant("wait", index, [NOTHING])
            yield Mutant("wait", index, [_with(op, 0, str(int(op.operands[0], 0) + 1))])
        elif op.name == "mma" or "mma_async" in op.parts:
            for i in (1, 2):
                parts = vector(op.operands[i])
                if len(parts) > 1:
                    swapped = f"{{{', '.join([parts[1], parts[0], *parts[2:]])}}}"
                    yield Mutant("operands", index, [_with(op, i, swapped)], True)
                    continue
                for more in DESCRIPTORS:
                    add = Instruction("", ["add", "u64"], ["%moved", parts[0], str(more)], None)
                    yield Mutant("descriptor", index, [add, _with(op, i, "%moved")], True)
        elif op.name in ("ld", "st", "cp", "ldmatrix", "stmatrix") and "param" not in op.parts:
            for i, operand in enumerate(op.operands):
                if found := _ADDRESS.fullmatch(operand):
                    moved = f"[{found[1]}+{int(found[2] or 0) + 16}]"
                    yield Mutant("address", index, [_with(op, i, moved)], True)


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
        if device:
            device.programs.clear()
        if self._fails(item):
            self.failed.append(item.nodeid)
            return True
        device = item.config.ptx_device
        for text, original in list(device.programs.items()):
            kernel = original.kernel.name
            for mutant in self._chosen(kernel, original):
                device.programs[text] = mutant.program(text)
                noticed = self._fails(item)
                kind = mutant.kind
                if not noticed and mutant.useful:
                    device.programs[text] = mutant.program(text, [NOTHING])
                    if not self._fails(item):
                        self.counts[kernel]["none", True] += 1
                        continue
                self.counts[kernel][kind, noticed] += 1
                if not noticed:
                    was = original.kernel.instructions[mutant.index].text
                    now = mutant.instead[-1].text
                    self.survivors.append((kernel, kind, mutant.index, was, now, item.name))
                    print("survives:", *self.survivors[-1], file=sys.stderr, flush=True)
            device.programs[text] = original
        device.programs.clear()
        if self._fails(item):
            self.failed.append(f"{item.nodeid} after its mutants")
        return True

    def _chosen(self, kernel: str, program: Program) -> list[Mutant]:
        left = self.each - sum(self.counts[kernel].values())
        left = min(left, -(-self.each // 2))  # of one test
        by_kind = defaultdict(list)
        for mutant in mutants(program):
            by_kind[mutant.kind].append(mutant)
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
    mutations = Mutations(-(-options.mutants // len(KERNEL_TESTS)))
    only = ["-k", "not torch", "-m", "not slow and not nightly"]
    plugins = ["-p", "tests.ptx.plugin", "-p", "no:cacheprovider", "--ptx", options.ptx]
    tests = [f"tests/kernels/{name}" for name in KERNEL_TESTS]
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
