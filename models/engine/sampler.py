"""From logits to the next token of every request, for the whole batch at once.

A token is drawn by inversion: the first one whose cumulative probability, in the order of ids, exceeds u. The uniform number u is a
hash of the request's seed and the position, not the next number of a generator. So a request draws the same tokens whatever
else runs beside it, after a preemption, and with "strict" speculation, whose drafts are simply compared with what is drawn.
With "standard" speculation the numbers are as reproducible, but which of them decide depends on what was drafted.

Source: transformers ``generation/logits_process`` for the filters and their order; SplitMix64 (Steele et al. 2014) for the hash; Leviathan
et al. (arXiv 2211.17192) for rejection sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from .batch import Staging
from .request import Request, SamplingParams, TokenLogprobs

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NO_TOKEN = -1
REJECTION_SAMPLE_METHODS = ("strict", "standard")  # `quire.models.engine.speculative`
# Purposes of the numbers of one position (`uniform`): the next token, whether a draft stays, what replaces it, and the draft itself.
TOKEN, ACCEPT, RESAMPLE, DRAFT = range(4)


@dataclass(frozen=True)
class Sampled:
    """Tokens of one step.

    ids: one for each row of logits; `NO_TOKEN` for a row that gives none: one with NaN or +inf in it, or with -inf alone.
    logprobs: likewise, None for rows whose request wants none; None where nobody wants any.
    """

    ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


class Sampler:
    """Draws the next tokens of a step. One device-to-host copy, of the ids and what goes with them.

    vocab_size: columns of the logits. max_requests: slots of the allocator. device: of the logits.
    rejection_sample_method: one of `REJECTION_SAMPLE_METHODS`, for the rows of sampled requests that drafts follow.

    Raises: ValueError for another method.
    """

    def __init__(
        self,
        vocab_size: int,
        max_requests: int,
        device: torch.device | str,
        *,
        rejection_sample_method: str = "strict",
    ) -> None:
        if rejection_sample_method not in REJECTION_SAMPLE_METHODS:
            raise ValueError(
                f"rejection_sample_method: expected one of {list(REJECTION_SAMPLE_METHODS)}, got {rejection_sample_method!r}"
            )
        self._rejects = rejection_sample_method == "standard"
        self._device = torch.device(device)
        self._staging = Staging(device)
        self._seen_shape = (max_requests, vocab_size)
        # Tokens of prompt and output, for penalties; made when first needed.
        self._seen: Tensor | None = None
        self._owners: list[tuple[Request, int] | None] = [None] * max_requests

    def __call__(
        self, logits: Tensor, requests: Sequence[Request], num_rows: Sequence[int]
    ) -> Sampled:
        """Samples all rows.

        logits: [sum(num_rows), vocab_size] fp32, the rows of one request one after another; -inf where a token is not to come.
        requests, num_rows: the requests that get tokens, and for each 1 + its verified drafts.

        Returns: a row's token follows the drafts before it, and says by being the draft behind it that this one stays.
        """
        if all(request.params.is_plain for request in requests):
            largest, ids = logits.max(dim=-1)
            return Sampled(*_to_host(logits, ids, largest, ()))
        params = [
            r.params for r, count in zip(requests, num_rows, strict=True) for _ in range(count)
        ]
        raw = logits
        if any(p.repetition_penalty != 1 for p in params):
            logits = self._penalised(logits, requests, num_rows)
        largest, ids = logits.max(dim=-1)
        rows = np.array([i for i, p in enumerate(params) if p.temperature > 0], dtype=np.int64)
        if len(rows):
            index, u = self._staging.send([rows, _draws(requests, num_rows)[rows]])
            filters = Filters.of([params[i] for i in rows], self._staging)
            mass = probabilities(logits[index], filters)
            drawn = draw(mass, u)
            if self._rejects and len(params) > len(requests):
                drawn = self._reject(drawn, mass, rows, requests, num_rows)
            ids = ids.index_copy(0, index, drawn)
        return Sampled(*_to_host(raw, ids, largest, params))

    def _penalised(
        self, logits: Tensor, requests: Sequence[Request], num_rows: Sequence[int]
    ) -> Tensor:
        """Rows of penalised requests changed; to a row, the drafts before it are output too."""
        if self._seen is None:
            self._seen = torch.zeros(self._seen_shape, dtype=torch.bool, device=self._device)
        slots, penalty, rows, row = [], [], [], 0
        guessed_rows, guessed = [], []
        for request, count in zip(requests, num_rows, strict=True):
            if request.params.repetition_penalty != 1:
                self._note(request)
                for i in range(count):
                    guessed_rows += [len(rows)] * i
                    guessed += request.drafts[:i].tolist()
                    slots.append(request.slot)
                    penalty.append(request.params.repetition_penalty)
                    rows.append(row + i)
            row += count
        index, owned, factor, *drafts = self._staging.send(
            [
                np.array(rows),
                np.array(slots),
                np.array(penalty),
                np.array(guessed_rows, dtype=np.int64),
                np.array(guessed, dtype=np.int64),
            ]
        )
        seen = self._seen[owned]
        if guessed:
            seen[tuple(drafts)] = True
        return logits.index_copy(0, index, penalise(logits[index], seen, factor))

    def _reject(
        self,
        drawn: Tensor,
        mass: Tensor,
        rows: np.ndarray,
        requests: Sequence[Request],
        num_rows: Sequence[int],
    ) -> Tensor:
        """``drawn`` with `rejection_sample` in the rows that a draft follows.

        drawn: [num_drawn] int64. mass: [num_drawn, vocab_size]. rows: [num_drawn] int64, which rows of all these are.
        """
        numbers = [_draws(requests, num_rows, purpose) for purpose in (ACCEPT, RESAMPLE)]
        parts: dict[bool, list[tuple[np.ndarray, Request]]] = {False: [], True: []}
        row = 0
        for request, count in zip(requests, num_rows, strict=True):
            if count > 1 and request.params.temperature > 0:
                at = np.arange(row, row + count - 1)
                parts[request.draft_probs is not None].append((at, request))
            row += count
        for has_probs, part in parts.items():
            if not part:
                continue
            at = np.concatenate([where for where, _ in part])
            drafts = np.concatenate([r.drafts[: len(where)] for where, r in part])
            index, tokens, *u = self._staging.send(
                [np.searchsorted(rows, at), drafts.astype(np.int64), *(n[at] for n in numbers)]
            )
            probs = torch.cat([r.draft_probs[: len(w)] for w, r in part]) if has_probs else None
            drawn = drawn.index_copy(0, index, rejection_sample(mass[index], tokens, probs, *u))
        return drawn

    def _note(self, request: Request) -> None:
        """Marks the tokens that came since the last time."""
        assert self._seen is not None
        owner = self._owners[request.slot]
        known = owner[1] if owner is not None and owner[0] is request else 0
        if not known:
            self._seen[request.slot] = False
        [new] = self._staging.send([request.tokens[known:].astype(np.int64)])
        self._seen[request.slot, new] = True
        self._owners[request.slot] = (request, request.num_tokens)


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Repetition penalty: logits of seen tokens are divided by it where positive, multiplied where negative.

    logits: [num_rows, vocab_size]. seen: the same shape, bool. penalty: [num_rows].

    Source: CTRL (arXiv 1909.05858) 4.1, as in transformers.
    """
    factor = penalty[:, None].to(logits.dtype)
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


