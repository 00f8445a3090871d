"""The texts that quality is measured on: a file of the user's, or the two that come with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from halfbyte.errors import HalfbyteError

BUILT_IN = ("prose", "code")
"""Names of the texts in the package; where they come from is said in ``data/README.md``."""


def read_text(source: Path | str | None = None) -> str:
    """A built-in text by its name (``prose`` unless given) or a UTF-8 file by its path, with ``\\n`` line ends.

    Errors: no such file, a directory, no permission, not UTF-8 (with the offset of the first wrong byte).
    """
    name = BUILT_IN[0] if source is None else str(source)
    if name in BUILT_IN:
        return (files("halfbyte") / "data" / f"{name}.txt").read_text(encoding="utf-8")
    try:
        return Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HalfbyteError(f"{name}: is no UTF-8 text (byte {error.start}: {error.reason})") from None
    except OSError as error:
        raise HalfbyteError(
            f"{name}: cannot be read ({error.strerror}); give a UTF-8 file or one of {', '.join(BUILT_IN)}"
        ) from None
