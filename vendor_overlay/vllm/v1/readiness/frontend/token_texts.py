"""The text of each token of a tokenizer, decoded once, for the feature ``logprobs``.

Stock decodes the tokens of all logprobs anew, with a call of the tokenizer for each. vLLM takes
a tokenizer's vocabulary for unchanging (``get_cached_tokenizer``): a token alone has one text.
"""

# mirrors: vllm.tokenizers.detokenizer_utils:convert_ids_list_to_tokens
# mirrors: vllm.tokenizers.hf:get_cached_tokenizer

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

#: What a tokenizer writes for bytes that are no whole character.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Where the classes of a known tokenizer are from. Others may decode by more than the token.
_HOMES = frozenset({"vllm", "transformers", "tokenizers", "builtins", "typing", "abc"})


class TokenTexts(dict[int, str]):
    """Token to its text; a token that is not there yet is decoded.

    Args:
        tokenizer: is not kept alive.

    Attributes:
        whole: tokens whose text is kept.
        incomplete: tokens whose text ends in a replacement character. What is shown for one
            depends on the tokens before it.
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
            return text  # vLLM itself may give the token a meaning later (prompt embeddings)
        self[token] = text
        return text


_texts: "WeakKeyDictionary[TokenizerLike, TokenTexts]" = WeakKeyDictionary()


def of(tokenizer: "TokenizerLike") -> TokenTexts | None:
    """Return the texts of a tokenizer; None if it is not known to decode a token always alike."""
    kind = type(tokenizer)
    homes = {one.__module__.partition(".")[0] for one in kind.__mro__}
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
    except TypeError:  # it has no hash, or there are no weak references to it
        return None
    return texts
