"""A tokenizer of bytes, whose texts have everything that is hard to encode.

Most of its tokens are single bytes, so that random tokens split code points and hold quotes,
backslashes and control characters. A chat template and markers of reasoning and of tools are there
for requests to ``/v1/chat/completions``.
"""

import json
from pathlib import Path
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

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
    letters = bytes_to_unicode()
    texts = [*(bytes([value]) for value in range(256)), *(word.encode() for word in WORDS)]
    vocabulary: dict[str, int] = {}
    for text in texts:
        vocabulary.setdefault("".join(letters[value] for value in text), len(vocabulary))
    first = len(vocabulary)
    markers = {marker: first + number for number, marker in enumerate(MARKERS)}
    for number in range(first + len(MARKERS), size):
        vocabulary[f"{letters[32]}w{number}"] = number
    return write_files(directory, vocabulary, markers, False, chat_template=TEMPLATE)


def write_files(
    directory: Path,
    vocabulary: dict[str, int],
    added: dict[str, int],
    special: bool,
    **settings: str,
) -> Path:
    """Write the files of a tokenizer of bytes.

    Args:
        directory: for the files.
        vocabulary: ids by token, a letter of ``bytes_to_unicode`` for each byte.
        added: ids of tokens that are found in a text before its bytes are.
        special: whether the added ones are left out of texts on request.
        settings: for transformers.
    """
    directory.mkdir(parents=True, exist_ok=True)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
        "pre_tokenizer": {**level, "use_regex": False},
        "decoder": {**level, "use_regex": False},
        "added_tokens": [
            {"id": token, "content": text, **flags, "special": special}
            for text, token in added.items()
        ],
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
