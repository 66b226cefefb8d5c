"""Cache of the text of each token of a tokenizer, for the feature ``logprobs``.

Stock vLLM calls the tokenizer for the token of each logprob. vLLM assumes that the vocabulary of a
tokenizer never changes (``get_cached_tokenizer``), so the text of a single token is constant.
"""

# mirrors: vllm.tokenizers.detokenizer_utils:convert_ids_list_to_tokens
# mirrors: vllm.tokenizers.hf:get_cached_tokenizer

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Packages whose tokenizer classes decode a token independently of its context.
_HOMES = frozenset({"vllm", "transformers", "tokenizers", "builtins", "typing", "abc"})


class TokenTexts(dict[int, str]):
    """Cache of token texts, decoded on first use. The tokenizer is referenced weakly.

    Attributes:
        whole: cached tokens whose text consists of whole characters.
        incomplete: cached tokens whose text ends in a replacement character, for which the client's
            text depends on the preceding tokens.
    """

    def __init__(self, tokenizer: "TokenizerLike") -> None:
        super().__init__()
        self._tokenizer = ref(tokenizer)
        self.whole: set[int] = set()
        self.incomplete: set[int] = set()

    def __missing__(self, token: int) -> str:
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        text: str = convert_ids_list_to_tokens(tokenizer, [token])[0]
        if text.endswith(_REPLACEMENT):
            self.incomplete.add(token)
        elif text:
            self.whole.add(token)
        else:
            return text  # not cached: vLLM may assign the token later (prompt embeddings)
        self[token] = text
        return text


_texts: "WeakKeyDictionary[TokenizerLike, TokenTexts]" = WeakKeyDictionary()


def of(tokenizer: "TokenizerLike") -> TokenTexts | None:
    """Return the cache of a tokenizer; None if a token's text may depend on its context."""
    kind = type(tokenizer)
    homes = {base.__module__.partition(".")[0] for base in kind.__mro__}
    decode = getattr(kind, "decode", None)
    homes.add(str(getattr(decode, "__module__", "")).partition(".")[0])
    if not homes <= _HOMES or hasattr(decode, "__wrapped__"):
        return None
    if "decode" in getattr(tokenizer, "__dict__", ()):
        return None
    try:
        texts = _texts.get(tokenizer)
        if texts is None:
            texts = _texts[tokenizer] = TokenTexts(tokenizer)
    except TypeError:  # unhashable, or without weak references
        return None
    return texts
