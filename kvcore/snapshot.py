"""Snapshot and restore: the prefix index as bytes, or as a file.

A snapshot holds keys, page ids, resume points and their order of use; not the pages. It is good
only together with page contents that are the same as when it was taken: pages that stayed in place,
or were saved and put back under their ids (`page_ids` names them). Take it between steps. Running
requests are not part of it, but what is cached of them is; nor are pins and the memory of an
eviction policy. A cache with events saves its tokens too, and announces what it restored.

Layout, little-endian: magic, version, length of a JSON header, header, arrays in the order of the
header, SHA-256 of all before; with a `key`, its HMAC-SHA-256. The header names the settings that
must agree.

Without a key the check finds damage, not forgery: what is read must fit together, but whoever can
write the file can make a prompt hit any page, another tenant's too. Give a key that only the engine
knows, or keep others from the file.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import stat
import struct
import tempfile
from bisect import insort
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import identities
from .arrays import Int32
from .events import split_keys
from .prefix.keys import KEY_BYTES, root_key
from .prefix.tree import ResumePoint, Run
from .snapshot_checks import MAX_COUNT, check_contents

if TYPE_CHECKING:
    from .cache import KVCache

MAGIC, VERSION = b"quire-kv", 1
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_Array = npt.NDArray[Any]


def dumps(kv: KVCache, *, key: bytes | None = None) -> bytes:
    """The index of `kv` as bytes, which `loads` with the same `key` takes."""
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
    if kv.pool.lossy is not None:
        arrays["lossy"] = (pages := page_ids(kv))[kv.pool.lossy[pages]]
    if kv._announcer is not None:
        keys = [key for r in runs for key in split_keys(bytes(r.keys))]
        known = [kv._announcer.tokens[key] for key in keys]
        arrays["tokens"] = np.array(known, np.int32).reshape(len(known), kv.alignment)
        if kv._announcer.log.identities:
            packed = identities.dumps(kv._announcer.identities, keys)
            arrays["identities"] = np.frombuffer(packed, dtype=np.uint8)
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
    return data + _digest(data, key)


def loads(kv: KVCache, data: bytes, *, key: bytes | None = None) -> None:
    """Restore into `kv`, which must be new, what `dumps` made of a cache with the same settings,
    and with the same `key`.

    Raises:
        ValueError: `kv` is in use, or `data` is damaged, of another key, version, or settings, or
            its contents do not fit together. `kv` stays empty and usable, as it does whatever else
            is raised.
    """
    if kv.sequences.active.any() or kv.index.num_segments or kv.pool.withheld:
        raise ValueError("kv: expected a cache without requests, cached segments, withheld pages")
    if not kv.enable_caching:
        raise ValueError("kv: expected a cache with enable_caching, got one without")
    if kv.tiers is not None and kv.tiers.jobs:
        raise ValueError("kv: expected no open jobs of tiers: end them with `done` or `cancel`")
    tick, arrays = _parse(kv, data, key)
    check_contents(kv, tick, arrays)
    keys, told = split_keys(arrays["keys"].tobytes()), {}
    if kv._announcer is not None and kv._announcer.log.identities:
        told = identities.loads(arrays["identities"].tobytes(), keys)
    _build(kv, tick, arrays)
    if kv._announcer is not None:
        kv._announcer.tokens.update(zip(keys, arrays["tokens"], strict=True))
        kv._announcer.identities.update(told)
        kv.announce()


def save(kv: KVCache, path: str | os.PathLike[str], *, key: bytes | None = None) -> None:
    """Write `dumps(kv, key=key)` to a file; the old file stays whole until the new one is.

    Raises:
        OSError: the file cannot be written.
        ValueError: at `path` is something else than a file, such as a device, a folder or a link;
            it stays as it is.
    """
    path = Path(path)
    if os.path.lexists(path):
        _expect_file(path, os.lstat(path))
    data = dumps(kv, key=key)
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


def restore(kv: KVCache, path: str | os.PathLike[str], *, key: bytes | None = None) -> None:
    """`loads` of the file that `save` wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: as `loads`; at `path` is something else than a file.
    """
    path = Path(path)
    _expect_file(path, os.stat(path))
    loads(kv, path.read_bytes(), key=key)


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


def _expect_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(
            f"path: expected a regular file, got {str(path)!r}, mode {stat.filemode(found.st_mode)}"
        )


def _digest(data: bytes, key: bytes | None) -> bytes:
    if key is None:
        return sha256(data).digest()
    if not isinstance(key, bytes) or not key:
        raise ValueError(f"key: expected bytes that are not empty, got {type(key).__name__}")
    return hmac.digest(key, data, "sha256")


def _columns(kv: KVCache) -> dict[str, tuple[str, list[int]]]:
    """Dtype and columns of each array; rows follow from its contents. The last three are there if
    tiers were lossy, if there were events, and if these named identities."""
    return {
        "runs": ("int64", [4]),
        "keys": ("uint8", []),
        "run_pages": ("int32", [kv.layout.pages_per_segment]),
        "points": ("int64", [4]),
        "point_pages": ("int32", [kv.layout.pages_per_point]),
        "lossy": ("int32", []),
        "tokens": ("int32", [kv.alignment]),
        "identities": ("uint8", []),
    }


def _parse(kv: KVCache, data: bytes, key: bytes | None) -> tuple[int, dict[str, _Array]]:
    """The tick and the arrays; their dtypes and shapes are right."""
    if not isinstance(data, (bytes, bytearray)):
        raise ValueError(f"snapshot: expected bytes, got {type(data).__name__}")
    if len(data) < _PREFIX.size + _DIGEST_BYTES or not data.startswith(MAGIC):
        raise ValueError(
            f"snapshot: expected a file that starts with {MAGIC!r} and has at least "
            f"{_PREFIX.size + _DIGEST_BYTES} bytes, got {bytes(data[:8])!r} and {len(data)} bytes"
        )
    _, version, length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"snapshot: expected version {VERSION}, got {version}")
    body, digest = bytes(data[:-_DIGEST_BYTES]), bytes(data[-_DIGEST_BYTES:])
    if not hmac.compare_digest(_digest(body, key), digest):
        name = "SHA-256" if key is None else "HMAC-SHA-256 with this key"
        raise ValueError(
            f"snapshot: expected the {name} of its contents at the end, got another: "
            "the file is damaged or truncated, or was saved with another key"
        )
    try:
        header = json.loads(body[_PREFIX.size : _PREFIX.size + length])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"snapshot: header: expected JSON, got {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"snapshot: header: expected an object, got {header!r:.60}")
    for name, expected in _settings(kv).items():
        if header.get(name) != expected:
            raise ValueError(f"snapshot: expected {name} {expected}, got {header.get(name)!r:.999}")
    tick = header.get("tick")
    if type(tick) is not int or not 0 <= tick <= MAX_COUNT:
        raise ValueError(f"snapshot: tick: expected an int in 0..{MAX_COUNT}, got {tick!r:.60}")
    columns, described = _columns(kv), header.get("arrays")
    if not isinstance(described, dict) or "lossy" not in described:
        del columns["lossy"]
    names = list(columns)
    known = names, names[:-1], names[:-2]
    if not isinstance(described, dict) or list(described) not in known:
        raise ValueError(f"snapshot: arrays: expected {names}, got {described!r:.200}")
    arrays: dict[str, _Array] = {}
    at = _PREFIX.size + length
    for name, found in described.items():
        dtype, row = columns[name]
        # No array has more rows than there are bytes: each segment and point has a key, or a row of
        # its own.
        if not (
            isinstance(found, list)
            and len(found) == 2
            and found[0] == dtype
            and isinstance(found[1], list)
            and all(type(n) is int for n in found[1])
            and found[1][1:] == row
            and len(found[1]) == 1 + len(row)
            and 0 <= found[1][0] <= len(body)
        ):
            raise ValueError(
                f"snapshot: {name}: expected [{dtype!r}, {['rows', *row]}], got {found!r:.200}"
            )
        little = np.dtype(dtype).newbyteorder("<")
        count = math.prod(found[1])
        if at + count * little.itemsize > len(body):
            raise ValueError(
                f"snapshot: {name}: expected {count} values, got {len(body) - at} bytes"
            )
        arrays[name] = np.frombuffer(body, little, count, at).astype(dtype).reshape(found[1])
        at += count * little.itemsize
    if at != len(body):
        raise ValueError(f"snapshot: expected {at} bytes before the check, got {len(body)}")
    if kv._announcer is not None and "tokens" not in arrays:
        raise ValueError(
            "snapshot: expected one of a cache with events, which has the tokens that events name"
        )
    if kv._announcer is not None and kv._announcer.log.identities and "identities" not in arrays:
        raise ValueError(
            "snapshot: expected one of a cache whose events name identities, got one without them"
        )
    return tick, arrays


def _build(kv: KVCache, tick: int, arrays: dict[str, _Array]) -> None:
    """Make the index of what was checked. The policy, which may raise, hears of all entries before
    anything else changes."""
    index, pool = kv.index, kv.pool
    dense, tails = arrays["run_pages"], arrays["point_pages"]
    children = index.root.children
    runs: list[Run] = []
    points: list[ResumePoint] = []
    first = 0
    index.root.children = {}
    try:
        for parent, length, last_used, num_uses in arrays["runs"].tolist():
            above = index.root if parent < 0 else runs[parent]
            keys = arrays["keys"][first * KEY_BYTES : (first + length) * KEY_BYTES].tobytes()
            run = Run(above, above.depth, keys, dense[first : first + length].copy())
            run.last_used, run.num_uses = last_used, num_uses
            above.children[run.segment_key(0)] = run
            first += length
            runs.append(run)
        for (i, depth, last_used, num_uses), pages in zip(
            arrays["points"].tolist(), tails, strict=True
        ):
            point = runs[i].points[depth] = ResumePoint(runs[i], depth, pages.copy(), last_used)
            point.num_uses = num_uses
            insort(runs[i].depths, depth)
            points.append(point)
        for point in points:
            index.policy.add(point)  # in the order of use
        for run in sorted(runs, key=lambda r: r.last_used):
            index.became_leaf(run)
        index.repeat_failed()
    except BaseException:
        index.root.children = children
        for point in points:
            index.policy.discard(point)
        for run in runs:
            index.policy.discard(run)
        index.forget_offers()
        raise
    pool.claim(np.unique(np.concatenate([dense.ravel(), tails[tails != 0]])))
    for point in points:
        pool.hold(point.pages)
    if "lossy" in arrays:
        pool.mark_lossy(arrays["lossy"])
    index.num_segments, index.num_points, index.tick = first, len(points), tick
