"""Shared by all programs: Ctrl-C at any moment, errors in one line, and types of options.

A module with a ``main`` is run through `run`, from a place above the imports that take long, so
that these are guarded too::

    if __name__ == "__main__":
        from quire.models.command import run

        run("quire.models.generate")

Exit status: 2 after an error, with the reason on stderr; 130 after Ctrl-C; 141 when the reader of
the output has gone.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

REFUSED, INTERRUPTED, UNREAD = 2, 130, 141  # the last two as a shell reports SIGINT and SIGPIPE
MAX_INTEGER = 2**31 - 1
# More would take minutes to allocate, or to refuse.
MAX_PAGES, MAX_TOKENS, MAX_DRAFTS = 2**24, 2**20, 128

Main = Callable[[Sequence[str] | None], int]


def run(module: str) -> NoReturn:
    """Import ``module`` and end the process with the exit status of its ``main``.

    While modules are imported, and while Python ends, Ctrl-C ends the process at once: an
    exception raised there may be lost in a callback. Where SIGINT is ignored, as under ``nohup``,
    it stays so.
    """
    guarded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if guarded:
            signal.signal(signal.SIGINT, _end)
        try:
            main: Main = import_module(module).main
        except ModuleNotFoundError as error:
            _say(f"error: {error}")
            sys.exit(REFUSED)
        if guarded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main(None)
        if guarded:
            signal.signal(signal.SIGINT, _end)
    except KeyboardInterrupt:  # between the lines above
        _end()
    sys.exit(status)


def program(main: Main) -> Main:
    """Turn exceptions of a ``main`` into the exit statuses of this file; flush its output."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        try:
            status = main(argv)
            if sys.stdout:
                sys.stdout.flush()  # a full disk shows here, not when Python ends
            return status
        except KeyboardInterrupt:
            _say("interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            _drop_output()
            return UNREAD
        except Exception as error:
            # torch has no type of its own for a failed allocation on a CPU.
            if not isinstance(error, _refusals()) and "DefaultCPUAllocator" not in str(error):
                raise
            _say(f"error: {str(error) or type(error).__name__}")
            _drop_output()
            return REFUSED

    return guarded


class Parser(argparse.ArgumentParser):
    """Parser of ``python -m name``, or of a ``quire`` command.

    Its errors are ValueErrors, which `program` prints.
    """

    def __init__(self, name: str, description: str | None, **options: object) -> None:
        prog = f"python -m {name}"
        if sys.argv[0].startswith("quire "):
            prog, description = sys.argv[0], (description or "").replace(prog, sys.argv[0])
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,  # type: ignore[arg-type]
        )

    def error(self, message: str) -> NoReturn:
        name, colon, rest = message.removeprefix("argument --").partition(": ")
        raise ValueError(name.replace("-", "_") + colon + rest if colon else message)


class Refused(argparse.ArgumentTypeError, ValueError):
    """A refused value of an option; argparse puts the option's name in front."""


def integer(least: int = 1, most: int = MAX_INTEGER) -> Callable[[str], int]:
    """The type of an option: an int in least .. most. Raises `Refused`."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            if least <= (value := int(text)) <= most:
                return value
        bounds = f">= {least}" if most == MAX_INTEGER else f"in {least}..{most}"
        raise Refused(f"expected an int {bounds}, got {text:.40}")

    return parse


def threads(text: str) -> int:
    """The type of an option: CPU threads, up to the processors or torch's own number."""
    import torch

    return integer(1, max(os.cpu_count() or 1, torch.get_num_threads()))(text)


def number(least: float = 0.0, *, above: bool = False) -> Callable[[str], float]:
    """The type of an option: a finite number >= least, or > least. Raises `Refused`."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            value = float(text)
            if math.isfinite(value) and (value > least or (value == least and not above)):
                return value
        raise Refused(
            f"expected a finite number {'>' if above else '>='} {least:g}, got {text:.40}"
        )

    return parse


def output_file(text: str) -> Path:
    """The type of an option: a file that can be written; a missing one is not created."""
    path = Path(text)
    try:
        is_new = not path.exists()
        if is_new or path.is_file() or path.is_dir():  # opening a pipe would wait
            path.open("ab").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise Refused(
            f"expected a file that can be written, got {text!r}: {_reason(error)}"
        ) from error
    return path


def input_file(text: str) -> Path:
    path = Path(text)
    try:
        if not path.is_fifo():
            path.open("rb").close()
    except (OSError, ValueError) as error:
        raise Refused(
            f"expected a file that can be read, got {text!r}: {_reason(error)}"
        ) from error
    return path


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _refusals() -> tuple[type[BaseException], ...]:
    """Errors that are no defect of the program, and so need no traceback."""
    memory = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    return (ValueError, NotImplementedError, ImportError, OSError, MemoryError, memory)


def _drop_output() -> None:
    """Drop output that cannot be written, or Python complains again when it closes stdout."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _end(*_: object) -> NoReturn:
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
