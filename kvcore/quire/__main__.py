"""The command ``quire``, also as ``python -m quire``: names of programs of the other packages."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from quire import __version__
from quire.models.command import REFUSED, run

COMMANDS = {
    "chat": ("quire.models.generate", "talk to a model"),
    "generate": ("quire.models.generate", "continue a text"),
    "memory": ("quire.models.memory", "pages and bytes of a model and a context"),
    "doctor": ("quire.models.doctor", "print what works here, and how to get the rest"),
    "bench e2e": (
        "quire.bench.prefill_decode.__main__",
        "generate, check the tokens, report speed",
    ),
    "bench cache": ("quire.bench.kvcore.__main__", "time the allocator"),
    "bench kernels": ("quire.bench.kernels.__main__", "time the kernels beside others"),
    "bench replay": ("quire.bench.replay.__main__", "hit rates of a trace, by policy and pool"),
}


def main() -> NoReturn:
    """Run the program that the first words name, with the arguments after them."""
    typed = sys.argv[1:]
    num_words = 2 if typed[:1] == ["bench"] else 1
    name, options = " ".join(typed[:num_words]), typed[num_words:]
    if name in COMMANDS:
        sys.argv = [f"quire {name}", *options]
        run(COMMANDS[name][0])
    lines = [f"  {name:15}{about}" for name, (_, about) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="quire",
        usage="quire [--version] COMMAND [OPTIONS]",
        description="\n".join(["commands; COMMAND --help has the options:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    if name in ("", "bench", "bench -h", "bench --help"):
        parser.parse_args(["--help"])
    if name not in ("-h", "--help", "--version"):
        expected = ", ".join(COMMANDS)
        print(f"error: command: expected one of {expected}, got {name!r}", file=sys.stderr)
        sys.exit(REFUSED)
    parser.parse_args([name])


if __name__ == "__main__":
    main()
