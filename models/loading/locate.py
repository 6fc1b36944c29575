"""The directory of a checkpoint: given, unpacked from a GGUF file, or fetched from the Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..config.named import named_configs
from .gguf import unpack

# Weights are fetched as safetensors only, and of the copies that some repositories have, one.
PATTERNS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.*", "additional_chat_templates/*",
    "model*.safetensors", "model.safetensors.index.json",
)  # fmt: skip
TIMEOUT = 10  # seconds until the Hub counts as out of reach
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w./-]+\.gguf))?")


def locate_checkpoint(model: str | Path) -> Path:
    """A directory with a config.json: the one given, or made or fetched.

    Args:
        model: a Hugging Face directory; a .gguf file; or a name on the Hub, ``org/name``, or
            ``org/name/file.gguf`` of a repository with several files.

    Raises:
        ValueError: the model is none of these; the Hub lacks a file that is needed; the Hub cannot
            be reached, and its cache lacks the model.
        ImportError: a package that is needed is not installed.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return unpack(path)
    if (name := _HUB_NAME.fullmatch(str(model))) and not path.parent.is_dir():
        return _from_hub(*name.groups())
    raise unknown_model(model)


def unknown_model(model: str | Path) -> ValueError:
    """The error for a model that is no built-in name, directory, file or name on the Hub."""
    return ValueError(
        f"model: there is no {str(model)!r}. It may be\n"
        "  a Hugging Face directory, a .gguf file, a name on the Hub such as "
        "google/gemma-3-4b-it,\n"
        f"  or, with random weights, one of {', '.join(sorted(named_configs()))}"
    )


def _from_hub(repository: str, file: str | None) -> Path:
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError as error:
        raise ImportError(
            "a model from the Hub needs the package huggingface_hub "
            "(pip install 'quire-attention[hf]')"
        ) from error
    of_hub = f"model: {repository!r} of the Hugging Face Hub"
    try:
        siblings = HfApi().model_info(repository, timeout=TIMEOUT).siblings or []
        files = [sibling.rfilename for sibling in siblings]
    except RepositoryNotFoundError:
        raise ValueError(f"{of_hub}: no such repository, or it needs `hf auth login`") from None
    except Exception as error:  # of the network: the client has no one type for them
        reason, files = error, None
    has_safetensors = files is None or any(name.endswith(".safetensors") for name in files)
    try:
        if file is None and not has_safetensors:
            ggufs = [name for name in files if name.endswith(".gguf")]
            if len(ggufs) != 1:
                raise ValueError(
                    f"{of_hub}: expected safetensors, or one of its .gguf files in the name "
                    f"(org/name/file.gguf), got {ggufs or 'neither'}"
                )
            [file] = ggufs
        offline: dict[str, Any] = {"local_files_only": files is None}
        if file is not None:
            return unpack(Path(hf_hub_download(repository, file, **offline)))
        return Path(snapshot_download(repository, allow_patterns=list(PATTERNS), **offline))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{of_hub}: not in the cache, and the Hub cannot be reached: {type(reason).__name__}"
        ) from None
