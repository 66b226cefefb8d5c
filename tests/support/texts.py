"""A tokenizer of bytes, whose texts have everything that is hard to encode.

Most of its tokens are single bytes, so that random tokens split code points and hold quotes,
backslashes and control characters. A chat template and markers of reasoning and of tools are there
for requests to ``/v1/chat/completions``.
"""

import json
from pathlib import Path
from typing import Any

#: Texts of the tokens behind the 256 bytes.
WORDS = (
    *(" the", " of", "é", "日本", "🙂", " \N{LINE SEPARATOR}", "\N{PARAGRAPH SEPARATOR}"),
    *('"', "\\", "\n\n", "\r\n", "\t", "\x7f", "</s", "\u0000", "\N{REPLACEMENT CHARACTER}"),
    *('{"a": ', "}", "data: ", "\N{ZERO WIDTH JOINER}", "e\N{COMBINING ACUTE ACCENT}"),
)
#: Tokens of their own: markers that parsers look for.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path, size: int) -> Path:
    """Write a tokenizer of ``size`` tokens for transformers into ``directory``.

    Tokens behind the bytes, the words and the markers are words of their own number.
    """
    directory.mkdir(parents=True, exist_ok=True)
    letters = _letters()
    texts = [*(bytes([value]) for value in range(256)), *(word.encode() for word in WORDS)]
    vocabulary: dict[str, int] = {}
    for text in texts:
        vocabulary.setdefault("".join(letters[value] for value in text), len(vocabulary))
    first = len(vocabulary)
    added = [
        {
            "id": first + number,
            "content": marker,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False),
        }
        for number, marker in enumerate(MARKERS)
    ]
    for number in range(first + len(MARKERS), size):
        vocabulary[f"{letters[32]}w{number}"] = number
    space: dict[str, Any] = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "pre_tokenizer": {"type": "ByteLevel", **space},
        "decoder": {"type": "ByteLevel", **space},
        "added_tokens": added,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _letters() -> dict[int, str]:
    """Return the letter that stands for each byte in a vocabulary of bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [value for value in range(256) if value not in shown]
    return {value: chr(value) for value in shown} | {
        value: chr(256 + number) for number, value in enumerate(hidden)
    }
