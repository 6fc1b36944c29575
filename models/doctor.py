"""Print what of quire works on this machine, and how to get the rest.

    quire doctor

Exit status 1 if an attention call gives a wrong result or fails.
"""

from __future__ import annotations

if __name__ == "__main__":
    from .command import run

    run("quire.models.doctor")

import inspect
import platform
import re
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires, version

import torch

from quire import kernels

from .command import Parser, program

DISTRIBUTION = "quire-attention"
INDENT = " " * 10
EXTRA = re.compile(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]")


@program
def main(argv: Sequence[str] | None = None) -> int:
    _parser().parse_args(argv)
    print(f"software  quire {version_of(DISTRIBUTION)}, Python {platform.python_version()}, "
          f"torch {torch.__version__}, Triton {version_of('triton')}")  # fmt: skip
    works = True
    for line, right in devices():
        print(line, flush=True)
        works = works and right
    functions = {name: getattr(kernels, name) for name in kernels.__all__}
    operators = [n for n, f in functions.items() if "impl" in inspect.signature(f).parameters]
    print(f"operators {len(operators)}, each with impl='triton' (default for CUDA tensors) and "
          "impl='torch' (default for CPU tensors):")  # fmt: skip
    print(textwrap.fill(", ".join(operators), 100, initial_indent=INDENT, subsequent_indent=INDENT))
    print("\n".join(extras()))
    return 0 if works else 1


def devices() -> list[tuple[str, bool]]:
    """A line for each device, and whether attention is right on it."""
    found = []
    for i in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
        found.append((f"cuda:{i}", f"{name}, sm_{major}{minor}", "triton"))
    found.append(("cpu", platform.machine(), "torch"))
    lines = []
    for device, name, impl in found:
        problem = attention_problem(device)
        state = problem or f"attention is right with impl={impl!r}"
        lines.append((f"{device:10}{name}: {state}", problem is None))
    if len(found) == 1:
        advice = "no GPU that torch sees. Kernels run in Triton's interpreter (TRITON_INTERPRET=1)"
        lines.insert(0, (f"gpu       {advice}", True))
    return lines


def attention_problem(device: str) -> str | None:
    """Error of a small attention call on a device, in words; None if its result is right."""
    try:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(5, heads, 64, generator=generator) for heads in (4, 2, 2))
        pages = torch.zeros(2, 16, 2, 64, device=device)
        ints = {"dtype": torch.int32, "device": device}
        out = kernels.paged_attention(
            q.to(device), pages, pages, torch.tensor([[1]], **ints), torch.tensor([5], **ints),
            torch.tensor([0, 5], **ints), max_seqlen_q=5, k=k.to(device), v=v.to(device),
        )  # fmt: skip
        expected = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        error = (out.cpu() - expected[0].transpose(0, 1)).abs().max().item()
        return None if error < 0.01 else f"attention differs from torch's by {error:.3g}"
    except Exception as error:  # a broken compiler or driver may raise anything
        return f"attention fails: {type(error).__name__}: {error}"


def extras() -> list[str]:
    """A line for each optional set of packages: versions, or how to install it."""
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return [f"extras    {DISTRIBUTION} is not installed: run `pip install .` in a checkout"]
    packages: dict[str, list[str]] = defaultdict(list)
    for found in filter(None, map(EXTRA.match, requirements)):
        if found[1] not in packages[found[2]]:
            packages[found[2]].append(found[1])
    lines = []
    for extra, names in sorted(packages.items()):
        has = ", ".join(f"{name} {version_of(name)}" for name in names)
        lines.append(f"{extra:9} {has}")
        if "not installed" in has:
            lines[-1] += f": pip install '{DISTRIBUTION}[{extra}]'"
    return lines


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _parser() -> Parser:
    return Parser("quire.models.doctor", __doc__)