@dataclass(frozen=True)
class Filters:
    """Temperature and filters of some rows; temperature, top_p, min_p [num_rows, 1] fp32, top_k [num_rows, 1] int64.

    sorts, has_min_p: host bools, whether any row needs the likeliest tokens in order, and whether any has a min_p.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    sorts: bool
    has_min_p: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], staging: Staging) -> Filters:
        """Filters of rows that are drawn, all with a temperature above 0."""
        columns = [
            np.array([[getattr(p, name)] for p in params], dtype=dtype)
            for name, dtype in (
                ("temperature", "f4"),
                ("top_k", "i8"),
                ("top_p", "f4"),
                ("min_p", "f4"),
            )
        ]
        columns[0] = np.maximum(columns[0], np.float32(1e-30))  # what fp32 would round to 0
        return cls(
            *staging.send(columns),
            sorts=any(p.top_k > 0 or p.top_p < 1 for p in params),
            has_min_p=any(p.min_p > 0 for p in params),
        )


def probabilities(logits: Tensor, filters: Filters) -> Tensor:
    """What the rows are drawn from: temperature, then top_k, top_p and min_p.

    logits: [num_rows, vocab_size] fp32.

    Returns: [num_rows, vocab_size] fp32, rows that add up to 1.
    """
    # Largest logit 0 first: then no temperature overflows.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / filters.temperature
    if filters.sorts:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        behind = (filters.top_k > 0) & (rank >= filters.top_k)
        ordered = ordered.masked_fill(behind, -torch.inf)
        mass = ordered.softmax(dim=-1)
        before = mass.cumsum(dim=-1) - mass
        # The likeliest token always stays, and rounding of the sum must not cut a row that keeps all.
        behind = (before >= filters.top_p) & (rank > 0) & (filters.top_p < 1)
        ordered = ordered.masked_fill(behind, -torch.inf)
        # Back to the order of ids: a draw must not depend on whether some other row needed a sort.
        logits = torch.empty_like(ordered).scatter_(1, order, ordered)
    kept = logits.softmax(dim=-1)
    if filters.has_min_p:
        kept = kept.masked_fill(kept < filters.min_p * kept.amax(dim=-1, keepdim=True), 0.0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
    return kept


def draw(mass: Tensor, u: Tensor) -> Tensor:
    """Draws one index a row by inversion.

    mass: [num_rows, n] >= 0, each row with a positive sum (not necessarily 1). u: [num_rows] float64 in [0, 1).

    Returns: [num_rows] int64; never an index of mass 0. Of a row of NaN the last one.
    """
    total = mass.cumsum(dim=-1, dtype=torch.float64)
    last = total[:, -1:]
    # Rounding may make the product the whole sum, behind which there is nothing.
    goal = torch.minimum(u[:, None] * last, torch.nextafter(last, torch.zeros_like(last)))
    return torch.searchsorted(total, goal, right=True).squeeze(1).clamp_(max=mass.shape[1] - 1)


def rejection_sample(
    target: Tensor, drafts: Tensor, probs: Tensor | None, u_accept: Tensor, u_draw: Tensor
) -> Tensor:
    """Accepts drafts, or replaces them, so that the target's distribution comes out.

    Draft x of row i is accepted if u_accept < p(x) / q(x); else the row's token is drawn from max(p - q, 0), normalised.

    target: [num_rows, vocab_size] fp32, p of each row. drafts: [num_rows] int64.
    probs: [num_rows, vocab_size] fp32, q that each draft was drawn from; None = they were not drawn: q is 1 at the draft.
    u_accept, u_draw: [num_rows] float64 in [0, 1), independent.

    Returns: [num_rows] int64: the draft where it is accepted, else its replacement, which is another token.
    """
    at = drafts[:, None]
    p = target.gather(1, at).squeeze(1).double()
    if probs is None:
        accepted, rest = u_accept < p, target.scatter(1, at, 0.0)
    else:
        accepted = u_accept * probs.gather(1, at).squeeze(1).double() < p
        rest = (target - probs).clamp_min(0)
    # Where p = q nothing is left over, and nothing is rejected but by rounding: then p itself is right.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    return torch.where(accepted, drafts, draw(rest, u_draw))


def uniform(seeds: Sequence[int], positions: Sequence[int], purpose: int = TOKEN) -> np.ndarray:
    """One number in [0, 1) for each (seed, position, purpose), a multiple of 2^-32: the same one every time.

    seeds, positions: [n] ints. purpose: keeps independent draws at one position apart.

    Returns: [n] float64.
    """
    with np.errstate(over="ignore"):
        x = _mix(np.array([s % 2**64 for s in seeds], dtype=np.uint64))
        x = _mix(x + np.asarray(positions, dtype=np.uint64) * GOLDEN)
        x = _mix(x ^ np.uint64(purpose))
    return (x >> np.uint64(32)).astype(np.float64) * 2.0**-32


def derived_seed(seed: int, sample: int) -> int:
    """Seed of one sample of a request; sample 0 has the request's own."""
    return seed if sample == 0 else (seed + sample * 0xD1B54A32D192ED03) % 2**64


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draws(
    requests: Sequence[Request], num_rows: Sequence[int], purpose: int = TOKEN
) -> np.ndarray:
    """[sum(num_rows)] float64: a row's number depends on its request's seed and its place in the output."""
    counts = np.asarray(num_rows)
    first = np.repeat([r.num_output for r in requests], counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    seeds = [r.seed for r, count in zip(requests, num_rows, strict=True) for _ in range(count)]
    return uniform(seeds, first + within, purpose)


def _to_host(
    logits: Tensor, ids: Tensor, largest: Tensor, params: Sequence[SamplingParams]
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """Ids, and the log-probabilities that rows ask for, in one copy.

    largest: [num_rows], each row's largest logit, which tells whether the row gives a token: it is NaN where any logit is, +inf where
        any is, and -inf where all are.
    """
    wanted = [p.logprobs for p in params]
    most = max((n for n in wanted if n is not None), default=None)
    # Ids are exact in float64.
    parts = [ids[:, None].double(), largest[:, None]]
    if most is not None:
        most = min(most, logits.shape[1])
        scores = logits.log_softmax(dim=-1)
        best, best_ids = scores.topk(most, dim=-1)
        parts += [scores.gather(1, ids[:, None]), best, best_ids.double()]
    packed = torch.cat(parts, dim=1).tolist()
    found = [int(row[0]) if isfinite(row[1]) else NO_TOKEN for row in packed]
    if most is None:
        return found, None
    rows: list[TokenLogprobs | None] = []
    for row, n in zip(packed, wanted, strict=True):
        top = zip(map(int, row[3 + most :]), row[3 : 3 + most], strict=True)
        rows.append(None if n is None else TokenLogprobs(row[2], tuple(top)[:n]))
    return found, rows
