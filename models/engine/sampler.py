"""From logits to the next tokens of every request.

Without drafts a request has one row of logits, that of its last token, and gets one token. With
drafts d_1..d_k it has k + 1 rows; row i gives the token after d_1..d_i
(`quire.models.engine.speculative`). What rows are drawn from, and with which numbers, is in
`quire.models.engine.distributions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels import sample_tokens
from quire.kvcore.device import HostCopy, Staging, known_ids

from .distributions import (
    ACCEPT,
    RESAMPLE,
    TOKEN,
    draw_columns,
    penalize,
    rejection_sample,
    uniform,
)
from .outputs import TokenLogprobs
from .request import Request, SamplingParams

NO_TOKEN = -1  # as `sample_tokens` gives it
REJECTION_SAMPLE_METHODS = ("strict", "standard")  # `quire.models.engine.speculative`


@dataclass(frozen=True)
class NewTokens:
    """What a step gave one request.

    Attributes:
        ids: the next token, `NO_TOKEN` where there is none; before it the drafts that stay.
        logprobs: one for each id; None where nobody asks.
    """

    request: Request
    ids: list[int]
    logprobs: list[TokenLogprobs | None] | None


@dataclass(frozen=True)
class Sampled:
    """Tokens of one step.

    Attributes:
        ids: one for each row of logits; `NO_TOKEN` for a row that gives none: one with NaN or +inf
            in it, or with -inf alone.
        logprobs: likewise, None for rows whose request wants none; None where nobody wants any.
        drafts: what came along (`Sampler`).
    """

    ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    drafts: list[int]

    def one_each(self, requests: Sequence[Request]) -> list[NewTokens]:
        """The new tokens of a step without drafts, in which each request has one row."""
        if self.logprobs is None:
            return [
                NewTokens(r, [token], None) for r, token in zip(requests, self.ids, strict=True)
            ]
        rows = zip(requests, self.ids, self.logprobs, strict=True)
        return [NewTokens(request, [token], [logprobs]) for request, token, logprobs in rows]


class SampledOnDevice:
    """Tokens of one step that are on their way to the host.

    Args:
        ids: [num_rows] int64.
        packed: [num_rows, n] float64, what goes to the host (`_to_host`).
        wanted: log-probabilities that each row asks for.
        drafts: [n] int64, which come along.

    Attributes:
        ids: those on the device; 0 for a row that gives none.
    """

    def __init__(
        self, ids: Tensor, packed: Tensor, wanted: Sequence[int | None], drafts: Tensor
    ) -> None:
        self.ids = ids.clamp_min(0)  # models take them as they are
        self._wanted, self._width = wanted, packed.shape[1]
        flat = packed.flatten()
        self._copy = HostCopy(torch.cat([flat, drafts.double()]) if len(drafts) else flat)

    def wait(self) -> Sampled:
        """The tokens, once they are on the host."""
        packed = self._copy.wait().tolist()
        end, width = len(self.ids) * self._width, self._width
        rows = [packed[i : i + width] for i in range(0, end, width)]
        return _unpack(rows, self._wanted, [int(draft) for draft in packed[end:]])


class Sampler:
    """Draws the next tokens of a step. One device-to-host copy, of the ids and what goes with them.

    Args:
        vocab_size: columns of the logits.
        max_requests: slots of the allocator.
        device: of the logits.
        sampled: [n] int64, what placeholders in requests stand for (`BatchBuilder.sampled`).
        rejection_sample_method: one of `REJECTION_SAMPLE_METHODS`, for the rows of sampled requests
            that drafts follow.
        impl: as in `sample_tokens`.

    Raises:
        ValueError: another method.
    """

    def __init__(
        self,
        vocab_size: int,
        max_requests: int,
        device: torch.device | str,
        sampled: Tensor,
        *,
        rejection_sample_method: str = "strict",
        impl: str | None = None,
    ) -> None:
        if rejection_sample_method not in REJECTION_SAMPLE_METHODS:
            raise ValueError(
                f"rejection_sample_method: expected one of {list(REJECTION_SAMPLE_METHODS)}, got "
                f"{rejection_sample_method!r}"
            )
        self._rejects = rejection_sample_method == "standard"
        self._impl = impl
        self._device = torch.device(device)
        self._staging, self._sampled = Staging(device), sampled
        self._seen_shape = (max_requests, vocab_size)
        # Tokens of prompt and output, for penalties; made when first needed.
        self._seen: Tensor | None = None
        self._owners: list[tuple[Request, int] | None] = [None] * max_requests
        if self._device.type == "cuda" or impl == "triton":
            self._warm_up()

    def __call__(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        num_rows: Sequence[int],
        drafts: Tensor,
    ) -> SampledOnDevice:
        """Samples all rows.

        Args:
            logits: [sum(num_rows), vocab_size] fp32, the rows of one request one after another;
                -inf where a token is not to come.
            requests, num_rows: the requests that get tokens, and for each 1 + its verified drafts.
            drafts: [n] int64, which go to the host in the same copy.

        Returns:
            A row's token follows the drafts before it, and says by being the draft behind it that
            this one stays.
        """
        if all(request.params.is_plain for request in requests):
            ids = sample_tokens(logits, impl=self._impl)
            return _to_host(logits, ids, (), drafts)
        params = [
            r.params for r, count in zip(requests, num_rows, strict=True) for _ in range(count)
        ]
        raw = logits
        if any(p.repetition_penalty != 1 for p in params):
            logits = self._penalized(logits, requests, num_rows)
        if not any(p.temperature > 0 for p in params):
            ids = sample_tokens(logits, impl=self._impl)
            return _to_host(raw, ids, params, drafts)
        [given] = draw_columns(params, [_draws(requests, num_rows)], self._staging)
        rejects = self._rejects and len(params) > len(requests)
        probs = torch.empty_like(logits) if rejects else None
        ids = sample_tokens(logits, **given, probs=probs, impl=self._impl)
        if probs is not None:
            ids = torch.where(ids < 0, ids, self._reject(ids, probs, requests, num_rows))
        return _to_host(raw, ids, params, drafts)

    def _warm_up(self) -> None:
        """Compiles what later steps launch."""
        logits = torch.zeros(1, self._seen_shape[1], device=self._device)
        [given] = draw_columns([SamplingParams(temperature=1.0)], [np.zeros(1)], self._staging)
        sample_tokens(logits, impl=self._impl)
        sample_tokens(logits, **given, impl=self._impl)
        if self._rejects:
            sample_tokens(logits, **given, probs=torch.empty_like(logits), impl=self._impl)

    def _penalized(
        self, logits: Tensor, requests: Sequence[Request], num_rows: Sequence[int]
    ) -> Tensor:
        """Rows of penalized requests changed; to a row, the drafts before it are output too."""
        if self._seen is None:
            self._seen = torch.zeros(self._seen_shape, dtype=torch.bool, device=self._device)
        slots, penalty, rows, row = [], [], [], 0
        guessed_rows, guessed, unknown_rows, unknown = [], [], [], []
        for request, count in zip(requests, num_rows, strict=True):
            if request.params.repetition_penalty != 1:
                self._note(request)
                if request.num_output_placeholders:
                    unknown_rows.append(len(rows))
                    unknown.append(request.placeholder)
                for i in range(count):
                    guessed_rows += [len(rows)] * i
                    guessed += request.drafts[:i].tolist()
                    slots.append(request.slot)
                    penalty.append(request.params.repetition_penalty)
                    rows.append(row + i)
            row += count
        index, owned, factor, unknown_rows, unknown, *drafts = self._staging.send(
            [
                np.array(rows),
                np.array(slots),
                np.array(penalty),
                np.array(unknown_rows, dtype=np.int64),
                np.array(unknown, dtype=np.int64),
                np.array(guessed_rows, dtype=np.int64),
                np.array(guessed, dtype=np.int64),
            ]
        )
        seen = self._seen[owned]
        if len(unknown):
            seen[unknown_rows, self._sampled[unknown]] = True
        if guessed:
            seen[drafts[0], known_ids(drafts[1], self._sampled)] = True
        return logits.index_copy(0, index, penalize(logits[index], seen, factor))

    def _reject(
        self,
        drawn: Tensor,
        mass: Tensor,
        requests: Sequence[Request],
        num_rows: Sequence[int],
    ) -> Tensor:
        """``drawn`` with `rejection_sample` in the rows that a draft follows.

        Args:
            drawn: [num_rows] int64.
            mass: [num_rows, vocab_size], what the rows are drawn from.
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
                [at, drafts.astype(np.int64), *(n[at] for n in numbers)]
            )
            tokens = known_ids(tokens, self._sampled)
            probs = torch.cat([r.draft_probs[: len(w)] for w, r in part]) if has_probs else None
            stay = rejection_sample(mass[index], tokens, probs, *u, self._impl)
            drawn = drawn.index_copy(0, index, stay)
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


