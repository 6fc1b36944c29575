"""What all programs here share.

Ctrl-C at any moment, errors in one line, and options that are checked before any work starts.

A module with a ``main`` is run through `run`, from a place above the imports that take long, so
that these are guarded too::

    if __name__ == "__main__":
        from quire.models.command import run

        run("quire.models.generate")

Exit status: 2 for what cannot be done, with the reason on stderr; 130 after Ctrl-C; 141 when nobody
reads the output any more.
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
# What is more takes longer to allocate, or to find that it cannot be, than anybody waits.
MAX_PAGES, MAX_TOKENS, MAX_DRAFTS = 2**24, 2**20, 128

Main = Callable[[Sequence[str] | None], int]


def run(module: str) -> NoReturn:
    """Imports ``module`` and ends the process with the exit status of its ``main``.

    While modules are imported, and while Python ends, Ctrl-C ends the process at once: there is
    nothing to tidy up, and an exception raised there may be lost in somebody's callback. Where
    SIGINT is ignored, as under ``nohup``, it stays so.
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
    """Gives a ``main`` the exit statuses of this file for what it raises.

    What it prints is written when it returns.
    """

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
            # torch has no type of its own for what a CPU cannot allocate.
            if not isinstance(error, _refusals()) and "DefaultCPUAllocator" not in str(error):
                raise
            _say(f"error: {str(error) or type(error).__name__}")
            _drop_output()
            return REFUSED

    return guarded


class Parser(argparse.ArgumentParser):
    """Of the command line of ``python -m name``.

    What it refuses is a ValueError, so that `program` says it in one line.
    """

    def __init__(self, name: str, description: str | None, **options: object) -> None:
        super().__init__(
            prog=f"python -m {name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,  # type: ignore[arg-type]
        )

    def error(self, message: str) -> NoReturn:
        """Raises ValueError: ``name: expected ..., got ...``."""
        name, colon, rest = message.removeprefix("argument --").partition(": ")
        raise ValueError(name.replace("-", "_") + colon + rest if colon else message)


class Refused(argparse.ArgumentTypeError, ValueError):
    """What an option's type does not take; the message needs the option's name in front."""


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
    """The type of an option.

    CPU threads, at most as many as there are processors, or as torch takes unasked.
    """
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
    """The type of an option: a file that can be written.

    One that is not there is not left behind.
    """
    path = Path(text)
    try:
        if path.is_file() or not path.exists():
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink()
        elif path.is_dir() or not os.access(path, os.W_OK):
            raise (
                IsADirectoryError(None, "Is a directory")
                if path.is_dir()
                else PermissionError(None, "Permission denied")
            )
    except (OSError, ValueError) as error:
        raise Refused(
            f"expected a file that can be written, got {text!r}: {_reason(error)}"
        ) from error
    return path


def input_file(text: str) -> Path:
    """The type of an option: a file that can be read."""
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
    """What says that something cannot be done.

    Anything else is a defect, which keeps its traceback.
    """
    memory = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    return (ValueError, NotImplementedError, ImportError, OSError, MemoryError, memory)


def _drop_output() -> None:
    """Forgets what cannot be written.

    Else Python complains once more when it closes stdout at exit.
    """
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
