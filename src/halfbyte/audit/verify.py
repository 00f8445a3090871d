"""``verify``: reads what was written with a decoder of its own, and holds it against its source and its readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from halfbyte.audit.compare import Comparison
from halfbyte.audit.ct_schema import schema_problems
from halfbyte.audit.declaration import Declared
from halfbyte.audit.declared import declared, find_quantization_config
from halfbyte.audit.decode import read_scale, undecodable
from halfbyte.audit.decoders import Decoder, decoder_of
from halfbyte.audit.modules import Gathered, StoredModule, gather
from halfbyte.audit.reference import Reference
from halfbyte.audit.scales import scale_faults, scale_range
from halfbyte.audit.stored import KV_LEAVES
from halfbyte.audit.structure import structure_findings
from halfbyte.audit.summary import summary
from halfbyte.audit.untouched import not_finite
from halfbyte.audit.verification import DEFAULT_MAX_ERROR, Finding, Level, Verification, WeightCheck
from halfbyte.audit.vllm_rules import vllm_refusals
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.model_config import read_config
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe

_MAIN_SCALES = ("weight_scale", "weight_scale_inv", "s1_scales")
Progress = Callable[[int, str], None]
"""Called after every tensor with its bytes in the checkpoint and its name."""


def verify(
    path: Path | str,
    *,
    against: Path | str | None = None,
    require_vllm: bool = False,
    max_error: float = DEFAULT_MAX_ERROR,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Checks the quantized checkpoint in directory ``path``, one tensor in memory at a time.

    against: the unquantized checkpoint that it was made from; then weights are compared with it, and tensors that
        are not quantized must equal it byte for byte. Scales that a calibrated run moved between tensors, by its
        ``quantization_report.json``, are found again from both and taken into account; a rotated model is compared
        in shapes alone.
    require_vllm: refusals by vLLM's W4A8 rules count as errors. max_error: relative error that counts as one.
    allow_pickle: ``against`` may hold pickle files.
    A damaged ``path`` is a finding. Errors: ``path`` is no checkpoint; ``against`` cannot be read or is quantized.
    """
    path = Path(path)
    read_config(path)
    result = Verification(path, Path(against) if against else None)
    source = _open_source(Path(against), allow_pickle) if against else None
    try:
        checkpoint = Checkpoint.open(path)
    except HalfbyteError as error:
        result.findings.append(Finding("error", "readable", str(path), str(error)))
        return result
    _Verifier(checkpoint, source, result, max_error, progress).run(require_vllm)
    return result


def total_bytes(path: Path | str) -> int:
    """Bytes that :func:`verify` goes through: the total for progress. 0 for a checkpoint that cannot be opened."""
    try:
        return sum(info.nbytes for info in Checkpoint.open(path).tensors.values())
    except HalfbyteError:
        return 0


def _open_source(path: Path, allow_pickle: bool) -> Checkpoint:
    source = Checkpoint.open(path, allow_pickle=allow_pickle)
    if declared(source.config).method != "none":
        raise HalfbyteError(
            f"{path}: is quantized itself; accepted: the 16- or 32-bit checkpoint that was quantized"
        )
    return source


