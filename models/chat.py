"""Chat templates: messages to the text that a model was trained on, through jinja2 (extra "hf").

Source: transformers ``utils/chat_template_utils``, whose sandbox, globals and filters the templates
    of checkpoints rely on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from .config.fields import checked, naming, read_fields, shown
from .config.files import read_json

# For models that have bytes for tokens and never saw a chat.
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


MAX_SOURCE = 1_000_000
MAX_INPUT = 10**9
SECONDS, CHARACTERS, CHARACTERS_FOR_EACH = 20.0, 10**8, 256


@dataclass(frozen=True)
class NamedTemplate:
    """One of several templates of a ``tokenizer_config.json``."""

    name: str
    template: str


@dataclass(frozen=True)
class TokenizerKeys:
    """What is read of ``tokenizer_config.json`` besides its ``*_token`` keys."""

    chat_template: str | tuple[NamedTemplate, ...] | None = None


class ChatTemplate:
    """A compiled template.

    A rendering may take 20 seconds of CPU, and work on 100 million characters and 256 times those
    of the messages (`quire.models.template_sandbox`).

    Args:
        source: jinja, at most 1,000,000 characters.
        special_tokens: their texts by name, such as ``bos_token``.
        file: where it is from, for messages.

    Raises:
        ImportError: without jinja2.
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
            from jinja2.ext import Extension, loopcontrols
        except ImportError as error:
            raise ImportError("chat needs the package jinja2 (pip install 'quire[hf]')") from error

        class Generation(Extension):
            """``{% generation %}`` marks for training what the model said: here it is its body."""

            tags = {"generation"}  # noqa: RUF012 (the base class's)

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        from .template_sandbox import BoundedSandbox

        if not isinstance(source, str) or len(source) > MAX_SOURCE:
            raise ValueError(
                f"{file}: expected a text of at most {MAX_SOURCE} characters, got {shown(source)}"
            )
        self._sandbox = sandbox = BoundedSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        sandbox.add_filter("tojson", _to_json)
        sandbox.globals["raise_exception"] = refuse
        sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = dict(special_tokens or {})
        self._file = file
        try:
            self._template = sandbox.compile_bounded(source)
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
                source = file.read_text(encoding="utf-8")
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
                absent.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with what introduces the model's answer.

        Raises:
            ValueError: the template refuses the messages, or does not come to an end.
        """
        try:
            given = [{k: v for k, v in m.items() if v is not None} for m in messages]
            tools = None if tools is None else list(tools)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"messages: expected a list of dicts, got {shown(messages)}"
            ) from error
        try:
            with self._sandbox.budget(MAX_INPUT, SECONDS) as measure:
                size = measure.deep(given) + measure.deep(tools)
            with self._sandbox.budget(CHARACTERS + CHARACTERS_FOR_EACH * size, SECONDS):
                return self._template.render(
                    messages=given,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._special_tokens,
                )
        except Exception as error:  # a template is a program, and may fail as one
            raise ValueError(
                f"messages: the {self._file} refuses them: {str(error) or type(error).__name__}"
            ) from error


def _to_json(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
