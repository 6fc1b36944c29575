"""Chat templates that do not end, or make gigabytes, end with an error; those of checkpoints do not notice."""

import json
import threading
from time import thread_time

import pytest

pytest.importorskip("jinja2", reason="renders chat templates")

from quire.models import chat
from quire.models.chat import ChatTemplate
from quire.models.template_sandbox import BoundedSandbox, Budget, TooMuch
from quire.models.tokenizer import FileTokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}BODY{% endfor %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x=START) %}{% for i in range(99) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x|length }}"


def doubling(start, following):
    return DOUBLING.replace("START", start).replace("NEXT", following)


BOMBS = {
    "loops": LOOP.replace("BODY", ""),
    "loops of text": LOOP.replace("BODY", "x" * 500),
    "loop of a macro": "{% macro m() %}" + "x" * 5000 + "{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursive loop over much": "{% for a in [1] recursive %}{% set outer = loop %}{% for i in range(99999) %}{{ outer(range(99999)) }}{% endfor %}{% endfor %}",
    "macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "block set in a loop": "{% for i in range(99999) %}{% set x %}" + "x" * 9999 + "{% endset %}{{ x }}{% endfor %}",
    "times": "{{ 'x' * 10**10 }}",
    "number times": "{{ 10**10 * 'x' }}",
    "list times": "{{ ([0] * 10**10)|length }}",
    "power": "{{ (10**(10**10)) > 1 }}",
    "product": "{% set ns = namespace(x=7**999) %}{% for i in range(12) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x > 1 }}",
    "doubled text": doubling("'abc'", "ns.x + ns.x"),
    "doubled concatenation": doubling("'abc'", "ns.x ~ ns.x"),
    "doubled list": doubling("[1]", "ns.x + ns.x"),
    "doubled by join": doubling("'abc'", "[ns.x, ns.x]|join"),
    "doubled by format": doubling("'abc'", "'%s%s' % (ns.x, ns.x)"),
    "doubled by str.format": doubling("'abc'", "'{0}{0}'.format(ns.x)"),
    "doubled by replace": doubling("'abc'", "ns.x.replace('a', 'aa')"),
    "doubled by a filter": doubling("'abc'", "ns.x|replace('a', 'aa')"),
    "doubled by set": "{% set ns = namespace(x='abc') %}{% for i in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "lists of lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "lists of lists as JSON": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "a text many times": "{% set x = 'x' * 100000 %}{{ ([x] * 100000)|join }}",
    "a text many times, joined": "{% set x = 'x' * 100000 %}{{ ''.join([x] * 100000) }}",
    "a text many times, concatenated": "{% set x = 'x' * 100000 %}{{ ('' ~ ([x] * 100000))|length }}",
    "a text many times, written": "{% set x = 'x' * 100000 %}{{ [x] * 100000 }}",
    "copies": "{% set ns = namespace(l=[]) %}{% set x = 'x' * 1000000 %}{% for i in range(9999) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "namespace in itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "replace nothing": "{% set x = 'x' * 100000 %}{{ x.replace('', x) }}",
    "filter replaces nothing": "{% set x = 'x' * 100000 %}{{ x|replace('', x) }}",
    "center": "{{ 'x'|center(10**10) }}",
    "mapped center": "{{ ['x']|map('center', 10**10)|join }}",
    "indent": "{{ 'x\ny'|indent(10**10) }}",
    "JSON indent": "{{ [1]|tojson(indent=10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10**10) }}",
    "translate": "{% set x = 'x' * 100000 %}{{ x.translate({120: x}) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "percent, starred": "{{ '%*d' % (10**10, 1) }}",
    "percent filter": "{{ '%10000000000d'|format(1) }}",
    "str.format": "{{ '{:>10000000000}'.format(1) }}",
    "nested str.format": "{{ '{:>{}}'.format(1, 10**10) }}",
    "nested str.format of a text": "{{ '{:>{}}'.format('', '10000000000') }}",
    "format_map": "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 10**10}) }}",
    "to_bytes": "{{ (5).to_bytes(10**10, 'big')|length }}",
    "slices": "{{ [1]|slice(10**10)|list|length }}",
    "batches": "{{ [1]|batch(10**10, 0)|list|length }}",
    "round": "{{ 5|round(-10**10) }}",
    "wordwrap": "{{ ('x' * 1000000)|wordwrap(1) }}",
    "urlize": "{{ ('www.' * 1000000)|urlize }}",
    "sum of lists": "{{ ([[1] * 1000] * 100000)|sum(start=[])|length }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_templates_that_would_not_end_do(name, monkeypatch):
    monkeypatch.setattr(chat, "CHARACTERS", 2 * 10**6)  # a fiftieth, for the time of the test
    template, before = ChatTemplate(BOMBS[name]), thread_time()
    with pytest.raises(ValueError, match=r"^messages: the chat template refuses them: (it takes more than \d+ characters|maximum recursion|Range too big)"):  # fmt: skip
        template.render([{"role": "user", "content": "x"}])
    assert thread_time() - before < chat.SECONDS, "the time ended it, not the work"
    assert ChatTemplate("{{ messages|length }}").render([{"role": "user", "content": "x"}]) == "1"


def test_time_is_bounded_too(monkeypatch):
    now = [0.0]

    def thread_time():
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("quire.models.template_sandbox.thread_time", thread_time)
    with pytest.raises(ValueError, match=r"or 20\.0 seconds of CPU: an endless loop\?"):
        ChatTemplate(LOOP.replace("BODY", "")).render([])
    assert 20 < now[0] < 21


# Characters that one becomes at most: percent-encoded UTF-8 ("%F0%9F%98%80"), or two escapes of JSON ("\\ud83d\\ude00").
LARGEST = 12


def test_what_it_really_takes_is_in_proportion_to_what_is_paid():
    """Results of operations that are not known one by one: their sizes against what was spent."""
    sandbox = BoundedSandbox()
    sources = [
        "x|center(77)", "x|indent(9)", "x|indent('ab', true)", "[x, x]|join('--')", "x|replace('a', 'bcd')", "x|tojson", "[x, [x]]|tojson(indent=3)",
        "x|string", "x|list", "x|pprint", "x|title", "x.ljust(99)", "x.zfill(99)", "x.center(99, '*')", "x.replace('', 'zz')", "'-'.join([x] * 7)", "'%5s%s' % (x, x)",
        "'%*d' % (40, 3)", "'{0:>50}{0}{1}'.format(x, 5)", "'{:>{}}'.format(x, 60)", "x * 9", "[x] * 9", "x + x", "x ~ x ~ 5", "x[1:]", "x.expandtabs(9)",
        "x.encode()", "x|urlencode", "x|escape", "x|wordwrap(3)", "[1, 2, 3]|batch(9, 'x')|list", "[1, 2]|slice(7)|list", "dict(a=x)|xmlattr",
        "(5).to_bytes(40, 'big')", "range(500)|list", "x.split('a')", "x|upper", "'ß'|upper", "x|truncate(5)", "[[1], [2]]|sum(start=[])",
        # Products of sizes.
        "x|indent(999)", "x.translate({97: x})", "x.replace('b', x)", "x|replace('b', x)", "x|center(9999)", "[x] * 99", "'-'.join([x] * 99)",
    ]  # fmt: skip
    for source in sources:
        for x in ("", "a", "a\tb a\n" * 30, "ab\n" * 1000):
            with sandbox.budget(10**12, 100.0) as budget:
                template = sandbox.compile_bounded("{% set y = " + source + " %}")
                made = template.make_module({"x": x}).y
                paid = 10**12 - budget._left
            size = len(made) if hasattr(made, "__len__") else 1
            assert size <= LARGEST * paid, (source, len(x))


def test_the_time_of_a_long_chat_is_no_bomb(monkeypatch):
    """A million characters in two thousand messages, with what templates of checkpoints do to them, for what their length allows."""
    monkeypatch.setattr(chat, "CHARACTERS", 0)
    source = (
        "{%- set ns = namespace(last=none, tools=false) -%}{%- for m in messages -%}{%- if m.role == 'tool' -%}{%- set ns.tools = true -%}{%- endif -%}"
        "{%- set text = m.content | trim -%}{%- if '</think>' in text -%}{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}"
        "{{ '<|im_start|>' + m.role + '\\n' + text.replace('\\r', '') + '<|im_end|>' }}{%- if loop.index0 == messages|length - 1 -%}{{ '\\n' }}{%- endif -%}"
        "{%- set ns.last = messages[loop.index0 - 1] -%}{%- if loop.last and not loop.first -%}{{ messages[-1:]|length }}{%- endif -%}{%- endfor -%}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}{{ tools | tojson(indent=4) }}"
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": f" {i} </think>\n" + "x" * 600} for i in range(2000)]  # fmt: skip
    tools = [{"name": f"f{i}", "parameters": {"a": [i, {"b": "c" * 50}]}} for i in range(300)]
    text = ChatTemplate(source).render(messages, tools=tools)
    assert text.startswith("<|im_start|>user\n" + "x" * 600 + "<|im_end|>") and len(text) > 10**6
    assert text.endswith("\n11000" + json.dumps(tools, indent=4))


def test_threads_have_budgets_of_their_own():
    sandbox, both, found = BoundedSandbox(), threading.Barrier(2, timeout=60), {}

    def render(i):
        with sandbox.budget(1000, 100.0) as budget:
            both.wait()
            sandbox.spent.spend(300)
            both.wait()
            found[i] = sandbox.spent is budget and budget._left
            both.wait()

    threads = [threading.Thread(target=render, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 700, 1: 700}


def test_budgets():
    budget = Budget(1000, 100.0)
    assert budget.deep("x" * 30) >= 30 and budget.size((",", ": ")) == 3 and budget.size(-7) == 7
    ring = []
    ring.append(ring)
    with pytest.raises(TooMuch):
        budget.deep(ring)


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
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja': expected a text in UTF-8"):
        ChatTemplate.of_directory(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = tmp_path / "tokenizer_config.json"
    for template in ([1], [{"name": "default"}], [{"template": "x"}], 5, {}):
        config.write_text(json.dumps({"chat_template": template}))
        with pytest.raises(
            ValueError, match=r"^chat_template.*: expected .*tokenizer_config\.json'"
        ):
            ChatTemplate.of_directory(tmp_path)
    config.write_text(json.dumps({"chat_template": None}))
    with pytest.raises(ValueError, match=r"^chat: expected a chat_template\.jinja"):
        ChatTemplate.of_directory(tmp_path)
    for token in ({}, {"content": 5}, {"content": None}):
        config.write_text(json.dumps({"chat_template": "x", "bos_token": token}))
        with pytest.raises(ValueError, match=r"^bos_token: expected .*tokenizer_config\.json'"):
            ChatTemplate.of_directory(tmp_path)
    for messages in (5, [5], ["text"], None):
        with pytest.raises(ValueError, match=r"^messages: expected a list of dicts, got "):
            ChatTemplate("x").render(messages)


def test_tokenizer_files_of_another_kind_are_named(tmp_path):
    pytest.importorskip("tokenizers", reason="reads tokenizer.json files")
    file = tmp_path / "tokenizer.json"
    for content in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": 5}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ):
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"^path: expected a tokenizer in '.*tokenizer\.json', got: ."
        ):
            FileTokenizer(file)
