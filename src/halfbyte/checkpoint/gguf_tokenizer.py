"""The tokenizer inside a GGUF file, saved as Hugging Face files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.checkpoint.gguf_file import GgufFile
from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Where a byte-level tokenizer may not merge across, as the models' own tokenizer.json files have it.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3, _QWEN2 = _WORDS.replace("{DIGITS}", "{1,3}"), _WORDS.replace("{DIGITS}", "")
_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types of tokens that are matched whole: markers, and plain text."""
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


@dataclass(frozen=True)
class Split:
    """How ``tokenizer.ggml.pre`` cuts text before merging.

    single_digits: each digit is cut off first. whole_words: a piece that is a token needs no merges.
    nfc: Unicode is composed first.
    """

    pattern: str
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False


SPLITS = {
    "gpt-2": Split(_GPT2),
    "smollm": Split(_GPT2, single_digits=True),
    "llama-bpe": Split(_LLAMA3, whole_words=True),
    "qwen2": Split(_QWEN2, nfc=True),
    "deepseek-r1-qwen": Split(_QWEN2, nfc=True),
}
"""GGUF's names of the byte-level tokenizers that are known."""


def save_tokenizer(gguf: GgufFile, folder: Path, context_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template to ``folder``.

    Byte-level tokenizers (``gpt2``) are built here: what transformers makes of them depends on its version,
    down to another end token. SentencePiece ones (``llama``) are left to transformers.

    Errors: the file holds no tokenizer, one of another kind, or one that cannot be rebuilt.
    """
    from transformers import PreTrainedTokenizerFast

    kind = gguf.get("tokenizer.ggml.model")
    tokens: list[str] = gguf.get("tokenizer.ggml.tokens") or []
    special = _special_tokens(gguf, tokens)
    try:
        if kind == "gpt2":
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_level(gguf, tokens), **special)
        elif kind == "llama":
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                gguf.path.absolute().parent, gguf_file=gguf.path.name, local_files_only=True
            )
            tokenizer.add_special_tokens(special)
        else:
            raise HalfbyteError(f"{gguf.path}: tokenizer {kind!r} is not supported; supported: gpt2, llama")
    except HalfbyteError:
        raise
    except Exception as error:
        # Both libraries let whatever their converters raise through: any of it means the same here.
        raise HalfbyteError(f"{gguf.path}: its {kind!r} tokenizer cannot be rebuilt ({error})") from error
    tokenizer.chat_template = gguf.get("tokenizer.chat_template")
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(folder)


def _special_tokens(gguf: GgufFile, tokens: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, key in _SPECIAL.items():
        index = gguf.get(f"tokenizer.ggml.{key}")
        if index is None:
            continue
        if index >= len(tokens):
            raise HalfbyteError(
                f"{gguf.path}: tokenizer.ggml.{key} is {index}, but there are {len(tokens)} tokens"
            )
        found[name] = tokens[index]
    return found


def _byte_level(gguf: GgufFile, tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = gguf.get("tokenizer.ggml.pre", "gpt-2")
    if name not in SPLITS:
        raise HalfbyteError(
            f"{gguf.path}: tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(SPLITS)}"
        )
    split = SPLITS[name]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise HalfbyteError(f"{gguf.path}: tokenizer.ggml.tokens holds a token twice")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.get("tokenizer.ggml.merges") or []]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    steps += [
        pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    types = gguf.get("tokenizer.ggml.token_type") or []
    for wanted, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        chosen = [token for token, kind in zip(tokens, types, strict=False) if kind == wanted]
        add([AddedToken(token, normalized=False, special=wanted == _CONTROL) for token in chosen])
    _add_start(gguf, tokenizer, tokens)
    return tokenizer


def _add_start(gguf: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Put the start token in front of every text, where the file asks for that."""
    from tokenizers import processors

    index = gguf.get("tokenizer.ggml.bos_token_id")
    if gguf.get("tokenizer.ggml.add_bos_token", False) and index is not None:
        start = tokens[index]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A", pair=f"{start} $A {start}:1 $B:1", special_tokens=[(start, index)]
        )
