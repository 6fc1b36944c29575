"""Tokenizer files and chat templates: what transformers makes of the same directories."""

import json
import sys

import pytest
from packaging import version

from quire.models import chat
from quire.models.chat import ChatTemplate
from quire.models.tokenizer import FileTokenizer
from tests.support.models.chats import CASES, MESSAGES, TEXTS, TOOLS, write_tokenizer

transformers = pytest.importorskip("transformers", reason="renders chat templates")


def test_named_templates(tmp_path):
    """tool_use for chats with tools; files before tokenizer_config.json, and chat_template.json last."""
    user, config = [{"role": "user", "content": "x"}], tmp_path / "tokenizer_config.json"

    def rendered():
        template = ChatTemplate.of_directory(tmp_path)
        return template.render(user), template.render(user, tools=[{}])

    (tmp_path / "chat_template.json").write_text('{"chat_template": "J {{ messages[0].content }}"}')
    config.write_text('{"chat_template": null}')
    assert rendered() == ("J x", "J x")
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert rendered() == ("D", "T")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == ("file", "file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more")
    assert rendered() == ("file", "more")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "<bos>|</s>"),
        ({"bos_token": "<s>"}, "<bos>|</s>"),
        ({"bos_token": "<s>", "added_tokens_decoder": {}}, "<s>|"),
    ],
)
def test_special_tokens_that_only_their_map_names(tmp_path, config, text):
    """As transformers: the map counts, and first, where the config describes no added tokens."""
    config = config | {"chat_template": "{{ bos_token }}|{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = {"bos_token": {"content": "<bos>", "lstrip": False}, "eos_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert ChatTemplate.of_directory(tmp_path).render([]) == text


@pytest.mark.parametrize(("name", "starts"), CASES)
def test_ids_and_chats_equal_transformers(tmp_path, name, starts):
    write_tokenizer(tmp_path / "model", name, starts)
    tokenizer = FileTokenizer(tmp_path / "model" / "tokenizer.json")
    template = ChatTemplate.of_directory(tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs(text).input_ids
    messages = MESSAGES
    if version.parse(transformers.__version__) < version.parse("5.23"):
        # Older ones keep values of None, and lists of one text.
        messages = [m for m in MESSAGES if all(isinstance(value, str) for value in m.values())]
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        assert template.render(messages, tools=tools) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages[0]['content'] + 1 }}", ""),
        ("{{ 1 / 0 }}", ""),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to"),  # runs in a sandbox
    ],
)
def test_templates_that_refuse_or_fail_as_programs_do(source, message):
    refused = f"^messages: the chat template refuses them: {message}"
    with pytest.raises(ValueError, match=refused):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("missing", ["jinja2", "transformers.utils.chat_template_utils"])
def test_what_is_missing_is_named(missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ImportError, match=r"needs the packages .*pip install 'quire-attention\[hf\]"
    ):
        ChatTemplate("x")


def test_messages_and_text_are_bounded(monkeypatch):
    monkeypatch.setattr(chat, "MAX_CHAT", 1000)
    template = ChatTemplate("{{ messages[0].content * 9 }}")

    def render(length, **options):
        return template.render([{"role": "user", "content": "x" * length}], **options)

    assert render(100) == "x" * 900
    for length, options, message in (
        (1000, {}, "messages and tools of at most 1000 characters"),
        (1, {"tools": [{"name": "f" * 1000}]}, "messages and tools of at most 1000"),
        (200, {}, "a text of at most 1000 characters, got 1800"),
    ):
        refused = f"^messages: the chat template refuses them: expected {message}"
        with pytest.raises(ValueError, match=refused):
            render(length, **options)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for x in [1] %}" * 40 + "{% endfor %}" * 40, "expected a template that is not nested so deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "expected a template that is not nested so deeply"),
        ("x" * 1_000_001, "expected a text of at most 1000000 characters, got 'xxx"),
        ("a\n{% if %}", "line 2: "),
        ("{{ 1 | nosuch }}", "line 1: No filter named 'nosuch'"),
    ],
    ids=["blocks", "brackets", "long", "syntax", "filter"],
)  # fmt: skip
def test_sources_that_are_refused_name_their_file(source, message, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(ValueError, match=r"^chat template '.*chat_template\.jinja': ") as caught:
        ChatTemplate.of_directory(tmp_path)
    assert message in str(caught.value)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    with pytest.raises(ValueError, match=r"^chat_template of '.*tokenizer_config\.json': "):
        ChatTemplate.of_directory(tmp_path)


def test_files_of_another_kind_are_named(tmp_path):
    config, file = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    expected = r"chat_template.*: expected .*tokenizer_config\.json'"
    templates = ([1], [{"name": "default"}], [{"template": "x"}], 5, {})
    contents = [({"chat_template": template}, expected) for template in templates]
    contents.append(({"chat_template": None}, r"chat: expected a chat_template\.jinja"))
    for token in ({}, {"content": 5}, {"content": None}):
        named = {"chat_template": "x", "bos_token": token}
        contents.append((named, r"bos_token: expected .*tokenizer_config\.json'"))
    for content, message in contents:
        config.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"^{message}"):
            ChatTemplate.of_directory(tmp_path)
    file.write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja': expected a text in UTF-8"):
        ChatTemplate.of_directory(tmp_path)
    for messages in (5, [5], ["text"], None):
        with pytest.raises(ValueError, match=r"^messages: expected a list of dicts, got "):
            ChatTemplate("x").render(messages)
