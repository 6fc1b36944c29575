"""The ranks that run one model together, and everything that they send each other.

A rank computes a part of every product: the heads of an attention layer, the width of an MLP and of
every expert, the rows of the vocabulary. So there are five kinds of messages, one method each::

    sum        a row-parallel product's parts, added up             two a layer
    gather     logits of the sampled rows, side by side             one a step
               queries and best entries, of a context that is split one to three a layer
    exchange   parts of attention, of a context that is split       two a layer
    from_first sampled tokens and drafts of rank 0, on the device   one a step
    say        requests that came and went, plans, on the CPU       two a step

All but the last are collectives of the device's group (NCCL on GPUs, where graphs capture them; gloo
on CPUs), the last one and `all_say` are of a group of CPUs, whose ranks may wait for work for days.
"""

from __future__ import annotations

import datetime
import pickle
from collections import Counter
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Of the group in which ranks wait for work; who has died is noticed by `quire.models.parallel.watch`.
FOREVER = datetime.timedelta(days=3650)
# Of torch 2.13; before, it has another name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
KINDS = ("sum", "gather", "queries", "topk", "exchange", "from_first", "say", "all_say")
HEADER = 4096  # bytes of a message that comes with its length, in one broadcast


class Group:
    """All ranks of one model. Every rank calls the same methods in the same order.

    Args:
        device: of this rank.
        timeout: seconds that a collective on the device may take.
        split_context: the ranks share the context (`quire.models.parallel.context`).

    Attributes:
        rank, size: this one, and how many there are.
        split_context: as given.
        sent: bytes that this rank's messages hold, by method and by what `gather` is told, since
            `Counter.clear`; without those of graphs that are replayed.
        calls: how often each method was called; what a stuck rank lacks.
    """

    def __init__(
        self, device: torch.device, timeout: float, *, split_context: bool = False
    ) -> None:
        self.split_context = split_context
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._cpu = dist.new_group(backend="gloo", timeout=FOREVER)
        self._on_device = dist.new_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            # Who is stuck is known, and said, before this ends the process.
            timeout=datetime.timedelta(seconds=2 * timeout),
        )
        self.sent: Counter[str] = Counter()
        # All keys from the start: another thread adds them up.
        self.calls = Counter(dict.fromkeys(KINDS, 0))

    def sum(self, part: Tensor) -> Tensor:
        """The sum of what all ranks have, in place; the same bits on each of them.

        Args:
            part: contiguous, of any shape.
        """
        self._count("sum", part)
        if part.numel():
            dist.all_reduce(part, group=self._on_device)
        return part

    def gather(self, part: Tensor, kind: str = "gather") -> Tensor:
        """The columns of all ranks side by side, those of rank 0 first.

        Args:
            part: [num_rows, n].
            kind: what it is counted as; "gather" = logits.

        Returns:
            [num_rows, size * n].
        """
        self._count(kind, part)
        out = part.new_empty(self.size, *part.shape)
        if part.numel():
            _gather(out.flatten(0, 1), part.contiguous(), group=self._on_device)
        return out.transpose(0, 1).flatten(1)

    def exchange(self, parts: Tensor) -> Tensor:
        """Rank r gets element r of what each rank has.

        Args:
            parts: [size, ...], contiguous.

        Returns:
            The same shape: what each rank had for this one, by rank.
        """
        self._count("exchange", parts)
        out = torch.empty_like(parts)
        if parts.numel():
            dist.all_to_all_single(out, parts, group=self._on_device)
        return out

    def from_first(self, data: Tensor) -> Tensor:
        """What rank 0 has there, in place.

        Args:
            data: contiguous, of the same shape on all ranks.
        """
        self._count("from_first", data)
        if data.numel():
            dist.broadcast(data, group_src=0, group=self._on_device)
        return data

    def say(self, message: Any = None) -> Any:
        """The message of rank 0, which waits for nobody; the others wait for it.

        Args:
            message: anything that can be pickled; of other ranks it is not read.
        """
        first = self.rank == 0
        data = pickle.dumps(message) if first else b""
        head = torch.zeros(HEADER, dtype=torch.uint8)
        if first:
            start = len(data).to_bytes(8, "little") + data[: HEADER - 8]
            head[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        dist.broadcast(head, group_src=0, group=self._cpu)
        raw = head.numpy().tobytes()
        length = int.from_bytes(raw[:8], "little")
        self.sent["say"] += HEADER
        self.calls["say"] += 1
        if length > HEADER - 8:
            rest = torch.empty(length, dtype=torch.uint8)
            if first:
                rest = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(rest, group_src=0, group=self._cpu)
            self.sent["say"] += length
            raw = raw[:8] + rest.numpy().tobytes()
        return message if first else pickle.loads(raw[8 : 8 + length])

    def all_say(self, message: Any) -> list[Any]:
        """What every rank says, by rank; all wait for all."""
        self.calls["all_say"] += 1
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, message, group=self._cpu)
        return out

    def abort(self) -> None:
        """Makes what waits for other ranks fail. Another thread may call it."""
        for group in (self._on_device, self._cpu):
            with suppress(Exception):  # not every backend can
                group.abort()

    def close(self) -> None:
        """Ends the groups of this object. Every rank calls it, and none waits for another."""
        for group in (self._on_device, self._cpu):
            dist.destroy_process_group(group)

    def _count(self, kind: str, data: Tensor) -> None:
        self.calls[kind] += 1
        self.sent[kind] += data.numel() * data.element_size()
