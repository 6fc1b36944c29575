"""Programs in processes of their own, forked from one that has loaded torch: to load it takes longer than most of them."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

# What a program raises ends the child as it ends a process of Python, atexit and all.
SERVER = """
import json, os, sys
import torch
for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(os.waitpid(child, 0)[1], flush=True)
else:
    sys.exit()
asked = json.loads(line)
for number, name in enumerate(("stdin", "stdout", "stderr")):
    file = os.open(asked[name], os.O_WRONLY if number else os.O_RDONLY)
    os.dup2(file, number)
    os.close(file)
sys.stdin = open(0, closefd=False)
os.environ.clear()
os.environ.update(asked["env"])
os.chdir(asked["cwd"])
sys.path[:1] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
sys.argv = ["-c", *asked["arguments"]]
exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
"""

# The code that runs a file, its first argument, as ``python FILE`` does.
RUN = "import runpy, sys; sys.argv[:1] = []; runpy.run_path(sys.argv[0], run_name='__main__')"


def forked(
    code: str,
    *arguments: str,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code arguments`` as `subprocess.run` does, with its output as text.

    It finds torch imported, and no package of this repository. Without ``cwd`` and ``env`` it has
    those of the tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = {name: str(Path(folder, name)) for name in ("stdin", "stdout", "stderr")}
        for name in names.values():
            Path(name).write_text(input if name.endswith("stdin") else "")
        asked = {"code": code, "arguments": arguments, "cwd": str(cwd or Path.cwd())}
        asked["env"] = dict(os.environ if env is None else env)
        server = _server()
        print(json.dumps(asked | names), file=server.stdin, flush=True)
        status = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        out, err = (Path(names[name]).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(["-c", *arguments], status, out, err)


def printed(code: str, *arguments: str, **more) -> str:
    """The output of a program that ended with status 0."""
    done = forked(code, *arguments, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cache
def _server() -> subprocess.Popen[str]:
    """That of this process; it ends when its input does."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=tempfile.gettempdir(), env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    atexit.register(server.communicate)  # closes its input, and waits
    return server
