"""What Triton's own launcher sends to a driver, recorded by a stand-in for it: the kernels that are
compiled offline, with the same bytes from a remembered call as from a first one."""

import json
import os
from pathlib import Path

import pytest

from quire.bench import overhead
from quire.kernels.common.arch import named
from tests.support.budgets import ordinary
from tests.support.forked import printed
from tests.support.recording import session
from tests.support.recording.driver import missing
from tests.support.shared import once_a_run

ROOT = Path(__file__).resolve().parents[3]
CALLS = list(overhead.calls("meta"))
if missing():
    pytest.skip(missing(), allow_module_level=True)


def record(tmp_path_factory, arch):
    def make(folder):
        # Triton launches only where it does not interpret.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        code = "import sys; from tests.support.recording.session import main; main(*sys.argv[1:])"
        found = printed(code, str(folder), arch, cwd=ROOT, env=environment)
        (folder / "recorded.json").write_text(found)

    folder = once_a_run(tmp_path_factory, f"recorded_launches_{arch}", make)
    return json.loads((folder / "recorded.json").read_text())


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    return record(tmp_path_factory, "sm_90")


@pytest.fixture(scope="session", params=["gfx942", "gfx1100"])
def recorded_hip(tmp_path_factory, request):
    return record(tmp_path_factory, request.param) | {"lanes": named(request.param).lanes}


def kernels(launches):
    return [kernel for kernel, _, _ in launches]


def on_stream(launches, stream):
    """The same launches on another stream, the fourth word of what is said of a launch's shape."""
    shapes = [(kernel, shape.split(" "), sent) for kernel, shape, sent in launches]
    return [[k, " ".join([*shape[:3], stream, shape[4]]), sent] for k, shape, sent in shapes]


@pytest.mark.parametrize("call", CALLS)
def test_a_first_call_launches_what_is_compiled_offline(recorded, call):
    found = recorded["calls"][call]
    assert found["offline"] and kernels(found["first"]) == found["offline"]


@pytest.mark.parametrize("call", CALLS)
def test_a_remembered_call_sends_the_bytes_of_a_first_one(recorded, call):
    found = recorded["calls"][call]
    assert found["again"] == found["bound"] == found["first"]
    assert found["other bound"] == found["other first"]
    assert kernels(found["other first"]) == found["offline"]
    first, stream = found["first"], found["stream"]
    assert stream != first and stream == on_stream(first, stream[0][1].split(" ")[3])


@pytest.mark.parametrize("call", CALLS)
def test_a_third_call_is_not_dispatched(recorded, call):
    """Its launches are bound: neither it nor one on another stream asks Triton what to launch."""
    assert recorded["calls"][call]["dispatched"] == 0


@pytest.mark.parametrize("call", CALLS)
def test_tensors_elsewhere_change_addresses_alone(recorded, call):
    """An address is a parameter of 8 bytes, or the first 8 of a tensor map of 128."""
    found = recorded["calls"][call]
    changed = 0
    for (_, shape, sent), (_, other_shape, other) in zip(
        found["first"], found["other first"], strict=True
    ):
        assert other_shape == shape
        for value, moved in zip(sent, other, strict=True):
            if value != moved:
                changed += 1
                assert len(value) in (16, 256) and value[16:] == moved[16:]
    assert changed


@pytest.mark.parametrize("call", CALLS)
def test_a_tensor_between_16_bytes_gets_a_kernel_that_expects_no_more(recorded, call):
    """Such a call looks like the one before it, which a kernel of aligned tensors served."""
    found = recorded["calls"][call]
    others = 0
    for offline, first, again, bound in found["moved"]:
        assert kernels(first) == offline
        assert again == bound == first
        others += offline != found["offline"]
    assert others


def test_launches_that_are_observed_are_dispatched(recorded):
    """By hooks, by another ``run``, or for another compilation; and each by an unknown Triton."""
    found = recorded["observed"]
    ((kernel, _, _),) = found["first"]
    assert found["hooks"] == [kernel] * 2
    assert found["run"] == 1
    assert found["debug"] == found["debug first"] != found["first"]
    assert found["after"] == found["first"]
    assert found["unknown"] == 3


def test_overhead_times_whole_calls_where_there_is_a_driver(recorded):
    assert [row["wrapper"] for row in recorded["overhead"]] == CALLS
    for row in recorded["overhead"]:
        assert row["whole_us"] == pytest.approx(row["again_us"] + row["launch_us"])
        assert 0 < row["whole_us"] < row["first_us"]


def test_parameters_have_the_sizes_that_compiled_kernels_take(recorded):
    assert len(recorded["compiled"]) == len(session.COMPILED)
    for name, compiled, told in recorded["compiled"]:
        assert compiled == told, name


# On AMD: Triton's launcher for HIP, and a stand-in for its library.


@ordinary("[gfx942")
@pytest.mark.parametrize("call", CALLS)
def test_calls_on_amd_launch_what_is_compiled_offline_and_then_without_triton(recorded_hip, call):
    """In programs of whole wavefronts, on the stream of the moment; a third call is bound."""
    found = recorded_hip["calls"][call]
    first, stream = found["first"], found["stream"]
    assert found["offline"] and kernels(first) == found["offline"]
    assert found["again"] == found["bound"] == first and found["dispatched"] == 0
    assert found["other bound"] == found["other first"]
    assert stream != first and stream == on_stream(first, stream[0][1].split(" ")[3])
    assert all(int(shape.split(" ")[1]) % recorded_hip["lanes"] == 0 for _, shape, _ in first)
    for offline, moved, again, bound in found["moved"]:
        assert kernels(moved) == offline and again == bound == moved


@ordinary("[gfx942")
def test_parameters_on_amd_have_the_sizes_that_compiled_kernels_take(recorded_hip):
    assert len(recorded_hip["compiled"]) == len(session.COMPILED) - 1  # no tensor descriptors
    for name, compiled, told in recorded_hip["compiled"]:
        assert compiled == told, name
