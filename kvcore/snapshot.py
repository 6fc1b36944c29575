"""Snapshot and restore: the prefix index as bytes, or as a file.

A snapshot holds keys, page ids, resume points and their order of use; not the pages. It is good only together with page
contents that are the same as when it was taken: pages that stayed in place, or were saved and put back under their ids
(`page_ids` names them). Take it between steps. Running requests are not part of it, but what is cached of them is;
nor are pins and the memory of an eviction policy. A cache with events saves its tokens too, and announces what it restored.

Layout, little-endian: magic, version, length of a JSON header, header, arrays in the order of the header, SHA-256 of
all before. The header names the settings that must agree.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from bisect import insort
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .events import split_keys
from .hashing import KEY_BYTES, root_key
from .index import ResumePoint, Run
from .spec import Int32

if TYPE_CHECKING:
    from .manager import KVCache

MAGIC, VERSION = b"quire-kv", 1
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_Array = npt.NDArray[Any]


def dumps(kv: KVCache) -> bytes:
    """The index of `kv` as bytes."""
    index = kv.index
    runs = list(index.runs())  # parents first
    numbers = {id(run): i for i, run in enumerate(runs)}
    points = sorted(
        (point for run in runs for point in run.points.values()), key=lambda p: p.last_used
    )
    tail, segment = kv.layout.pages_per_point, kv.layout.pages_per_segment
    arrays: dict[str, _Array] = {
        # parent number (-1: none), segments, last use, uses
        "runs": _table(
            [[numbers.get(id(r.parent), -1), r.length, r.last_used, r.num_uses] for r in runs], 4
        ),
        "keys": np.frombuffer(b"".join(bytes(r.keys) for r in runs), dtype=np.uint8),
        "run_pages": np.concatenate([np.empty((0, segment), np.int32), *(r.pages for r in runs)]),
        # run number, boundary in segments, last use, uses
        "points": _table(
            [[numbers[id(p.run)], p.depth, p.last_used, p.num_uses] for p in points], 4
        ),
        "point_pages": np.array([p.pages for p in points], np.int32).reshape(len(points), tail),
    }
    if kv._announcer is not None:
        keys = [key for r in runs for key in split_keys(bytes(r.keys))]
        known = [kv._announcer.tokens[key] for key in keys]
        arrays["tokens"] = np.array(known, np.int32).reshape(len(known), kv.alignment)
    header = {
        **_settings(kv),
        "tick": index.tick,
        "arrays": {name: [a.dtype.name, list(a.shape)] for name, a in arrays.items()},
    }
    text = json.dumps(header).encode()
    data = b"".join(
        [_PREFIX.pack(MAGIC, VERSION, len(text)), text]
        + [a.astype(a.dtype.newbyteorder("<")).tobytes() for a in arrays.values()]
    )
    return data + sha256(data).digest()


def loads(kv: KVCache, data: bytes) -> None:
    """Restore into `kv`, which must be new, what `dumps` made of a cache with the same settings.

    Raises:
        ValueError: `kv` is in use, or `data` is damaged, of another version, or of other settings. `kv` stays empty
            and usable.
    """
    if kv.sequences.active.any() or kv.index.num_segments:
        raise ValueError("kv: expected a cache without requests and cached segments")
    if not kv.enable_caching:
        raise ValueError("kv: expected a cache with enable_caching, got one without")
    header, arrays = _parse(kv, data)
    _check(kv, arrays)
    _build(kv, header["tick"], arrays)
    if kv._announcer is not None:
        keys = split_keys(arrays["keys"].tobytes())
        kv._announcer.tokens.update(zip(keys, arrays["tokens"], strict=True))
        kv.announce()


def save(kv: KVCache, path: str | os.PathLike[str]) -> None:
    """Write `dumps(kv)` to a file; the old file stays whole until the new one is."""
    path = Path(path)
    data = dumps(kv)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def restore(kv: KVCache, path: str | os.PathLike[str]) -> None:
    """`loads` of the file that `save` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: as `loads`.
    """
    loads(kv, Path(path).read_bytes())


def page_ids(kv: KVCache) -> Int32:
    """[n] int32, ascending: pages whose contents a snapshot taken now needs."""
    parts = [run.pages.ravel() for run in kv.index.runs()]
    parts += [p.pages for run in kv.index.runs() for p in run.points.values()]
    pages: Int32 = np.unique(np.concatenate([np.zeros(1, np.int32), *parts]))[1:]
    return pages


def _settings(kv: KVCache) -> dict[str, Any]:
    """What must agree; the seed only as a digest."""
    return {
        "groups": [asdict(g) for g in kv.layout.groups],
        "alignment": kv.alignment,
        "num_pages": kv.num_pages,
        "seed": sha256(root_key(kv.hash_seed, b"")).hexdigest(),
    }


def _table(rows: list[list[int]], columns: int) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(len(rows), columns)


def _parse(kv: KVCache, data: bytes) -> tuple[dict[str, Any], dict[str, _Array]]:
    if not isinstance(data, (bytes, bytearray)):
        raise ValueError(f"snapshot: expected bytes, got {type(data).__name__}")
    if len(data) < _PREFIX.size + _DIGEST_BYTES or not data.startswith(MAGIC):
        raise ValueError(
            f"snapshot: expected a file that starts with {MAGIC!r} and has at least "
            f"{_PREFIX.size + _DIGEST_BYTES} bytes, got {data[:8]!r} and {len(data)} bytes"
        )
    _, version, length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"snapshot: expected version {VERSION}, got {version}")
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if sha256(body).digest() != digest:
        raise ValueError(
            f"snapshot: expected SHA-256 {digest.hex()}, got {sha256(body).hexdigest()}: "
            "the file is damaged or truncated"
        )
    header = json.loads(body[_PREFIX.size : _PREFIX.size + length])
    for name, expected in _settings(kv).items():
        if header.get(name) != expected:
            raise ValueError(f"snapshot: expected {name} {expected}, got {header.get(name)}")
    arrays, at = {}, _PREFIX.size + length
    for name, (dtype, shape) in header["arrays"].items():
        little = np.dtype(dtype).newbyteorder("<")
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(body, little, count, at).astype(dtype).reshape(shape)
        at += count * little.itemsize
    return header, arrays


def _check(kv: KVCache, arrays: dict[str, _Array]) -> None:
    """Refuse contents that are whole but make no index, before anything changes."""
    runs, points = arrays["runs"], arrays["points"]
    tails, dense = arrays["point_pages"], arrays["run_pages"].ravel()
    number = np.arange(len(runs))
    held = tails[tails != 0]
    total = int(runs[:, 1].sum())
    depth = np.zeros(len(runs) + 1, dtype=np.int64)  # the last one is the root's, for parent -1
    sound = (
        (runs[:, 0] >= -1).all()
        and (runs[:, 0] < number).all()
        and (runs[:, 1] > 0).all()
        and len(arrays["keys"]) == total * KEY_BYTES
        and arrays["run_pages"].shape == (total, kv.layout.pages_per_segment)
        and tails.shape == (len(points), kv.layout.pages_per_point)
        and (len(points) == 0 or kv.hybrid)
        and (dense > 0).all()
        and (dense < kv.num_pages).all()
        and (held > 0).all()
        and (held < kv.num_pages).all()
        and len(np.unique(dense)) == len(dense)
        and not np.isin(held, dense).any()
        and (points[:, 0] >= 0).all()
        and (points[:, 0] < len(runs)).all()
    )
    if sound:
        for i, (parent, length) in enumerate(runs[:, :2].tolist()):
            depth[i] = depth[parent] + length
        ends = depth[points[:, 0]]
        sound = (points[:, 1] <= ends).all() and (points[:, 1] > ends - runs[points[:, 0], 1]).all()
        sound = sound and len(np.unique(points[:, :2], axis=0)) == len(points)
    if kv._announcer is not None and (
        "tokens" not in arrays or arrays["tokens"].shape != (total, kv.alignment)
    ):
        raise ValueError(
            "snapshot: expected one of a cache with events, which has the tokens that events name"
        )
    if not sound:
        raise ValueError("snapshot: expected runs, pages and resume points that fit together")


def _build(kv: KVCache, tick: int, arrays: dict[str, _Array]) -> None:
    index, pool = kv.index, kv.pool
    dense, tails = arrays["run_pages"], arrays["point_pages"]
    pool.claim(np.unique(np.concatenate([dense.ravel(), tails[tails != 0]])))
    runs: list[Run] = []
    first = 0
    for parent, length, last_used, num_uses in arrays["runs"].tolist():
        above = index.root if parent < 0 else runs[parent]
        keys = arrays["keys"][first * KEY_BYTES : (first + length) * KEY_BYTES].tobytes()
        run = Run(above, above.depth, keys, dense[first : first + length].copy())
        run.last_used, run.num_uses = last_used, num_uses
        above.children[run.segment_key(0)] = run
        first += length
        runs.append(run)
    index.num_segments = first
    for (i, depth, last_used, num_uses), pages in zip(
        arrays["points"].tolist(), tails, strict=True
    ):
        point = runs[i].points[depth] = ResumePoint(runs[i], depth, pages.copy(), last_used)
        point.num_uses = num_uses
        insort(runs[i].depths, depth)
        pool.hold(point.pages)
        index._file(point)  # in the order of use
    index.num_points = len(tails)
    for run in sorted(runs, key=lambda r: r.last_used):
        index._became_leaf(run)
    index.tick = tick
