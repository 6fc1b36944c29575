"""Text to token ids and back: a ``tokenizer.json`` through the tokenizers library, or plain bytes for the small configurations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from quire.models.configs import BYTE_VOCAB, ModelConfig

NUM_SPECIAL = BYTE_VOCAB - 256  # pad, eos, bos


class Tokenizer(Protocol):
    """What `quire.models.llm.LLM` needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the model's start token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of generated ids, without special tokens."""


class ByteTokenizer:
    """Ids 0, 1, 2 are pad, eos and bos; id 3 + b is the byte b of the UTF-8 text."""

    bos_token_id = 2

    def encode(self, text: str) -> list[int]:
        """bos, then one id a byte."""
        return [self.bos_token_id, *(byte + NUM_SPECIAL for byte in text.encode("utf-8"))]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special ids are left out; bytes that are not UTF-8 become U+FFFD."""
        data = bytes(token - NUM_SPECIAL for token in token_ids if token >= NUM_SPECIAL)
        return data.decode("utf-8", errors="replace")


class FileTokenizer:
    """A ``tokenizer.json``, read by the tokenizers library (extra "hf").

    bos_token_id: put in front of a prompt that the file's own post-processor does not start with it; None = never.
    """

    def __init__(self, path: Path, bos_token_id: int | None) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ImportError(
                "text prompts need the package tokenizers (pip install 'quire[hf]')"
            ) from error
        self._backend = Backend.from_file(str(path))
        self._bos_token_id = bos_token_id

    def encode(self, text: str) -> list[int]:
        """Ids with the special tokens that the file adds, starting with bos."""
        ids = self._backend.encode(text).ids
        if self._bos_token_id is not None and ids[:1] != [self._bos_token_id]:
            ids.insert(0, self._bos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=True)


def find_tokenizer(config: ModelConfig, path: Path | None) -> Tokenizer | None:
    """The tokenizer of a model: ``tokenizer.json`` in its directory, bytes for a vocabulary of 259, else None."""
    if path is not None and (path / "tokenizer.json").is_file():
        return FileTokenizer(path / "tokenizer.json", config.bos_token_id)
    return ByteTokenizer() if config.vocab_size == BYTE_VOCAB else None
