"""The command `quire`: a help text, a version, and an error for a command that is not there."""

from __future__ import annotations

import pytest

from quire import __version__
from quire.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "status", "said", "error"),
    [
        ([], 0, "commands; COMMAND --help has the options:", ""),
        (["--version"], 0, f"quire {__version__}\n", ""),
        (["talk"], 2, "", "error: command: expected one of chat, generate, bench, got 'talk'\n"),
        (["generate", "--help"], 0, "usage: quire generate", ""),
    ],
)
def test_the_first_argument_names_a_program(monkeypatch, capsys, arguments, status, said, error):
    monkeypatch.setattr("sys.argv", ["quire", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (status, error) and said in out
