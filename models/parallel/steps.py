"""What rank 0 sends for each step, in one buffer.

    [header int64][slots][num_new_tokens] ... [table_indices][table_pages][ids][rows]

Each array begins at 8 bytes. The header has the kind, the shape of the graph (0, 0: none), and of
each array the bytes of an element and the shape.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quire.kvcore import StepArrays

from ..engine.graphs import Shape

RUN, OBSERVE, DRAFT, CLOSE = range(4)
DTYPES = {4: np.dtype(np.int32), 8: np.dtype(np.int64)}
NUM_ARRAYS = len(StepArrays._fields) + 2
NOTHING = np.zeros(0, dtype=np.int64)


class Message(NamedTuple):
    """What the other ranks do.

    Attributes:
        kind: RUN = the model; OBSERVE = the drafter sees the step that ran; DRAFT = it drafts;
            CLOSE = end.
        graph: for RUN, the shape to replay; None = no graph.
        step: arrays of the plan; without one, those that are needed, the others empty.
        ids: RUN [num_tokens] input ids, or placeholders; OBSERVE [num_tokens], the next ids.
        rows: RUN [num_rows], rows of the logits; OBSERVE [num_seqs], last rows that stay; DRAFT
            [1], 1 where the largest logits are the drafts.
    """

    kind: int
    graph: Shape | None = None
    step: StepArrays = StepArrays(*[NOTHING] * len(StepArrays._fields))
    ids: np.ndarray = NOTHING
    rows: np.ndarray = NOTHING


def pack(message: Message) -> bytes:
    """The buffer of a message."""
    arrays = [np.ascontiguousarray(a) for a in (*message.step, message.ids, message.rows)]
    header = [message.kind, *(message.graph or (0, 0))]
    for array in arrays:
        rows, columns = array.shape if array.ndim == 2 else (-1, array.size)
        header += [array.itemsize, rows, columns]
    parts = [np.array(header, dtype=np.int64).tobytes()]
    parts += [array.tobytes() + bytes(-array.nbytes % 8) for array in arrays]
    return b"".join(parts)


def unpack(buffer: bytearray) -> Message:
    """The message of a buffer, whose memory its arrays share."""
    kind, num_seqs, rows, *sizes = np.frombuffer(buffer, np.int64, 3 + 3 * NUM_ARRAYS).tolist()
    start, arrays = 8 * (3 + 3 * NUM_ARRAYS), []
    for i in range(0, len(sizes), 3):
        itemsize, num_rows, columns = sizes[i : i + 3]
        count = abs(num_rows) * columns
        array = np.frombuffer(buffer, DTYPES[itemsize], count, start)
        arrays.append(array if num_rows < 0 else array.reshape(num_rows, columns))
        start += -(-array.nbytes // 8) * 8
    graph = Shape(num_seqs, rows) if num_seqs else None
    return Message(kind, graph, StepArrays._make(arrays[:-2]), *arrays[-2:])
