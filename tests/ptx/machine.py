"""Some CTAs of a launch in lockstep: a register is an array with one element a thread.

Threads have program counters of their own; those at the smallest one run together, up to the end of
the basic block, and the others wait. A register, or a value, that is equal in all threads may be a
numpy scalar instead of an array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .memory import POISON, UINT, Clocks, Fault, Global, Shared, process_memory
from .parse import Kernel, Unsupported

Mask = np.ndarray | None  # bool [threads] of those that run; None: all
Step = Callable[["Machine", Mask], None]
EXITED = 1 << 40
WARP = 32


@dataclass
class Block:
    """A basic block: steps with the index of their instruction, then at most one jump or barrier.

    Attributes:
        end: index of the first instruction after the block, where threads go that do not jump.
        jump: "", "bra", "ret" or "bar".
        guard: register of the jump's predicate, and True if it is negated; None: all threads jump.
        target: index that bra jumps to.
        barrier: of bar: its id and number of threads, 0: all.
        guarded: indices of steps with a predicate. They add themselves to `Program.active`, as all
            threads may skip them.
        ran: True once the other steps have been added there.
    """

    steps: list[tuple[int, Step]]
    end: int
    jump: str = ""
    guard: tuple[int, bool] | None = None
    target: int = EXITED
    barrier: tuple[int, ...] = ()
    guarded: tuple[int, ...] = ()
    ran: bool = False


@dataclass
class Program:
    """A kernel ready to run.

    Attributes:
        blocks: first instruction -> block.
        special: special register (as "%ctaid.x") -> index of the register that holds it.
        active: indices of the instructions that some thread has run.
        grains: bytes of the smallest access to shared memory, and store to global memory.
    """

    kernel: Kernel
    blocks: dict[int, Block]
    special: dict[str, int]
    active: set[int] = field(default_factory=set)
    grains: dict[str, int] = field(default_factory=lambda: {"shared": 16, "global": 16})


class Machine:
    """Run CTAs of one launch.

    Args:
        params: bytes of the parameters.
        ctas: their coordinates (x, y, z).
        grid: CTAs of the launch in each direction.
        threads: of a CTA, a multiple of 32.
        shared: bytes of shared memory of a CTA.
    """

    def __init__(
        self, program: Program, params: bytes, ctas, grid, threads: int, shared: int, memory: Global
    ):
        self.program, self.memory = program, memory
        self.params = np.frombuffer(params, "u1")
        self.ctas, self.threads = ctas, threads
        self.size = threads * len(ctas)
        self.lanes = np.arange(self.size)
        self.cta = self.lanes // threads
        self.thread = self.lanes % threads
        self.warp = self.thread // WARP
        self.lane = self.thread % WARP
        x, y, z = np.array(ctas).reshape(-1, 3).T
        self.owner = (1 + x + grid[0] * (y + grid[1] * z)).astype("i4")[self.cta]
        self.clocks = Clocks(len(ctas), threads // WARP)
        self.shared = Shared(self, shared, program.grains["shared"])
        # Groups that a thread has committed: of cp.async, of bulk copies, of wgmma.
        self.groups = {kind: np.zeros(self.size, "i8") for kind in ("async", "bulk", "wgmma")}
        self.mbarriers: dict = {}  # first byte in shared memory -> `bulk.Mbarrier`
        self.loads = 0  # bulk copies to shared memory so far
        self.stores: list = []  # from it under way: (thread, group, cells)
        self.asleep = False  # True if a thread waits for an mbarrier
        self.products: list = []  # wgmma under way, in order (`wgmma.Product`)
        self.fences = 0  # wgmma.fence so far
        # Of each register the value of ``fences`` when it was last written.
        self.changed = [0] * len(program.kernel.widths)
        widths = program.kernel.widths
        self.registers = [UINT.get(w, np.dtype("?")).type(POISON[w]) for w in widths]
        special = {"tid": (self.thread, 0, 0), "ntid": (threads, 1, 1), "nctaid": grid}
        special |= {"laneid": (self.lane,), "ctaid": [c[self.cta] for c in (x, y, z)]}
        if len(ctas) == 1:
            special["ctaid"] = ctas[0]
        for name, index in program.special.items():
            base, _, axis = name.lstrip("%").partition(".")
            value = special[base]["xyz".find(axis) if axis else 0]
            self.registers[index] = np.asarray(value).astype("u4")[()]
        self.at = 0

    def spread(self, value) -> np.ndarray:
        """A value as an array of all threads."""
        return value if value.ndim else np.full(self.size, value)

    def write(self, index: int, value, mask: Mask) -> None:
        """Write a register; a narrower value is extended by its sign, as its type says."""
        width = self.program.kernel.widths[index]
        if width and value.dtype.itemsize != width:
            value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{width}")
        if mask is not None:
            old = self.registers[index]
            if old.dtype != value.dtype:
                old = old.view(value.dtype)
            value = np.where(mask, value, old)
        self.registers[index] = value
        self.changed[index] = self.fences

    def whole_warps(self, mask: Mask) -> None:
        """Require that all threads of each warp that runs do."""
        if mask is not None:
            warps = mask.reshape(-1, WARP)
            if (warps.any(1) != warps.all(1)).any():
                raise Fault("only some threads of a warp run an instruction of the whole warp")

    def active(self, mask: Mask) -> np.ndarray:
        """Indices of the threads that run."""
        return self.lanes if mask is None else np.flatnonzero(mask)

    def global_cells(
        self, address, size: int, align: int, lanes, *, write: bool, atomic=False
    ) -> None:
        """Check an access of lanes to global memory."""
        cells = self.memory.locate(address, size, align)
        cta, warp = self.cta[lanes], self.warp[lanes]
        known = self.clocks.times[cta, warp]
        tag = known[np.arange(len(lanes)), warp] * 64 + warp
        self.memory.check(cells, self.owner[lanes], tag, known, write=write, atomic=atomic)
        if write:
            self.memory.keep(address, size)

    def load(self, space: str, address, width: int, count: int, lanes, align=0) -> np.ndarray:
        """Words [lanes, count] of "shared" or "global" memory; align: 0: all their bytes."""
        size, cta = width * count, self.cta[lanes]
        if space == "global":
            self.global_cells(address, size, align or size, lanes, write=False)
            process, at = process_memory(address, width, count)
            return process[at]
        start = self.shared.locate(address, size, cta, align)
        self.shared.check_read(self.shared.cells(start, size), cta, self.warp[lanes])
        return self.shared.data.view(UINT[width])[start[:, None] // width + np.arange(count)]

    def store(self, space: str, address, words: np.ndarray, lanes) -> None:
        """Store words [lanes, count]."""
        data = words.view("u1")
        size, cta = data.shape[1], self.cta[lanes]
        if space == "global":
            self.global_cells(address, size, size, lanes, write=True)
            process, at = process_memory(address, words.itemsize, words.shape[1])
            process[at] = words
        else:
            self.shared.put(self.shared.locate(address, size, cta), data, cta, self.warp[lanes])

    def newest(self, kind: str, pending: int, mask: Mask) -> np.ndarray:
        """Of each thread, the newest group that must end if ``pending`` may stay; -1: none."""
        newest = self.groups[kind] - 1 - pending
        return newest if mask is None else np.where(mask, newest, -1)

    def run(self) -> None:
        """Run to the end of all threads; `Fault`, or `Unsupported`, with the instruction."""
        try:
            with np.errstate(all="ignore"):
                self._run()
            bulk = self.stores or any(barrier.loads for barrier in self.mbarriers.values())
            left = {"cp.async": self.shared.copies, "bulk copy": bulk, "wgmma": self.products}
            for what, some in left.items():
                if some:
                    raise Fault(f"ends with a {what} that was not waited for")
        except (Fault, Unsupported) as error:
            code = self.program.kernel.instructions
            text = code[self.at].text if self.at < len(code) else "end"
            where = f"{self.program.kernel.name}, instruction {self.at} in CTAs {self.ctas[0]} .."
            raise type(error)(f"{where}: {text}: {error}") from None

    def _run(self) -> None:
        blocks = self.program.blocks
        self.pc = np.zeros(self.size, "i8")
        # Where a thread waits: 1 + id + (number of threads << 8) of bar; 0: none; -1: an mbarrier.
        self.waits = np.zeros(self.size, "i8")
        at, together = 0, True  # together: all threads are at ``at``, and ``pc`` is not kept
        while True:
            mask = None
            if not together:
                ready = self.pc[self.waits == 0]
                at = int(ready.min()) if len(ready) else EXITED
                if at == EXITED:
                    if self.waits.any():
                        raise Fault("deadlock: threads wait at a barrier or an mbarrier for ever")
                    return
                mask = (self.pc == at) & (self.waits == 0)
                if mask.all():
                    together, mask = True, None
            elif at == EXITED:
                return
            block = blocks[at]
            if not block.ran:
                block.ran = True
                self.program.active |= set(range(at, block.end)).difference(block.guarded)
            for self.at, step in block.steps:
                step(self, mask)
            if block.jump == "bar":
                self.at = block.end - 1
                together = self._barrier(block, mask)
                at = block.end
                continue
            taken = np.True_ if block.jump else np.False_
            if block.guard:
                index, negated = block.guard
                taken = self.registers[index] ^ np.bool_(negated)
            if mask is None:
                if (taken.all() or not taken.any()) and not self.asleep:
                    at = block.target if taken.any() else block.end
                    continue
                together = False
                self.pc[:] = np.where(taken, block.target, block.end)
            else:
                self.pc[mask] = block.end
                self.pc[mask & taken] = block.target
                if block.jump == "ret":
                    self._release()

    def sleep(self, lanes) -> None:
        """Let threads wait for the end of an mbarrier's phase, then go on where they jump now."""
        self.waits[lanes] = -1
        self.asleep = bool((self.waits < 0).any())

    def wake(self) -> None:
        self.waits[self.waits < 0] = 0
        self.asleep = False

    def _barrier(self, block: Block, mask: Mask) -> bool:
        """bar.sync, where threads of a warp wait for the rest; returns whether all go on together."""
        number, count = block.barrier
        if mask is None and count in (0, self.threads):
            self.clocks.join(np.ones(self.clocks.times.shape[:2], bool))
            return True
        if mask is None:
            mask = np.ones(self.size, bool)
        self.pc[mask] = block.end
        self.waits[mask] = 1 + number + (count << 8)
        self._release()
        return False

    def _release(self) -> None:
        """Let the threads of full barriers go on; those that have ended count as arrived."""
        waits = self.waits.reshape(-1, self.threads)
        ended = (self.pc == EXITED).reshape(-1, self.threads)
        for barrier in np.unique(self.waits[self.waits > 0]):
            here = waits == barrier
            count = int(barrier) >> 8
            arrived = here.sum(1) if count else (here | ended).sum(1)
            full = here.any(1) & (arrived >= (count or self.threads))
            if full.any():
                which = here & full[:, None]
                warps = which.reshape(len(waits), -1, WARP).any(2)
                at = self.pc.reshape(*warps.shape, WARP)
                if (at != at[..., :1]).any(2)[warps].any():
                    raise Fault("a barrier that only some threads of a warp run")
                self.clocks.join(warps)
                waits[which] = 0
