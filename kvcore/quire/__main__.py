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
    "bench": ("quire.bench.prefill_decode.__main__", "generate, check the tokens, report speed"),
}


def main() -> NoReturn:
    """Run the program that the first argument names, with the arguments after it."""
    lines = [f"  {name:10}{about}" for name, (_, about) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="quire",
        usage="quire [--version] COMMAND [OPTIONS]",
        description="\n".join(["commands; COMMAND --help has the options:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    first = sys.argv[1:2] or ["--help"]
    if first[0] not in COMMANDS:
        if first[0] not in ("-h", "--help", "--version"):
            expected = ", ".join(COMMANDS)
            print(f"error: command: expected one of {expected}, got {first[0]!r}", file=sys.stderr)
            sys.exit(REFUSED)
        parser.parse_args(first)
    sys.argv = [f"quire {first[0]}", *sys.argv[2:]]
    run(COMMANDS[first[0]][0])


if __name__ == "__main__":
    main()
