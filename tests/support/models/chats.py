"""Directories with a tokenizer and a chat template, and chats for them: for the tests of `models.chat` and for transformers."""

import json

TEXTS = ["one two", "", "<bos> one", "two<turn>one three", "naïve 🙂👩‍🔬 東京"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": "é <&>"}}}]
MESSAGES = [
    {"role": "system", "content": " be brief "},
    {"role": "user", "content": "one\ntwo"},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
    {"role": "tool", "content": "two", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "three"}]},
]
TEMPLATES = {
    "turns": "{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n{{ m['content'] }}{% if 'name' in m %}!{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}",
    "tools": "{%- if tools is not none %}{{ tools | tojson(indent=2) }}{% else %}no tools{% endif %}"
    "{%- if not documents %} no documents{% endif %}{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}",
    "tokens": "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ pad_token is defined }}|{{ add_bos_token is defined }}",
    "marked": "{% for m in messages %}{% generation %}\n{{ m.role }}{% endgeneration %}\n{% if loop.index == 3 %}{% break %}{% endif %}\n{% endfor %}",
    "namespaces": "{% set ns = namespace(last='') %}{% for m in messages %}\n    {% set ns.last = m.role %}\n{% endfor %}\n{{ ns.last }}\n{{ dict(a=1) }}",
}
CASES = [(name, starts) for name in TEMPLATES for starts in (True, False)]


def write_tokenizer(path, template, starts):
    """A byte-level tokenizer that puts <bos> in front of a prompt only where ``starts``; its config names other things than its file."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    path.mkdir(parents=True)
    special = ["<pad>", "<eos>", "<bos>", "<turn>", "<end>", "<image>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate([*special, *letters, "on", "one"])},
                   [("o", "n"), ("on", "e")])
    )  # fmt: skip
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    if starts:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    backend.enable_truncation(4)
    backend.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": not starts,
        "bos_token": {"content": "<bos>", "__type": "AddedToken"},
        "eos_token": "<eos>",
        "image_token": "<image>",
        "extra_special_tokens": {"image_token": "<image>"},
        "chat_template": TEMPLATES[template],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": 2}))
