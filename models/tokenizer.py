"""Text to token ids and back.

A ``tokenizer.json`` through the tokenizers library, or plain bytes for the small configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from .config.fields import one_line
from .config.model import BYTE_VOCAB, ModelConfig

NUM_SPECIAL = BYTE_VOCAB - 256  # pad, eos, bos
REPLACEMENT = "\ufffd"
MAX_FILE = 2**27  # bytes of a tokenizer.json; the largest in use have 2**25
MAX_HELD_TOKENS = 8  # twice the tokens that one character can take


class Tokenizer(Protocol):
    """A tokenizer as `quire.models.llm.LLM` uses it."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text; special=True adds the special tokens around a prompt."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of generated ids."""


class TextStream:
    """Text that grows token by token, and stop strings in it.

    A character may take several tokens, and a stop string several steps: text that may still become
    part of one is held back.

    Args:
        decode: ids to text (`decode_of`).
        stop: strings that end the text.
        stop_ids: ids that have no text.

    Source: the two offsets of text-generation-inference's ``decode_token``.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str], stop_ids: Collection[int]
    ) -> None:
        self.text, self._decode = "", decode
        self._stop = tuple(stop)
        self._stop_ids = stop_ids
        self._longest = max(map(len, self._stop), default=0)
        self._ids: list[int] = []
        # Ids from _start on are decoded together with the next ones, for their spaces; the text of
        # those before _read is out.
        self._start = self._read = 0
        self._num_taken = 0
        self._finished = False

    def append(self, token: int) -> str | None:
        """Add a token; return the stop string that the text now contains, if any.

        The text then ends before it.
        """
        if token in self._stop_ids:
            return None
        self._ids.append(token)
        decode, ids, end = self._decode, self._ids[self._start :], len(self._ids)
        known, text = decode(ids[: self._read - self._start]), decode(ids)
        ends_open = text.endswith(REPLACEMENT)
        # A token without text goes: the space of the next one needs a token with text before it.
        # Some decoders strip the first space, so that one alone has no text, but two have.
        if (ends_open or text == known) and not decode([token, token]):
            self._ids.pop()
            return None
        if ends_open:
            if end - self._read < MAX_HELD_TOKENS:
                return None  # the first tokens of a character
            # Marks that stay: all but what may begin a character, which is as many marks by itself.
            held = next((n for n in (3, 2, 1) if decode(ids[:-n]) + decode(ids[-n:]) == text), 0)
            text, end = decode(ids[: len(ids) - held]), end - held
        self._start, self._read = self._read, end
        low = max(0, len(self.text) - self._longest + 1)
        self.text += text[len(known) :]
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, low)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text, self._finished = self.text[:at], True
        return stop

    def finish(self) -> str:
        """The whole text, half a character at its end included; release all of it."""
        if not self._finished:
            known = self._decode(self._ids[self._start : self._read])
            self.text += self._decode(self._ids[self._start :])[len(known) :]
            self._start = self._read = len(self._ids)
            self._finished = True
        return self.text

    def take(self) -> str:
        """New text since the last call that can no longer become part of a stop string."""
        text, held = self.text, 0
        if not self._finished:
            starts = range(min(self._longest - 1, len(text)), 0, -1)
            fits = (n for n in starts if any(stop.startswith(text[-n:]) for stop in self._stop))
            held = next(fits, 0)
        end = len(text) - held
        new = text[self._num_taken : end]
        self._num_taken = end
        return new


class ByteTokenizer:
    """Ids 0, 1, 2 are pad, eos and bos; id 3 + b is the byte b of the UTF-8 text."""

    bos_token_id = 2

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """bos (unless special is False), then one id a byte."""
        ids = [byte + NUM_SPECIAL for byte in text.encode("utf-8")]
        return [self.bos_token_id, *ids] if special else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Special ids have no text; bytes that are not UTF-8 become U+FFFD."""
        data = bytes(token - NUM_SPECIAL for token in token_ids if token >= NUM_SPECIAL)
        return data.decode("utf-8", errors="replace")


class FileTokenizer:
    """A ``tokenizer.json``, read by the tokenizers library (extra "hf").

    Raises:
        ImportError: without tokenizers.
        ValueError: a file that it cannot read.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ImportError(
                "text prompts need the package tokenizers (pip install 'quire-attention[hf]')"
            ) from error
        try:
            if (size := path.stat().st_size) > MAX_FILE:
                raise ValueError(f"{size} bytes, more than {MAX_FILE}")
            with no_panic():
                self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise ValueError(
                f"path: expected a tokenizer in {str(path)!r}, got: {one_line(error)}"
            ) from error
        # Of the file's training, not of its use.
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids with the special tokens that the file itself adds, as in transformers.

        With special=False only those in the text.
        """
        return self._backend.encode(text, add_special_tokens=special).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; skip_special_tokens=False = with the texts of special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


@contextmanager
def no_panic() -> Iterator[None]:
    """Raise a RuntimeError for a panic of the tokenizers library, which is not an Exception."""
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def decode_of(tokenizer: Tokenizer, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """A tokenizer's ``decode``, with or without the texts of special tokens; as `no_panic`."""
    options = {} if skip_special_tokens else {"skip_special_tokens": False}

    def decode(token_ids: Sequence[int]) -> str:
        with no_panic():
            return tokenizer.decode(token_ids, **options)

    return decode


def find_tokenizer(config: ModelConfig, path: Path | None) -> Tokenizer | None:
    """The ``tokenizer.json`` of a directory, bytes for a vocabulary of 259, else None."""
    if path is not None and (path / "tokenizer.json").is_file():
        return FileTokenizer(path / "tokenizer.json")
    return ByteTokenizer() if config.vocab_size == BYTE_VOCAB else None
