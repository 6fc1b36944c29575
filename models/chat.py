"""Chat templates: from messages to the model's text format.

Templates run through transformers (extra "hf"), in Jinja's immutable sandbox, in this process.
Template, messages and text are bounded in size; the time that a template takes is not.

Source: transformers ``utils/chat_template_utils``, as ``apply_chat_template`` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chat_deepseek_v4 import DeepseekV4Chat
from .config.fields import checked, naming, one_line, read_fields, shown
from .config.hf import read_json
from .deepseek_v4.config import MODEL_TYPE

# For models that have bytes for tokens and never saw a chat.
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

MAX_TEMPLATE, MAX_CHAT = 10**6, 10**8  # characters


@dataclass(frozen=True)
class NamedTemplate:
    name: str
    template: str


@dataclass(frozen=True)
class TokenizerKeys:
    chat_template: str | tuple[NamedTemplate, ...] | None = None


class ChatTemplate:
    """A compiled template.

    Args:
        source: jinja, at most 1,000,000 characters.
        special_tokens: their texts by name, such as ``bos_token``.
        file: name of its file, for error messages.
        tool_use: used instead for chats with tools; None = the same for all.

    Raises:
        ImportError: without transformers or jinja2.
        ValueError: a source that is no template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        file: str = "chat template",
        tool_use: ChatTemplate | None = None,
    ) -> None:
        try:
            import jinja2
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ImportError(
                "chat needs the packages transformers and jinja2 "
                "(pip install 'quire-attention[hf]')"
            ) from error
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE:
            raise ValueError(
                f"{file}: expected a text of at most {MAX_TEMPLATE} characters, got {shown(source)}"
            )
        self._render, self._source, self._file = render_jinja_template, source, file
        self._special_tokens, self._tool_use = dict(special_tokens or {}), tool_use
        try:
            self._render([], chat_template=source)  # transformers keeps what it compiled
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{file}: line {error.lineno}: {one_line(error.message)}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # of Python's own compiler
            raise ValueError(
                f"{file}: expected a template that is not nested so deeply, got "
                f"{type(error).__name__}: {error}"
            ) from error

    @classmethod
    def of_directory(cls, path: Path) -> ChatTemplate:
        """The templates of a checkpoint, the default one and "tool_use".

        ``chat_template.jinja`` and ``additional_chat_templates/*.jinja``, or those in
        ``tokenizer_config.json``, or the one in ``chat_template.json``.

        Raises:
            ValueError: the directory has none, or a file that is no UTF-8, no JSON, or has a key of
                another type; errors of the constructor.
        """
        sources = _sources(path)
        if "default" not in sources:
            raise ValueError(
                "chat: expected a chat_template.jinja, or a chat_template in "
                f"tokenizer_config.json, in {str(path)!r}; base models have none, and only "
                "continue texts (quire generate)"
            )
        tokens, tool_use = _special_tokens(path), None
        if "tool_use" in sources:
            name, source = sources["tool_use"]
            tool_use = cls(source, tokens, file=name)
        name, source = sources["default"]
        return cls(source, tokens, file=name, tool_use=tool_use)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Text of a chat, special tokens spelled out.

        Args:
            messages: ``{"role": "system" | "user" | "assistant", "content": text}``, the earliest
                first, with any other keys that the template reads; None = absent. With the tools
                at most 100,000,000 characters.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: True = end with the start of the model's answer.
            variables: what the template reads besides, such as ``enable_thinking``.

        Raises:
            ValueError: the template refuses the messages, or they or their text are too long.
        """
        if tools is not None and self._tool_use is not None:
            return self._tool_use.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        try:
            given = [{k: v for k, v in m.items() if v is not None} for m in messages]
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"messages: expected a list of dicts, got {shown(messages)}"
            ) from error
        try:
            _expect_length("messages and tools", len(repr(given)) + len(repr(tools)))
            [text], _ = self._render(
                [given],
                tools=None if tools is None else list(tools),
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | variables),
            )
            _expect_length("a text", len(text))
        except Exception as error:  # a template is a program, and may fail as one
            raise ValueError(
                f"messages: the {self._file} refuses them: "
                f"{one_line(error) or type(error).__name__}"
            ) from error
        return text


def _expect_length(name: str, length: int) -> None:
    if length > MAX_CHAT:
        raise ValueError(f"expected {name} of at most {MAX_CHAT} characters, got {length}")


def find_chat(path: Path) -> ChatTemplate | DeepseekV4Chat:
    """The chat format of a checkpoint: its template, or DeepSeek-V4's own where it has none.

    Raises:
        ValueError: as `ChatTemplate.of_directory`.
    """
    file = path / "config.json"
    config = read_json(file) if file.is_file() else {}
    if config.get("model_type") == MODEL_TYPE and not _sources(path):
        return DeepseekV4Chat.of_directory(path, config)
    return ChatTemplate.of_directory(path)


def _sources(path: Path) -> dict[str, tuple[str, str]]:
    """Templates by name: the file for messages, and the source."""
    found = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        file = path / name
        if found or not file.is_file():
            continue
        data = read_json(file)
        with naming(file):
            source = read_fields(TokenizerKeys, data).chat_template
        if isinstance(source, str):
            source = (NamedTemplate("default", source),)
        of = f"chat_template of {str(file)!r}"
        found = {entry.name: (of, entry.template) for entry in source or ()}
    file = path / "chat_template.jinja"
    if file.is_file():
        found = {"default": _read_template(file)}
    for file in (path / "additional_chat_templates").glob("*.jinja"):
        if file.is_file():
            found[file.stem] = _read_template(file)
    return found


def _read_template(file: Path) -> tuple[str, str]:
    name = f"chat template {str(file)!r}"
    try:
        with open(file, encoding="utf-8") as opened:
            return name, opened.read(MAX_TEMPLATE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: expected a text in UTF-8, got {one_line(error)}") from error


def _special_tokens(path: Path) -> dict[str, str]:
    """Texts by name; as in transformers, ``special_tokens_map.json`` counts only where
    tokenizer_config.json describes no added tokens."""
    tokens: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = path / name
        if not file.is_file():
            continue
        data = read_json(file)
        with naming(file):
            tokens |= {
                key: checked(str, key, token.get("content") if isinstance(token, dict) else token)
                for key, token in data.items()
                if key.endswith("_token") and isinstance(token, str | dict)
            }
        if "added_tokens_decoder" in data:
            break
    return tokens
