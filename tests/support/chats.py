"""Conversations, chat templates and small tokenizers of the kind that Hugging Face's libraries read, for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

Message = dict[str, Any]

TEMPLATES = {
    "qwen-like": (
        "{%- if messages[0].role != 'system' %}\n"
        "    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}\n"
        "{%- endif %}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n"
        "{%- endif %}\n"
    ),
    "llama-like": (
        "{{- bos_token }}\n"
        "{%- if not date is defined %}\n    {%- set date = '26 Jul' %}\n{%- endif %}\n"
        "{%- for message in messages %}\n"
        "{%- set place = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}\n"
        "{{- place + (date + ' ' if loop.first else '') + message['content'] | trim + '<|eot_id|>' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
    ),
    "instruct-like": (
        "{{ bos_token }}{% set ns = namespace(system='') %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'system' %}{% set ns.system = message['content'] + '\\n\\n' %}{% continue %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + ns.system + message['content'] + ' [/INST]' }}{% set ns.system = '' %}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
        "{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"
    ),
    "stripping-like": (
        "{% for message in messages %}{{ '<|role|>' + message['role'] + '\\n' + message['content'] + '<|stop|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|role|>assistant\\n' }}{% endif %}"
    ),
    "json-like": (
        "{% for message in messages %}{{ '<|im_start|>' }}{{ {'role': message.role, 'text': message.content} | tojson }}"
        "{% if message.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    ),
}
"""Templates in the style of well-known ones. The last one cannot be used for training: an answer begins before its prompt ends."""

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin|>", "<|end|>")
_WORDS = ["alpha", "Beta", "naïve", "日本", "x = 1;", "don't", "  two", "line\nbreak", "😀", "3.14", "\ttab", "ÉCOLE", "a<b"]


def conversations(count: int = 50, seed: int = 0) -> list[list[Message]]:
    """Return conversations of one to four turns, some with a system message, of words that are hard for tokenizers."""
    draw = random.Random(seed)

    def text() -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(draw.randint(1, 12)))

    found = []
    for number in range(count):
        messages: list[Message] = [{"role": "system", "content": text()}] if number % 3 == 0 else []
        for _ in range(draw.randint(1, 4)):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        found.append(messages)
    return found


def write_hugging_face_tokenizer(folder: Path, template: str | list[dict[str, str]] | None = None) -> Path:
    """Write `tokenizer.json`, `tokenizer_config.json` and a chat template into a folder: byte-level BPE with special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([" ".join(_WORDS), "user assistant system You help."] * 5, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    tokenizer.add_special_tokens([AddedToken("<|role|>", special=True, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<|stop|>", special=True, normalized=False, rstrip=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | ({} if template is None else {"chat_template": template})))
    return folder
