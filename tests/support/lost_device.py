"""A failed test must not take others with it: a device that an illegal access made useless, and a
test that hangs, end their process.

Under xdist the worker is replaced; without it pytest stops, and `bench.gpu` runs what is left in a
new process. Environment variables, which `bench.gpu` sets: QUIRE_TEST_OUTCOMES, a file that gets a
line of JSON when a test starts and when it ends; QUIRE_TESTS_DONE, a file of tests that are left
out; QUIRE_TEST_SECONDS, after which a test hangs: where is printed, and its process ends.
"""

import contextlib
import faulthandler
import json
import os
import sys
from pathlib import Path

import pytest

LOST = 70  # exit status


def device_answers():
    """True if CUDA still works in this process, if it was used at all."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device is lost: {error}", file=sys.stderr, flush=True)
        return False
    return True


class LostDevice:
    """The plugin."""

    def __init__(self, config):
        self.worker = hasattr(config, "workerinput")
        self.failed = False
        self.lost = False
        self.seconds = float(os.environ.get("QUIRE_TEST_SECONDS", 0))
        # What pytest captures is lost with the process; it does not capture yet.
        self.stderr = os.dup(2) if self.seconds else None
        file = os.environ.get("QUIRE_TEST_OUTCOMES")
        self.file = None if file is None or self.worker else Path(file)
        self.outcomes = {}

    def pytest_collection_modifyitems(self, config, items):
        if file := os.environ.get("QUIRE_TESTS_DONE"):
            done = set(Path(file).read_text(encoding="utf-8").splitlines())
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
            items[:] = [item for item in items if item.nodeid not in done]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """Of pytest-xdist: what is sent to a worker that has just ended must not end all others."""
        send = node.sendcommand

        def sendcommand(name, **arguments):
            with contextlib.suppress(OSError):
                send(name, **arguments)

        node.sendcommand = sendcommand

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        self.failed |= report.failed

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self.failed = False
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.stderr)
        yield
        if self.seconds:
            faulthandler.cancel_dump_traceback_later()
        if self.failed and not device_answers():
            if self.worker:
                os._exit(LOST)
            self.lost = True
            item.session.shouldstop = "the device is lost"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.lost:
            session.exitstatus = LOST

    def pytest_runtest_logstart(self, nodeid, location):
        self._write(nodeid, "unfinished")

    def pytest_runtest_logreport(self, report):
        """Called for each phase of a test, and once more for one whose worker has ended."""
        outcome = self.outcomes.get(report.nodeid, "passed")
        if report.failed:
            outcome = "failed" if report.when in ("call", "???") else "error"
        elif report.skipped:
            outcome = "skipped"
        self.outcomes[report.nodeid] = outcome
        if report.when in ("teardown", "???"):
            self._write(report.nodeid, outcome)

    def _write(self, nodeid, outcome):
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(json.dumps({"test": nodeid, "outcome": outcome}) + "\n")


def pytest_configure(config):
    config.pluginmanager.register(LostDevice(config), "lost-device")
