"""From a data path and a tokenizer to the samples that a model is calibrated on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

from halfbyte.calibration.chat import encode_chat
from halfbyte.calibration.dealing import Dealer
from halfbyte.calibration.drawing import draw
from halfbyte.calibration.files import data_files, open_source
from halfbyte.calibration.masks import MASKED_ROLES
from halfbyte.calibration.records import Chat, Document, TokenIds, parse
from halfbyte.calibration.samples import CalibrationSet, DataReport
from halfbyte.errors import HalfbyteError

BUILT_IN = "built-in"
_TEXTS = ("calibration-code.txt", "calibration-prose.txt")
_CHATS = "calibration-chats.jsonl"
# A piece of a text file gives a whole window and some more, so that few windows are put together from ends.
_BYTES_PER_TOKEN = 6
_SMALLEST_PIECE = 4096


def load_samples(
    data: Path | str | None,
    tokenizer: Any,
    *,
    samples: int = 128,
    length: int | Sequence[int] = 2048,
    masked_roles: Collection[str] = MASKED_ROLES,
    context: int | None = None,
    seed: int = 0,
) -> CalibrationSet:
    """Samples from ``data``: a JSONL, parquet or text file, a directory of them, or None for the built-in texts.

    tokenizer: a transformers tokenizer. samples: how many, fewer if the data holds no more. length: tokens of a
    sample, or several such numbers that samples have in turn; chats and rows of token ids may be shorter. masked_roles:
    messages of these do not count, nor do tokens that the chat template writes. context: the longest sequence that the
    model can see. The same files, tokenizer, numbers and seed give the same samples in the same order.

    Rows are drawn in an order that the seed decides until there are enough samples; rows that are not drawn are not
    checked. ``docs/calibration.md`` says what a row may hold.

    Errors: numbers out of range; data that is absent, unreadable, empty, malformed, or gives no sample.
    """
    lengths = _checked_lengths(length, context)
    if samples < 1:
        raise HalfbyteError(f"{samples} samples are too few, expected at least 1")
    paths, notes = _built_in(tokenizer) if data is None else data_files(Path(data))
    piece = max(_SMALLEST_PIECE, _BYTES_PER_TOKEN * max(lengths))
    sources = [(path, open_source(path, piece)) for path in paths]
    intake = _Intake(tokenizer, Dealer(samples, lengths, *_special(tokenizer), Random(seed)), masked_roles)
    for row in draw(sources, seed):
        if intake.dealer.full:
            break
        intake.add(parse(row, len(tokenizer)))
    intake.dealer.finish()
    names = (BUILT_IN,) if data is None else tuple(map(str, paths))
    if not intake.dealer.samples:
        why = ", ".join(f"{rows} rows {reason}" for reason, rows in intake.skipped.items())
        raise HalfbyteError(f"{data}: gives no sample ({why or 'all rows are blank'})")
    return CalibrationSet(tuple(intake.dealer.samples), intake.report(samples, names, notes))


class _Intake:
    """Records in, tokens to the dealer, and what there is to say about them."""

    def __init__(self, tokenizer: Any, dealer: Dealer, masked_roles: Collection[str]) -> None:
        self.dealer = dealer
        self.skipped: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._masked_roles = masked_roles
        self._roles: set[str] = set()
        self._lost = 0

    def add(self, record: Document | Chat | TokenIds) -> None:
        if isinstance(record, Chat):
            self._add_chat(record)
        elif isinstance(record, TokenIds):
            if self._some(record.ids):
                self.dealer.add_ids(record.ids)
        else:
            ids = list(self._tokenizer(record.text, add_special_tokens=False, verbose=False)["input_ids"])
            if self._some(ids):
                self.dealer.add_document(ids)

    def _add_chat(self, chat: Chat) -> None:
        if self._some(chat.messages):
            encoded = encode_chat(self._tokenizer, chat, self._masked_roles)
            self._roles.update(message.role for message in chat.messages)
            self._lost += encoded.lost
            self.skipped["without a token that counts"] += not self.dealer.add_chat(
                encoded.ids, encoded.reasons
            )

    def _some(self, content: Sequence[Any]) -> bool:
        self.skipped["empty"] += not content
        return bool(content)

    def report(self, requested: int, sources: tuple[str, ...], notes: Sequence[str]) -> DataReport:
        dealer = self.dealer
        sizes = [len(sample.ids) for sample in dealer.samples]
        return DataReport(
            sources=sources,
            requested=requested,
            samples=len(sizes),
            tokens=sum(sizes),
            masked=dict(sorted(dealer.masked.items())),
            shortest=min(sizes),
            longest=max(sizes),
            truncated=dealer.truncated,
            split=dealer.split,
            skipped={reason: rows for reason, rows in self.skipped.items() if rows},
            notes=(*notes, *self._notes(requested)),
        )

    def _notes(self, requested: int) -> list[str]:
        notes = []
        if len(self.dealer.samples) < requested:
            notes.append(f"the data is enough for {len(self.dealer.samples)} of {requested} samples")
        if self._lost:
            notes.append(f"the chat template leaves out or rewrites {self._lost} messages: they do not count")
        unknown = sorted(set(self._masked_roles) - set(MASKED_ROLES) - self._roles)
        if self._roles and unknown:
            notes.append(f"no message has the masked role {', '.join(unknown)}")
        return notes


def _checked_lengths(length: int | Sequence[int], context: int | None) -> list[int]:
    lengths = [length] if isinstance(length, int) else list(length)
    if not lengths:
        raise HalfbyteError("no length is given, expected one or more numbers of tokens")
    for tokens in lengths:
        if tokens < 1:
            raise HalfbyteError(f"length {tokens} is too short, expected at least 1 token")
        if context is not None and tokens > context:
            raise HalfbyteError(f"length {tokens} is longer than the model's context of {context} tokens")
    return lengths


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What opens a sequence of this tokenizer, and what separates documents: no or one token each."""
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    opens = start is not None and list(tokenizer("a", verbose=False)["input_ids"])[:1] == [start]
    return [start] if opens else [], [] if end is None else [end]


def _built_in(tokenizer: Any) -> tuple[list[Path], list[str]]:
    folder = Path(str(files("halfbyte") / "data"))
    texts = [folder / name for name in _TEXTS]
    if getattr(tokenizer, "chat_template", None) is None:
        return texts, ["the tokenizer has no chat template: the built-in chats are left out"]
    return [folder / _CHATS, *texts], []