class _Verifier:
    """One pass over a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        source: Checkpoint | None,
        result: Verification,
        max_error: float,
        progress: Progress | None,
    ) -> None:
        self._checkpoint, self._result = checkpoint, result
        self._max_error, self._progress = max_error, progress
        self._said: Declared = declared(checkpoint.config)
        self._gathered: Gathered = gather(checkpoint.tensors, self._said)
        layout = describe(checkpoint.config, self._gathered.shapes())
        self._infos = {module.name: module for module in layout.modules}
        self._reference = (
            Reference(source, checkpoint, self._gathered.modules, self._infos, result) if source else None
        )

    def run(self, require_vllm: bool) -> None:
        for line in self._checkpoint.notes:
            self._add("warning", "readable", str(self._checkpoint.path), line)
        for line in self._said.problems:
            self._add("error", "config", "config.json", line)
        self._check_schema()
        self._check_vllm(require_vllm)
        quantized = [module for module in self._gathered.modules if module.stored.quantized]
        if self._said.rules and not quantized:
            self._add(
                "error", "config", "config.json", f"declares {self._said.method}, yet no weight is quantized"
            )
        for module in quantized:
            self._check_weight(module)
            self._report(module.name, *module.parts.values())
        for info in self._gathered.orphans:
            self._add("error", "partners", info.name, "belongs to a weight that is not stored")
            self._report(info.name, info)
        plain = [module for module in self._gathered.modules if not module.stored.quantized]
        for module in plain:
            self._check_left_alone(module)
        for info in [*self._gathered.loose, *(info for module in plain for info in module.parts.values())]:
            self._check_plain(info)
            self._report(info.name, info)
        if self._reference:
            self._reference.check_missing({module.name for module in quantized})
        self._result.findings += summary(self._result)

    def _add(self, level: Level, rule: str, where: str, message: str) -> None:
        self._result.findings.append(Finding(level, rule, where, message))

    def _report(self, name: str, *infos: TensorInfo) -> None:
        if self._progress:
            self._progress(sum(info.nbytes for info in infos), name)

    def _check_schema(self) -> None:
        if self._said.method != "compressed-tensors":
            return
        config = find_quantization_config(self._checkpoint.config)
        problems = schema_problems(config) if config else []
        self._result.schema = not problems
        for problem in problems:
            where = f"config.json quantization_config.{problem.where}"
            self._add(
                "error",
                "compressed-tensors 0.17",
                where,
                f"is {problem.value!r}; accepted: {problem.accepted}",
            )

    def _check_vllm(self, required: bool) -> None:
        refusals = vllm_refusals(self._gathered.modules, self._infos, self._checkpoint.model_dtype)
        self._result.vllm = refusals
        if not required:
            return
        if refusals is None:
            self._add(
                "error",
                "vLLM",
                str(self._checkpoint.path),
                "no weight is INT4 with FP8 activations in a form that it reads, so its W4A8 rules cannot accept it",
            )
        self._result.findings += [refusal._replace(level="error") for refusal in refusals or ()]

    def _check_weight(self, module: StoredModule) -> None:
        stored = module.stored
        acts = module.match.rule.activations if module.match else None
        bits = stored.format.bits if stored.format else stored.element
        check = WeightCheck(module.name, f"W{bits}A{acts.bits if acts else 16}", stored.layout, stored.shape)
        self._result.weights.append(check)
        faults = structure_findings(self._checkpoint, module)
        self._result.findings += faults
        if any(fault.level == "error" for fault in faults):
            return
        if text := undecodable(module):
            self._add("warning", "decoded", module.name, text)
            return
        decoder = decoder_of(self._checkpoint, module)
        check.shape = decoder.shape
        if self._check_scales(module, decoder, check):
            self._check_values(module, decoder, check)

    def _check_scales(self, module: StoredModule, decoder: Decoder, check: WeightCheck) -> bool:
        """Whether the scales are such that values can be judged."""
        before = len(self._result.findings)
        for leaf, values in decoder.scales.items():
            for fault in scale_faults(values):
                self._add("error", "scales", module.parts[leaf].name, fault)
            if leaf in _MAIN_SCALES and (found := scale_range(values)):
                check.scale_min, check.scale_max = found
        for leaf in ("input_scale", "input_global_scale"):
            if leaf in module.parts:
                for fault in scale_faults(read_scale(self._checkpoint, module.parts[leaf])):
                    self._add("error", "scales", module.parts[leaf].name, fault)
        return len(self._result.findings) == before

    def _check_values(self, module: StoredModule, decoder: Decoder, check: WeightCheck) -> None:
        codes_name = module.parts[module.stored.codes].name
        original = self._reference.weight(module, check.shape) if self._reference else None
        comparison = Comparison(original.columns if original else None)
        for tiles in decoder.chunks():
            if place := tiles.forbidden():
                row, column = place
                code = int(tiles.codes[row - tiles.start, column])
                text = f"code {code:#04x} at row {row}, column {column} is no number"
                self._add("error", "codes", codes_name, text)
                return
            if original:
                span = tiles.start, tiles.start + len(tiles.codes)
                comparison.add(tiles, original.rows(*span), original.doubt(*span))
        if decoder.fault:
            rule, text = decoder.fault
            self._add("error", rule, codes_name, text)
        if not original or not self._reference:
            return
        if not comparison.source_finite:
            self._add("error", "finite", module.name, "the source holds NaN or Inf")
            return
        check.relative_error, check.largest_error = comparison.relative_error, comparison.largest_error
        if not comparison.relative_error <= self._max_error:
            text = (
                f"is {comparison.relative_error:.3g} from the source; accepted: at most {self._max_error:g}"
            )
            self._add("error", "relative error", codes_name, text)
        elif damage := comparison.damage(self._reference.is_nearest(module.name)):
            self._add("error", "codes", codes_name, damage)

    def _check_left_alone(self, module: StoredModule) -> None:
        for fault in module.stored.faults:
            self._add("error", "partners", module.name, fault)
        info = self._infos.get(module.name)
        if module.match and info and module.match.binds(info.role):
            text = f"config.json says {module.match.rule.layout}, yet it is stored as {module.parts['weight'].dtype}"
            self._add("error", "config", module.name, text)

    def _check_plain(self, info: TensorInfo) -> None:
        if info.name.rpartition(".")[2] in KV_LEAVES:
            for fault in scale_faults(read_scale(self._checkpoint, info)):
                self._add("error", "scales", info.name, fault)
            return
        if self._reference:
            self._reference.check_plain(info)
        elif finding := not_finite(self._checkpoint, info):
            self._result.findings.append(finding)
