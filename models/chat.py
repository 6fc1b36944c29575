"""Chat templates: messages to the text that a model was trained on.

Templates run through transformers (extra "hf"), in Jinja's immutable sandbox, in this process.
Template, messages and text are bounded in size; the time that a template takes is not.

Source: transformers ``utils/chat_template_utils``, as ``apply_chat_template`` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config.fields import checked, naming, read_fields, shown
from .config.files import read_json

# For models that have bytes for tokens and never saw a chat.
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

MAX_TEMPLATE, MAX_CHAT = 10**6, 10**8  # characters


@dataclass(frozen=True)
class NamedTemplate:
    """One of several templates of a ``tokenizer_config.json``."""

    name: str
    template: str


@dataclass(frozen=True)
class TokenizerKeys:
    """Keys of ``tokenizer_config.json`` besides its ``*_token`` keys."""

    chat_template: str | tuple[NamedTemplate, ...] | None = None


class ChatTemplate:
    """A compiled template.

    Args:
        source: jinja, at most 1,000,000 characters.
        special_tokens: their texts by name, such as ``bos_token``.
        file: where it is from, for messages.

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
    ) -> None:
        try:
            import jinja2
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise ImportError(
                "chat needs the packages transformers and jinja2 (pip install 'quire[hf]')"
            ) from error
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE:
            raise ValueError(
                f"{file}: expected a text of at most {MAX_TEMPLATE} characters, got {shown(source)}"
            )
        self._render, self._source, self._file = render_jinja_template, source, file
        self._special_tokens = dict(special_tokens or {})
        try:
            self._render([], chat_template=source)  # transformers keeps what it compiled
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{file}: line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:  # of Python's own compiler
            raise ValueError(
                f"{file}: expected a template that is not nested so deeply, got "
                f"{type(error).__name__}: {error}"
            ) from error

    @classmethod
    def of_directory(cls, path: Path) -> ChatTemplate:
        """The template of a checkpoint.

        ``chat_template.jinja``, or the (default) one in ``tokenizer_config.json``.

        Raises:
            ValueError: the directory has neither, or naming a file that is no UTF-8, no JSON, or
                has a key of another type; what the constructor raises.
        """
        config_file, file = path / "tokenizer_config.json", path / "chat_template.jinja"
        config = read_json(config_file) if config_file.is_file() else {}
        with naming(config_file):
            source = read_fields(TokenizerKeys, config).chat_template
            tokens = {
                name: checked(str, name, token.get("content") if isinstance(token, dict) else token)
                for name, token in config.items()
                if name.endswith("_token") and isinstance(token, str | dict)
            }
        name = f"chat_template of {str(config_file)!r}"
        if file.is_file():
            name = f"chat template {str(file)!r}"
            try:
                with open(file, encoding="utf-8") as opened:
                    source = opened.read(MAX_TEMPLATE + 1)
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{name}: expected a text in UTF-8, got {error}") from error
        elif isinstance(source, tuple):
            source = {entry.name: entry.template for entry in source}.get("default")
        if source is None:
            raise ValueError(
                "chat: expected a chat_template.jinja, or a chat_template in "
                f"tokenizer_config.json, in {str(path)!r}"
            )
        return cls(source, tokens, file=name)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Text of a chat, special tokens spelled out.

        Args:
            messages: ``{"role": "system" | "user" | "assistant", "content": text}``, first one
                first, and whatever else the template reads; a key whose value is None counts as
                absent. With the tools at most 100,000,000 characters.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with what introduces the model's answer.

        Raises:
            ValueError: the template refuses the messages, or they or their text are too long.
        """
        try:
            given = [{k: v for k, v in m.items() if v is not None} for m in messages]
            tools = None if tools is None else list(tools)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"messages: expected a list of dicts, got {shown(messages)}"
            ) from error
        try:
            _expect_length("messages and tools", len(repr(given)) + len(repr(tools)))
            [text], _ = self._render(
                [given],
                tools=tools,
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            _expect_length("a text", len(text))
        except Exception as error:  # a template is a program, and may fail as one
            raise ValueError(
                f"messages: the {self._file} refuses them: {str(error) or type(error).__name__}"
            ) from error
        return text


def _expect_length(name: str, length: int) -> None:
    if length > MAX_CHAT:
        raise ValueError(f"expected {name} of at most {MAX_CHAT} characters, got {length}")
