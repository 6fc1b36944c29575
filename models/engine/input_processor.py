"""From what a caller asks for to requests: prompts checked, one request for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from quire.kvcore import Match

from ..config.fields import shown
from ..tokenizer import TextStream, Tokenizer
from .distributions import derived_seed
from .request import Request, SamplingParams


class InputProcessor:
    """Makes requests of prompts.

    Args:
        model: whose ``config`` has vocab_size, and eos_token_ids, its own stop ids.
        max_model_len: tokens of the longest sequence.
        tokenizer: for stop strings and streamed text; None = neither.
        seed: of the seeds of requests that have none.
    """

    def __init__(
        self, model: nn.Module, max_model_len: int, *, tokenizer: Tokenizer | None, seed: int
    ) -> None:
        self.model, self.max_model_len = model, max_model_len
        self.tokenizer = tokenizer
        self._seeds = np.random.default_rng(seed)

    def check(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> np.ndarray:
        """Refuses a prompt or parameters that the engine cannot serve.

        Returns:
            The prompt as an array of its own, [num_tokens] int32.

        Raises:
            ValueError: ids that are none, too many or none at all, or stop strings without a
                tokenizer.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params: expected SamplingParams, got {shown(params)}")
        vocab_size = self.model.config.vocab_size
        prompt = _as_array(prompt_token_ids, self.max_model_len)
        if prompt.ndim != 1:
            raise ValueError(
                f"prompt_token_ids: expected a list of ids, got shape {list(prompt.shape)}"
            )
        if not len(prompt):
            raise _wrong_length(0, self.max_model_len)
        if prompt.dtype.kind not in "iu" or prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"prompt_token_ids: expected ints in 0..{vocab_size - 1}, "
                f"got {shown(prompt.tolist())}"
            )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: expected no strings, as this engine has no tokenizer")
        return prompt.astype(np.int32)

    def samples(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        request_id: str,
        match: Match,
        salt: bytes,
        stream: bool,
        arrival: float,
    ) -> list[Request]:
        """The ``params.n`` samples of a request.

        Args:
            prompt: of `check`.
            params: how to generate.
            request_id, salt, stream: as in `Engine.add_request`.
            match: what the allocator has cached of the prompt.
            arrival: seconds on the clock of `time.perf_counter`.
        """
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        stop_ids = frozenset(params.stop_token_ids) | frozenset(eos)
        has_text = self.tokenizer is not None and (stream or params.stop)
        return [
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=params,
                capacity=min(len(prompt) + params.max_tokens, self.max_model_len),
                stop_ids=stop_ids,
                salt=salt,
                arrival=arrival,
                match=match,
                sample=sample,
                seed=derived_seed(seed, sample),
                text=TextStream(self.tokenizer, params.stop, stop_ids) if has_text else None,
                stream=stream,
            )
            for sample in range(params.n)
        ]


def _as_array(prompt: Any, limit: int) -> np.ndarray:
    """Prompt ids of any kind as an array; raises ValueError where they are none."""
    try:
        length = len(prompt)
        if length < limit:
            return np.asarray(prompt.cpu() if isinstance(prompt, Tensor) else prompt)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"prompt_token_ids: expected a list of ids, got {shown(prompt)}"
        ) from error
    raise _wrong_length(length, limit)  # not even copied


def _wrong_length(length: int, limit: int) -> ValueError:
    return ValueError(
        f"prompt_token_ids: expected 1..{limit - 1} ids (max_model_len - 1), got {length}"
    )
