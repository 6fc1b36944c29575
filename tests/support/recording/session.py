"""What each public operation sends to a driver, without a GPU.

    python -m tests.support.recording.session FOLDER [ARCH]    # for what is built; sm_90, gfx942 or gfx1100

Prints one JSON object, of another GPU than sm_90 with "calls" and "compiled" alone: {"triton": its version,
"calls": {a call of ``bench.overhead``: what it sent, as ``observe`` returns it},
"compiled": [[kernel, bytes of its parameters as compiled, those that the launcher is told]],
"observed": what ``observers`` returns, "overhead": rows of ``bench.overhead``}.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bench  # noqa: F401  makes `quire` importable where it is not installed
from quire.kernels.common.arch import named
from quire.kernels.common.launching import without_buffer_operations
from tests.support.recording.driver import Driver, offline, parameters

# Static cases that compile in a moment, the last of them with tensor descriptors.
COMPILED = {"_merge_partials_kernel": False, "_gated_product_kernel": False, "prefill_kernel": True}
PARAMETER = re.compile(r"\.param .*?\.[a-z](\d+) .*?(?:\[(\d+)\])?[,\n]")  # of PTX
ARGUMENT = re.compile(r"^\s+(?:- )?\.size:\s+(\d+)$", re.MULTILINE)  # of AMD's metadata
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty")


class SameMemory(TorchDispatchMode):
    """What a call makes lies where that of earlier calls lay, so that launches can be compared."""

    def __init__(self):
        super().__init__()
        self.kept, self.made = {}, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ not in EMPTY:
            return out
        key = out.shape, out.stride(), out.dtype
        self.made[key] += 1
        return self.kept.setdefault((*key, self.made[key]), out)


class Session:
    """Calls over a driver that records them."""

    def __init__(self, driver: Driver):
        from quire.kernels.common import launching

        self.driver, self.memory, self.prepared = driver, SameMemory(), []
        launch = launching.launch

        def noted(kernel, grid, arguments):
            self.prepared.append(launching.Launch(kernel, grid, arguments))
            return launch(kernel, grid, arguments)

        launching.launch = noted

    def again(self, call):
        """What a call launches that may be like an earlier one, none if it is refused.

        ``prepared`` are the launches that Triton dispatches.
        """
        self.prepared.clear()
        self.memory.made.clear()
        try:
            with self.memory:
                call()
        except ValueError:
            assert not self.driver.launches()
        return self.driver.launches()

    def first(self, call):
        """What a call like none before launches, and what is compiled offline for that."""
        from quire.kernels.common import launch_cache

        launch_cache.clear()
        launches = self.again(call)
        launched = [launch for launch in self.prepared if min(launch.grid) > 0]
        return launches, [offline(launch, self.driver.arch) for launch in launched]


def observe(session: Session, call, other):
    """Launches of a call, and of the same one over ``other`` tensors.

    Returns:
        {"offline": kernels that are compiled for it, "first": what a first call launches,
        "again": what the second one like it does, "bound": what the third one does,
        "stream": a fourth one on another stream, "dispatched": launches of the latter two that
        Triton dispatched, "other first", "other bound": over the other tensors,
        "moved": [[kernels compiled for that, a first call, one like aligned ones before, one like
        that]], of each tensor moved by an element}
    """
    found = {}
    found["other first"], _ = session.first(other)
    found["first"], found["offline"] = session.first(call)
    found["again"] = session.again(call)
    found["bound"] = session.again(call)
    found["dispatched"] = len(session.prepared)
    session.driver.stream += 16
    found["stream"] = session.again(call)
    found["dispatched"] += len(session.prepared)
    session.driver.stream -= 16
    found["other bound"] = session.again(other)
    found["moved"] = []
    for tensor in tensors_of(call.__closure__):
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        memory = tensor.untyped_storage()
        moved = type(memory)(memory.nbytes() + 64)
        try:
            session.first(call)
            session.again(call)
            tensor.set_(moved, place[0] + 1, *place[1:])
            again, bound = session.again(call), session.again(call)
            first, kernels = session.first(call)
            found["moved"].append([kernels, first, again, bound])
        finally:
            tensor.set_(memory, *place)
    return found


def observers(session: Session, call):
    """Launches of a bound call while Triton's settings ask for its dispatch, and after that.

    Returns:
        {"first": what a first call launches, "hooks": what hooks were told of bound calls,
        "run": how often its launches ran through another ``JITFunction.run``, "debug": what it launches where
        kernels are debugged, "debug first": what a first call does, "after": what it launches
        without all that, "unknown": how many of three calls an unknown version dispatched}
    """
    from triton import knobs
    from triton.runtime import JITFunction

    from quire.kernels.common import bound_launch

    def run(*args, **kwargs):
        found["run"] += 1
        return original(*args, **kwargs)

    found = {"hooks": [], "run": 0, "unknown": 0, "first": session.first(call)[0]}
    session.again(call)
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(note := lambda metadata: found["hooks"].append(metadata.get()["name"]))
        session.again(call)
        hook.remove(note)
    original, JITFunction.run = JITFunction.run, run
    session.again(call)
    JITFunction.run = original
    knobs.runtime.debug = True
    found["debug"] = session.again(call)
    found["debug first"], _ = session.first(call)
    session.again(call)
    knobs.runtime.debug = False
    found["after"] = session.again(call)
    versions, bound_launch.VERSIONS = bound_launch.VERSIONS, ("2.",)
    session.first(call)
    for _ in range(3):
        session.again(call)
        found["unknown"] += len(session.prepared)
    bound_launch.VERSIONS = versions
    return found


def tensors_of(value):
    """Those within cells, containers and pages."""
    from quire.kernels.common.call_keys import PAGES

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif hasattr(value, "cell_contents"):
        value = [value.cell_contents]
    elif isinstance(value, PAGES):
        value = [value.data]
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in tensors_of(part)]


def compile_offline(arch):
    """(kernel, bytes of its parameters by its PTX or its metadata, those that the launcher is told)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.tools.tensor_descriptor import TensorDescriptor

    from quire.bench.static.cases import all_cases
    from quire.bench.static.compiling import specialise

    wanted = {
        name: described for name, described in COMPILED.items() if arch.descriptors or not described
    }
    for case in all_cases().values():
        for launch in case.launches(arch) if wanted else ():
            name = launch.kernel.__name__
            described = any(isinstance(v, TensorDescriptor) for v in launch.arguments.values())
            if wanted.get(name) is not described:
                continue
            del wanted[name]
            signature, constants, attributes, options = specialise(launch)
            source = ASTSource(launch.kernel, signature, constants, attributes)
            with without_buffer_operations():
                compiled = triton.compile(source, target=GPUTarget(*arch.target), options=options)
            if arch.maker == "amd":
                sizes = [int(size) for size in ARGUMENT.findall(compiled.asm["amdgcn"])]
            else:
                head = compiled.asm["ptx"].split(".entry", 1)[1].split(")", 1)[0]
                found = PARAMETER.findall(head)
                sizes = [int(count or 1) * int(bits) // 8 for bits, count in found]
            yield name, sizes, [*parameters(signature), 8, 8]


def main(folder: str, name: str = "sm_90") -> None:
    import triton

    arch = named(name)
    compiled = list(compile_offline(arch))
    driver = Driver(Path(folder), arch)
    from quire.bench import overhead

    calls, others = overhead.calls(), overhead.calls()
    driver.tensors_are_of_a_gpu()
    session = Session(driver)
    observed = {name: observe(session, call, others[name]) for name, call in calls.items()}
    found = {"calls": observed, "compiled": compiled}
    if arch.maker == "nvidia":
        found["observed"] = observers(session, calls["merge_partials"])
        driver.record_nothing()
        found["overhead"] = overhead.measure(1, 20, calls, launched=True)
    print(json.dumps({"triton": triton.__version__, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