def _draws(
    requests: Sequence[Request], num_rows: Sequence[int], purpose: int = TOKEN
) -> np.ndarray:
    """[sum(num_rows)] float64.

    A row's number depends on its request's seed and its place in the output.
    """
    counts = np.asarray(num_rows)
    first = np.repeat([r.num_output + r.num_output_placeholders for r in requests], counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    seeds = [r.seed for r, count in zip(requests, num_rows, strict=True) for _ in range(count)]
    return uniform(seeds, first + within, purpose)


def _to_host(
    logits: Tensor, ids: Tensor, params: Sequence[SamplingParams], drafts: Tensor
) -> SampledOnDevice:
    """Ids, and the log-probabilities that rows ask for, in one copy, with the drafts."""
    wanted = [p.logprobs for p in params]
    most = max((n for n in wanted if n is not None), default=None)
    # Ids are exact in float64.
    parts = [ids[:, None].double()]
    if most is not None:
        most = min(most, logits.shape[1])
        scores = logits.log_softmax(dim=-1)
        best, best_ids = scores.topk(most, dim=-1)
        parts += [scores.gather(1, ids.clamp_min(0)[:, None]), best, best_ids.double()]
    return SampledOnDevice(ids, torch.cat(parts, dim=1), wanted, drafts)


def _unpack(packed: list[list[float]], wanted: Sequence[int | None], drafts: list[int]) -> Sampled:
    """Rows of `_to_host` on the host: id, and the log-probabilities if any."""
    found = [int(row[0]) for row in packed]
    if all(n is None for n in wanted):
        return Sampled(found, None, drafts)
    most = (len(packed[0]) - 2) // 2
    rows: list[TokenLogprobs | None] = []
    for row, n in zip(packed, wanted, strict=True):
        top = zip(map(int, row[2 + most :]), row[2 : 2 + most], strict=True)
        rows.append(None if n is None else TokenLogprobs(row[1], tuple(top)[:n]))
    return Sampled(found, rows, drafts)
