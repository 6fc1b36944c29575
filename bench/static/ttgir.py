"""What the TTGIR of a compiled kernel says: how many tiles its loops copy while they multiply.

The number of stages does not say it. Triton's pipeliner copies ``num_stages - 1`` tiles ahead, but
waits for the next one at the top of an iteration, multiplies, and only then issues another copy. A
loop of two stages, of which the arrows show the copies of tile 1:

    copy 0 | wait 0  scores 0  values 0  copy 1 | wait 1  scores 1  values 1  copy 2 | ...
                                         `------>

has nothing under way while it multiplies, except where the last product still runs. One of three
stages has a tile:

    copy 0  copy 1 | wait 0  scores 0  values 0  copy 2 | wait 1  scores 1  values 1  copy 3 | ...
            `------------------------------------------->
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# What counts, most specific first; the group is the number of a wait, or its barrier.
EVENTS = (
    ("wait", re.compile(r"ttg\.async_wait .*\bnum = (\d+)")),
    ("commit", re.compile(r"ttg\.async_commit_group\b()")),
    ("tma", re.compile(r"ttng\.async_tma_copy_global_to_local .*?\] %[\w#]+, (%[\w#]+)")),
    ("arrived", re.compile(r"ttng\.wait_barrier (%[\w#]+)")),
    ("product", re.compile(r"(?:ttng\.warp_group_dot|tt\.dot|ttng\.tc_gen5_mma) ()")),
)
LOCATION = re.compile(r"\s*loc\([^()]*\)$")
ELEMENT = re.compile(r"(%[\w#]+) = ttg\.memdesc_index (%[\w#]+)")


@dataclass
class Loop:
    """One innermost loop.

    Attributes:
        events: (one of ``EVENTS`` by name, its operand), in the order of the text.
    """

    events: list[tuple[str, str]] = field(default_factory=list)
    holds_loops: bool = False

    def count(self, name: str) -> int:
        """How often an event occurs in one iteration."""
        return sum(kind == name for kind, _ in self.events)

    def tiles(self, outside: list[tuple[str, str]]) -> int:
        """Whole tiles whose copies are under way when a product is issued: the fewest of all its
        products, when the loop has run for a while. 0: no copy of it is asynchronous.

        Args:
            outside: events of the kernel that are in no innermost loop.
        """
        found = []
        if self.count("commit"):
            found.append(self._groups() // self.count("commit"))
        if self.count("tma"):
            found.append(self._by_descriptors(outside) // self.count("tma"))
        return min(found, default=0)

    def _groups(self) -> int:
        """Groups of asynchronous copies under way; a wait leaves the latest ``num`` of them."""
        if not self.count("wait"):
            return 0
        pending, found = 0, []
        for again in (False, True):
            for name, operand in self.events:
                if name == "wait":
                    pending = min(pending, int(operand)) if again else int(operand)
                pending += name == "commit"
                if name == "product" and again:
                    found.append(pending)
        return min(found)

    def _by_descriptors(self, outside: list[tuple[str, str]]) -> int:
        """Copies by tensor descriptors under way: each wait is for an equal part of a tile."""
        waits, copies = self.count("arrived"), self.count("tma")
        if not waits:
            return 0
        own = {operand for name, operand in self.events if name == "tma"}
        before = [name for name, operand in outside if operand in own]
        # In units of a copy over a wait, so that all are whole.
        pending, found = before.count("tma") * waits - before.count("arrived") * copies, []
        for name, _ in self.events:
            pending += {"tma": waits, "arrived": -copies}.get(name, 0)
            if name == "product":
                found.append(pending)
        return max(0, min(found)) // waits


def tiles_in_flight(text: str) -> int | None:
    """Tiles under way during the products of the loop with the fewest; None without such a loop."""
    found, outside = loops(text)
    return min((loop.tiles(outside) for loop in found), default=None)


def loops(text: str) -> tuple[list[Loop], list[tuple[str, str]]]:
    """The innermost loops of a kernel that hold products, in the order of the text, and the events
    that are in none of them.
    """
    arrays: dict[str, str] = {}  # of barriers, by the name that an element has just now
    found: list[Loop] = []
    outside: list[tuple[str, str]] = []
    regions: list[Loop | None] = []  # open ones, outermost first; None: no loop
    for line in text.splitlines():
        line = LOCATION.sub("", line).rstrip()
        if line.lstrip().startswith("}") and regions:
            closed = regions.pop()
            if closed is not None and closed.count("product") and not closed.holds_loops:
                found.append(closed)
                for region in regions:
                    if region is not None:
                        region.holds_loops = True
            elif closed is not None:
                outside += closed.events
        if line.endswith("{"):
            regions.append(Loop() if re.search(r"\bscf\.(for|while)\b", line) else None)
            continue
        if match := ELEMENT.search(line):
            arrays[match[1]] = match[2]
            continue
        for name, pattern in EVENTS:
            if match := pattern.search(line):
                loop = next((region for region in reversed(regions) if region is not None), None)
                event = name, arrays.get(match[1], match[1])
                (outside if loop is None else loop.events).append(event)
    copied = {operand for name, operand in outside if name == "tma"}
    for loop in found:
        copied |= {operand for name, operand in loop.events if name == "tma"}
    # Other barriers are of products: those of tensor memory have them, too.
    for loop in found:
        loop.events = [
            event for event in loop.events if event[0] != "arrived" or event[1] in copied
        ]
    return found, outside
