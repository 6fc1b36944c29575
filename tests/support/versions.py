"""A row of the table of versions in docs/results.md, from a run of the tests.

`pytest -p tests.support.versions --versions=FILE` adds the row to FILE, as a line of JSON.
`python -m tests.support.versions FILE...` prints the table.
"""

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import distributions

PACKAGES = ("torch", "triton", "transformers", "numpy", "vllm", "sglang")
OUTCOMES = ("passed", "skipped", "failed", "error")
# Run by the Python whose packages the tests load: QUIRE_SGLANG is a folder with SGLang in it.
INSTALLED = "from tests.support.versions import installed; print(installed())"


def installed():
    """Versions of Python and of the packages that are there, as JSON."""
    path = [*sys.path, os.environ.get("QUIRE_SGLANG", "")]
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        version = next((d.version for d in distributions(name=name, path=path)), None)
        found |= {name: version} if version else {}
    return json.dumps(found)


def pytest_addoption(parser):
    parser.addoption(
        "--versions", metavar="FILE", help="add a row of versions and outcomes to FILE"
    )


def pytest_terminal_summary(terminalreporter, config):
    file = config.getoption("versions")
    if file is None or hasattr(config, "workerinput"):
        return
    python = os.environ.get("VLLM_PYTHON", sys.executable)
    asked = subprocess.run([python, "-c", INSTALLED], capture_output=True, text=True, check=True)
    outcomes = {name: len(terminalreporter.stats.get(name, ())) for name in OUTCOMES}
    row = {**json.loads(asked.stdout), "tests": " ".join(config.args), **outcomes}
    with open(file, "a") as rows:
        rows.write(json.dumps(row) + "\n")


def main(files):
    columns = ("python", *PACKAGES, "tests", *OUTCOMES)
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for file in files:
        with open(file) as rows:
            for row in map(json.loads, rows):
                print("| " + " | ".join(str(row.get(name, "")) for name in columns) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
