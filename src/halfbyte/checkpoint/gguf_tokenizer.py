"""The tokenizer inside a GGUF file, saved as Hugging Face files."""

from __future__ import annotations

from pathlib import Path

from halfbyte.checkpoint.gguf_file import GgufFile
from halfbyte.errors import HalfbyteError


def save_tokenizer(gguf: GgufFile, folder: Path, context_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template to ``folder``.

    Errors: the file holds no tokenizer, or one that transformers cannot rebuild.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    kind = gguf.get("tokenizer.ggml.model")
    if kind is None:
        raise HalfbyteError(f"{gguf.path}: holds no tokenizer (tokenizer.ggml.model)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.path.absolute().parent, gguf_file=gguf.path.name, local_files_only=True
        )
    except Exception as error:
        # transformers lets whatever its converters raise through: any of it means the same here.
        raise HalfbyteError(
            f"{gguf.path}: its {kind!r} tokenizer cannot be rebuilt ({type(error).__name__}: {error})"
        ) from error
    if gguf.get("tokenizer.ggml.pre") == "smollm":
        # transformers has no rule for this name and falls back to GPT-2's, which keeps the space before a
        # number apart from the spaces before it. The model was trained on digits that stand alone.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(folder)
