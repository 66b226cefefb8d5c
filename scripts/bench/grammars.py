"""A grammar for models without a tokenizer, which xgrammar compiles as it does any other."""

from __future__ import annotations

import random
import string
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

#: Strings for as long as tokens are asked for: as in JSON, most tokens are allowed in them, and
#: whether one with a quote is takes a look at what follows.
STRINGS = r"""root ::= "\"" [^"\\\r\n]* "\", " root"""
#: Tokens that are words, and those with signs; the rest are numbers.
_WORDS, _SIGNED = 0.93, 0.05
_SIGNS = '",:{}[]().;-_/<>=\\\n'


def params() -> StructuredOutputsParams:
    """Return what a request asks for."""
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(grammar=STRINGS, _backend="xgrammar")


def serve(manager: Any, vocabulary: int) -> None:
    """Give a structured output manager the backend of a model without a tokenizer.

    Args:
        manager: a StructuredOutputManager.
        vocabulary: number of the model's tokens.
    """
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    info = xgrammar.TokenizerInfo(
        texts(vocabulary), vocab_size=vocabulary, stop_token_ids=[vocabulary - 1]
    )
    backend = XgrammarBackend.__new__(XgrammarBackend)  # its constructor asks for a tokenizer
    backend.vllm_config, backend.vocab_size = manager.vllm_config, vocabulary
    backend.disable_any_whitespace, backend.num_speculative_tokens = False, 0
    backend.compiler = xgrammar.GrammarCompiler(info, max_threads=8)
    manager.backend = backend
    # Compiled in a thread, it would let a request join whenever that is done.
    manager._use_async_grammar_compilation = False


def texts(vocabulary: int) -> list[bytes]:
    """Return the text of each token: every byte, and then what texts are made of."""
    chance = random.Random(0)  # noqa: S311 (draws no secret)
    found = dict.fromkeys(bytes([byte]) for byte in range(min(256, vocabulary)))
    while len(found) < vocabulary:
        kind, length = chance.random(), chance.randint(2, 9)
        letters = "".join(chance.choices(string.ascii_lowercase, k=length))
        if kind < _WORDS:
            text = chance.choice(["", " "]) + chance.choice([letters, letters.title()])
        elif kind < _WORDS + _SIGNED:
            signs = "".join(chance.choices(_SIGNS, k=chance.randint(1, 3)))
            text = chance.choice([signs, signs + letters[:3], " " + signs, letters[:3] + signs])
        else:
            text = str(chance.randrange(10**length))
        found[text.encode()] = None
    return list(found)
