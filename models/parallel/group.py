"""The collectives of the ranks that run one model: NCCL on GPUs, in graphs too, and gloo on CPUs.

sum          parts of a row-parallel product, added up    two a layer
gather       logits of the sampled rows, side by side     one a step
from_first   tokens or drafts of rank 0, on the device    one a step at most
"""

from __future__ import annotations

import datetime
from collections import Counter
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from .channel import Channel

# Of torch 2.13; before, it has another name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
MARGIN = 2.0  # seconds in which the heartbeat names a rank before a collective gives up


class Group:
    """All ranks of one model. Every rank calls the same methods in the same order.

    Args:
        device: of this rank.
        channel: between the hosts.
        timeout: seconds that a collective may take; the heartbeat notices after as many.

    Attributes:
        rank, size: this rank, and the number of ranks.
        calls: number of calls of each method, and "step" = messages of steps; replayed graphs call
            no method.
    """

    def __init__(self, device: torch.device, channel: Channel, timeout: float) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.device, self.channel = device, channel
        self._group = dist.new_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=datetime.timedelta(seconds=timeout + MARGIN),
        )
        # All keys from the start: the heartbeat's thread adds them up.
        self.calls = Counter(dict.fromkeys(("sum", "gather", "from_first", "step"), 0))

    def sum(self, part: Tensor) -> Tensor:
        """Add up the tensors of all ranks, in place; the same bits on each of them."""
        self.calls["sum"] += 1
        if part.numel():
            dist.all_reduce(part, group=self._group)
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Put the columns of all ranks [num_rows, n] side by side: [num_rows, size * n]."""
        self.calls["gather"] += 1
        out = part.new_empty(self.size, *part.shape)
        if part.numel():
            _gather(out.flatten(0, 1), part.contiguous(), group=self._group)
        return out.transpose(0, 1).flatten(1)

    def from_first(self, data: Tensor) -> Tensor:
        """Copy the tensor of rank 0 to all ranks, in place."""
        self.calls["from_first"] += 1
        if data.numel():
            dist.broadcast(data, group_src=0, group=self._group)
        return data

    def abort(self) -> None:
        """Make calls fail that wait for other ranks; any thread may call it."""
        with suppress(Exception):  # gloo does nothing, and fails when its time is over
            self._group.abort()
