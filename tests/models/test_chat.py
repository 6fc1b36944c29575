"""Tokenizer files and chat templates: what transformers makes of the same directories."""

import json
import sys

import pytest

from quire.models.chat import PLAIN, ChatTemplate
from quire.models.tokenizer import FileTokenizer
from tests.support.models.chats import CASES, MESSAGES, TEXTS, TOOLS

TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] | trim }}{{ {'a': 'é'} | tojson }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


def test_chat_templates_of_a_directory(tmp_path):
    pytest.importorskip("jinja2", reason="renders chat templates")
    messages = [{"role": "user", "content": " hi "}]
    expected = '<s><turn>user\nhi{"a": "é"}<end>\n<turn>model\n'
    with pytest.raises(ValueError, match=r"chat: expected a chat_template\.jinja"):
        ChatTemplate.of_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"path: expected JSON in .*tokenizer_config\.json"):
        ChatTemplate.of_directory(tmp_path)
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    for template in (
        TEMPLATE,
        [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}],
    ):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": template})
        )
        assert ChatTemplate.of_directory(tmp_path).render(messages) == expected
    (tmp_path / "chat_template.jinja").write_text("file wins")
    assert ChatTemplate.of_directory(tmp_path).render(messages) == "file wins"
    template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"})
    assert (
        template.render(messages, add_generation_prompt=False) == expected[: -len("<turn>model\n")]
    )
    with pytest.raises(
        ValueError, match="messages: the chat template refuses them: no system role"
    ):
        template.render([{"role": "system", "content": "x"}])
    with pytest.raises(ValueError, match="chat template: line 1"):
        ChatTemplate("{% for %}")
    assert ChatTemplate(PLAIN).render(messages) == "user:  hi \nassistant: "


def test_templates_run_in_a_sandbox():
    jinja2 = pytest.importorskip("jinja2", reason="renders chat templates")
    with pytest.raises((ValueError, jinja2.exceptions.SecurityError)):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render([])


@pytest.mark.parametrize(
    "case", range(len(CASES)), ids=[f"{n}-{'bos' if s else 'none'}" for n, s in CASES]
)
def test_ids_and_chats_equal_transformers(oracle_root, case):
    expected = json.loads((oracle_root / "chats.json").read_text())[case]
    directory = oracle_root / f"chat{case}"
    tokenizer = FileTokenizer(directory / "tokenizer.json")
    assert [tokenizer.encode(text) for text in TEXTS] == expected["ids"]
    template = ChatTemplate.of_directory(directory)
    rendered = [template.render(MESSAGES, tools=tools) for tools in (None, TOOLS)]
    assert rendered == expected["rendered"]


def test_templates_that_fail_as_programs_do():
    for source in ("{{ messages[0]['content'] + 1 }}", "{{ 1 / 0 }}"):
        with pytest.raises(ValueError, match="messages: the chat template refuses them: "):
            ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ImportError, match=r"chat needs the package jinja2 \(pip install 'quire\[hf\]'\)"
    ):
        ChatTemplate("x")
