"""The command `quire`: a help text, a version, and an error for a command that is not there."""

from __future__ import annotations

import pytest

from quire import __version__
from quire.__main__ import main
from quire.models import doctor

NAMES = "chat, generate, memory, doctor, bench e2e, bench cache, bench kernels, bench replay"


@pytest.mark.parametrize(
    ("arguments", "status", "said", "error"),
    [
        ([], 0, "commands; COMMAND --help has the options:", ""),
        (["--version"], 0, f"quire {__version__}\n", ""),
        (["talk"], 2, "", f"error: command: expected one of {NAMES}, got 'talk'\n"),
        (["generate", "--help"], 0, "usage: quire generate", ""),
        (["bench"], 0, "  bench replay", ""),
        (["bench", "talk"], 2, "", f"error: command: expected one of {NAMES}, got 'bench talk'\n"),
        (["bench", "replay", "--help"], 0, "    quire bench replay --workload round-robin", ""),
        # 64 blocks of 16 tokens, and of two rings the window, the open block and the next one.
        (["memory", "--model", "gemma4-tiny", "--context", "1024"], 0, "           1024       70 ", ""),
        (["memory", "--model", "gemma4-tiny", "--context", "9999"], 2, "", "error: context: expected at most 4096, got 9999\n"),
        (["doctor"], 0, "attention is right with impl=", ""),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("ctrl_c")
def test_the_first_argument_names_a_program(monkeypatch, capsys, arguments, status, said, error):
    monkeypatch.setattr("sys.argv", ["quire", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (status, error) and said in out


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda q, *_, **__: q * 2, "attention differs from torch's by "),
        (lambda *_, **__: 1 / 0, "attention fails: ZeroDivisionError: division by zero"),
    ],
)
def test_doctor_runs_attention(monkeypatch, capsys, made, said):
    monkeypatch.setattr(doctor.kernels, "paged_attention", made)
    assert doctor.main([]) == 1
    assert said in capsys.readouterr().out
