"""The benchmark of hand-offs: it compares outputs, and says so where they differ."""

import json
import multiprocessing
import os
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest

from quire.bench.handoff import __main__ as handoff
from quire.bench.handoff import ends


class Thread(threading.Thread):
    """Stands in for a process; torch is loaded already."""

    exitcode = 1

    def __init__(self, target, args, daemon):
        pipe, *rest = args
        own = Connection(os.dup(pipe.fileno()))  # as another process has

        def end():
            with own, suppress(SystemExit):
                target(own, *rest)

        super().__init__(target=end, daemon=daemon)

    def kill(self):
        self.join(30)


@pytest.fixture
def threads(monkeypatch):
    context = multiprocessing.get_context("spawn")
    monkeypatch.setattr(context, "Process", Thread, raising=False)
    monkeypatch.setattr(ends.torch, "set_num_threads", lambda n: None)


ARGUMENTS = ["--models", "gemma3-tiny", "--prompt-tokens", "150", "--max-tokens", "6", "--device", "cpu", "--threads", "1"]  # fmt: skip


def test_it_tells_bytes_and_times_of_both_ends(threads, tmp_path, capsys):
    assert handoff.main([*ARGUMENTS, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert (
        "gemma3-tiny     144 " in printed and "output: that of one engine, in all rows" in printed
    )
    [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["same"] and row["same_as_cold"] and row["found"] == row["num_tokens"] == 144
    assert row["sent"]["num_segments"] == row["received"]["num_segments"] == 9
    assert row["sent"]["num_bytes"].keys() == {"segment", "point", "layout", "manifest"}
    for end in (row["sent"], row["received"]):
        assert 0 < end["seconds"]["copy"] < end["seconds"]["total"] < 60


def test_another_output_is_no_result(threads, tmp_path, monkeypatch, capsys):
    generate, calls = ends._generate, []

    def wrong(engine, prompt, max_tokens):
        found = generate(engine, prompt, max_tokens)
        if max_tokens == 6:
            calls.append(found)
            if len(calls) == 1:  # the decode engine's
                found = {**found, "token_ids": [1, *found["token_ids"][1:]]}
        return found

    monkeypatch.setattr(ends, "_generate", wrong)
    assert handoff.main(ARGUMENTS) == 1
    assert "WRONG: other output than that of one engine: gemma3-tiny" in capsys.readouterr().out


def test_a_process_that_fails_is_named(threads, monkeypatch):
    def load(settings):
        raise SystemExit(1)

    monkeypatch.setattr(ends, "_load", load)
    with pytest.raises(handoff.Failed, match="ended with status 1"):
        handoff.main(ARGUMENTS)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_processes(capsys):
    assert handoff.main([*ARGUMENTS, "--models", "llama-tiny"]) == 0
    assert "same" in capsys.readouterr().out
