"""The verbs of the command line for Python. Imports happen inside, so that each verb loads only what it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.errors import HalfbyteError

if TYPE_CHECKING:
    import torch

    from halfbyte.audit.inspection import Inspection
    from halfbyte.audit.verification import Verification
    from halfbyte.calibration.ranks import Ranks
    from halfbyte.calibration.request import CalibrationData
    from halfbyte.evaluation.evaluate import Evaluation
    from halfbyte.quantization.job import QuantizationResult
    from halfbyte.quantization.plan import QuantizationPlan
    from halfbyte.quantization.walk import Progress
    from halfbyte.recipe import Recipe


def quantize(
    model: Path | str,
    out: Path | str,
    scheme: str | None = None,
    *,
    recipe: Recipe | Mapping[str, Any] | Path | str | None = None,
    ignore: Sequence[str] | str = (),
    algorithm: str | None = None,
    clip: str | None = None,
    target: str | None = None,
    format: str | None = None,
    data: CalibrationData | Path | str | None = None,
    device: torch.device | str = "cpu",
    redo: Sequence[str] | str = (),
    tp: int = 1,
    overwrite: bool = False,
    allow_pickle: bool = False,
    on_progress: Callable[[float, str], None] | None = None,
    on_start: Callable[[float], None] | None = None,
    on_block: Callable[[Progress], None] | None = None,
) -> QuantizationResult:
    """Quantize a checkpoint into ``out``: weight by weight without data, block by block with it.

    model: a local Hugging Face checkpoint directory in 16- or 32-bit floating point.
    scheme: a preset of :data:`halfbyte.schemes.PRESETS`; ``w4a8`` unless a recipe says otherwise.
    recipe: rules per layer, as an object, its fields or a YAML file; ``scheme``, ``ignore``, ``algorithm``, ``clip``,
        ``target`` and ``format`` change it.
    algorithm, clip: see :class:`halfbyte.method.Method`; ``rtn`` unless a recipe or ``data`` says otherwise.
    target: whose kernel's numbers weights are rounded to, ``halfbyte`` or ``vllm``; ``halfbyte`` unless a recipe says
        otherwise.
    format: of the files, ``compressed-tensors`` (with halfbyte's own form where it has no name), ``qserve`` or
        ``w4afp8``; ``compressed-tensors`` unless a recipe says otherwise.
    data: what to calibrate on, with sample numbers or as a path alone; ``default`` is the package's own texts. It makes
        the algorithm ``awq+gptq`` where neither ``algorithm`` nor the recipe names one; methods that need data take
        ``default`` without it.
    device: where blocks are calibrated; ``auto`` is a GPU if there is one. Each rank of ``torchrun`` takes its own.
    redo: with data, patterns of modules whose blocks are quantized again; the others stay as OUT (or an unfinished
        run) has them, which must be of the same source, rotation, target and schemes.
    tp: tensor-parallel ranks that will serve the result; sizes that would not divide are refused.
    on_start, on_progress: without data, called with the source bytes of the whole job, then with those just done.
    on_block: with data, called as blocks go through.

    Errors: :class:`HalfbyteError` for anything wrong with the input, before work starts wherever headers tell.
    """
    from halfbyte.calibration.ranks import joined
    from halfbyte.calibration.request import CalibrationData
    from halfbyte.devices import device_named
    from halfbyte.method import BEST
    from halfbyte.quantization import job

    given = data if isinstance(data, CalibrationData) else CalibrationData(data)
    rules = recipe_of(
        recipe,
        scheme,
        ignore,
        clip,
        algorithm,
        target,
        format=format,
        otherwise=None if given.path is None else BEST,
    )
    with joined(device_named(device)) as (ranks, place):
        plan = job.prepare(model, rules, tp=tp, allow_pickle=allow_pickle, device=place)
        if any(method.needs_data for method in plan.assignment.methods.values()):
            again = [redo] if isinstance(redo, str) else list(redo)
            return _quantize_with_data(plan, out, given, place, again, overwrite, ranks, on_block)
        _refuse_without_data(given, redo, ranks)
        if on_start:
            on_start(job.source_bytes(plan))
        return job.run(plan, out, overwrite=overwrite, progress=on_progress)


def _refuse_without_data(given: CalibrationData, redo: Sequence[str], ranks: Ranks) -> None:
    """Raises if anything was asked for that only a calibrated run does."""
    if redo:
        raise HalfbyteError("redo needs calibration data: without it everything is quantized anew in no time")
    if given.path is not None:
        raise HalfbyteError(
            f"data {given.path} would change nothing, as no module's method needs any; accepted: no data, or an "
            "algorithm or clip that needs it"
        )
    if options := given.options():
        raise HalfbyteError(
            f"{', '.join(options)} would change nothing, as nothing is calibrated; accepted: with --data, or with an "
            "algorithm or clip that needs data"
        )
    if ranks.size > 1:
        raise HalfbyteError(
            f"{ranks.size} ranks have no samples to share, as nothing is calibrated; accepted: one process without "
            "data, or --data"
        )


def _quantize_with_data(
    plan: QuantizationPlan,
    out: Path | str,
    given: CalibrationData,
    device: torch.device,
    redo: Sequence[str],
    overwrite: bool,
    ranks: Ranks,
    on_block: Callable[[Progress], None] | None,
) -> QuantizationResult:
    from transformers import AutoTokenizer

    from halfbyte.calibration.load import load_samples
    from halfbyte.calibration.request import DEFAULT_DATA, DEFAULT_LENGTH
    from halfbyte.models.config_fields import read_config
    from halfbyte.quantization.calibrated import run_calibrated

    context = read_config(plan.checkpoint.config).context
    try:
        tokenizer = AutoTokenizer.from_pretrained(plan.checkpoint.path)
    except Exception as error:  # tokenizer files fail in many ways
        raise HalfbyteError(
            f"{plan.checkpoint.path}: its tokenizer cannot be loaded ({error}); calibration needs one"
        ) from error
    settings = {"length": min(DEFAULT_LENGTH, context or DEFAULT_LENGTH), **given.settings()}
    activations = settings.pop("activations", "memory")
    samples = load_samples(
        None if given.path in (None, DEFAULT_DATA) else given.path, tokenizer, context=context, **settings
    )
    return run_calibrated(
        plan,
        out,
        samples,
        device=device,
        activations=activations,
        overwrite=overwrite,
        redo=redo,
        ranks=ranks,
        on_progress=on_block if ranks.is_first else None,
    )


def recipe_of(
    recipe: Recipe | Mapping[str, Any] | Path | str | None,
    scheme: str | None,
    ignore: Sequence[str] | str,
    clip: str | None,
    algorithm: str | None = None,
    target: str | None = None,
    *,
    format: str | None = None,
    otherwise: str | None = None,
) -> Recipe:
    """A recipe with what the caller says on top of it.

    otherwise: the algorithm where neither the caller nor the recipe names one.
    """
    from halfbyte.recipe import Recipe

    if isinstance(recipe, Recipe):
        base = recipe
    elif isinstance(recipe, Mapping):
        base = Recipe(**recipe)
    else:
        base = Recipe() if recipe is None else Recipe.load(recipe)
    if algorithm is None and "algorithm" not in base.model_fields_set:
        algorithm = otherwise
    ignore = [ignore] if isinstance(ignore, str) else ignore
    said = {"scheme": scheme, "algorithm": algorithm, "clip": clip, "target": target, "format": format}
    changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    changes["ignore"] = [*base.ignore, *(pattern for pattern in ignore if pattern not in base.ignore)]
    # What the recipe leaves open stays open for whoever reads the new one.
    return Recipe(**{**base.model_dump(mode="json", exclude_unset=True), **changes})


def load(
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Any, Any]:
    """``(model, tokenizer)`` of a checkpoint directory, quantized or not, ready to generate.

    dtype: of everything that is not quantized; the checkpoint's own unless given.
    kernel: run every quantized layer on this kernel or fail with the reason; chosen by itself unless given.
    device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: a GPU if there is one.
    """
    from halfbyte.engines.transformers.loading import load as load_model

    return load_model(path, dtype=dtype, kernel=kernel, device=device)


def evaluate(
    model: Path | str,
    baseline: Path | str | None = None,
    *,
    text: Path | str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    context: int = 1024,
    stride: int | None = None,
    windows: int | None = None,
) -> Evaluation:
    """Perplexity of a checkpoint, and KL divergence and top-1 agreement against a baseline on the same tokens.

    text: a UTF-8 file; the package's own English prose unless given. device: as :func:`load` takes it. context,
    stride, windows: in tokens, tokens and windows.
    """
    from halfbyte.evaluation.evaluate import evaluate as evaluate_model
    from halfbyte.evaluation.texts import read_text

    loaded, tokenizer = load(model, dtype=dtype, device=device)
    reference, reference_tokenizer = (
        load(baseline, dtype=dtype, device=device) if baseline is not None else (None, None)
    )
    return evaluate_model(
        loaded,
        tokenizer,
        read_text(text),
        baseline=reference,
        baseline_tokenizer=reference_tokenizer,
        context=context,
        stride=stride,
        windows=windows,
    )


def inspect(path: Path | str, *, scales: bool | None = None) -> Inspection:
    """What a checkpoint holds, per module and in total, from headers and (if few or asked for) scales."""
    from halfbyte.audit.inspect import inspect as inspect_checkpoint

    return inspect_checkpoint(path, scales=scales)


def verify(
    path: Path | str,
    against: Path | str | None = None,
    *,
    require_vllm: bool = False,
    max_error: float = 0.5,
    allow_pickle: bool = False,
) -> Verification:
    """Decode a written checkpoint independently and compare it with its source.

    require_vllm: what vLLM's W4A8 refuses is an error. max_error: relative error of a weight that is a fault.
    """
    from halfbyte.audit.verify import verify as verify_checkpoint

    return verify_checkpoint(
        path, against=against, require_vllm=require_vllm, max_error=max_error, allow_pickle=allow_pickle
    )


__all__ = ["HalfbyteError", "evaluate", "inspect", "load", "quantize", "recipe_of", "verify"]
