"""``verify``: reads what was written with a decoder of its own, and holds it against its source and its readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from halfbyte.audit.compare import Comparison
from halfbyte.audit.ct_schema import schema_problems
from halfbyte.audit.declaration import Declared
from halfbyte.audit.declared import declared, find_quantization_config
from halfbyte.audit.decode import DECODED_LAYOUTS, WeightDecoder, read_scale
from halfbyte.audit.modules import Gathered, StoredModule, gather
from halfbyte.audit.scales import scale_faults, scale_range
from halfbyte.audit.source import FLOAT_DTYPES, SourceWeight
from halfbyte.audit.stored import KV_LEAVES
from halfbyte.audit.structure import structure_findings
from halfbyte.audit.summary import summary
from halfbyte.audit.untouched import compare_bytes, not_finite
from halfbyte.audit.verification import DEFAULT_MAX_ERROR, Finding, Level, Verification, WeightCheck
from halfbyte.audit.vllm_rules import vllm_refusals
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.model_config import read_config
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from halfbyte.models.layout import ModuleInfo

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
        are not quantized must equal it byte for byte.
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
        self._checkpoint, self._source, self._result = checkpoint, source, result
        self._max_error, self._progress = max_error, progress
        self._said: Declared = declared(checkpoint.config)
        self._gathered: Gathered = gather(checkpoint.tensors, self._said)
        layout = describe(checkpoint.config, self._gathered.shapes())
        self._infos = {module.name: module for module in layout.modules}
        self._originals: dict[str, ModuleInfo] = {}
        if source:
            self._originals = {
                module.name: module for module in describe(source.config, source.shapes).modules
            }

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
        if self._source:
            self._check_missing(quantized)
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
                "no weight is INT4 with FP8 activations, so its W4A8 rules cannot accept it",
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
        if stored.layout not in DECODED_LAYOUTS or len(stored.shape) != 2 or "weight_g_idx" in module.parts:
            order = " in permuted groups" if "weight_g_idx" in module.parts else ""
            text = f"{stored.layout} {list(stored.shape)}{order} is not decoded here, so its values are not checked"
            self._add("warning", "decoded", module.name, text)
            return
        decoder = WeightDecoder(self._checkpoint, module)
        check.shape = decoder.shape
        if self._check_scales(module, decoder, check):
            self._check_values(module, decoder, check)

    def _check_scales(self, module: StoredModule, decoder: WeightDecoder, check: WeightCheck) -> bool:
        """Whether the scales are such that values can be judged."""
        before = len(self._result.findings)
        for leaf, values in decoder.scales.items():
            for fault in scale_faults(values):
                self._add("error", "scales", module.parts[leaf].name, fault)
            if leaf in ("weight_scale", "weight_scale_inv") and (found := scale_range(values)):
                check.scale_min, check.scale_max = found
        for leaf in ("input_scale", "input_global_scale"):
            if leaf in module.parts:
                for fault in scale_faults(read_scale(self._checkpoint, module.parts[leaf])):
                    self._add("error", "scales", module.parts[leaf].name, fault)
        return len(self._result.findings) == before

    def _check_values(self, module: StoredModule, decoder: WeightDecoder, check: WeightCheck) -> None:
        codes_name = module.parts[module.stored.codes].name
        original = self._find_source(module, check)
        comparison = Comparison()
        for tiles in decoder.chunks():
            if place := tiles.forbidden():
                row, column = place
                code = int(tiles.codes[row - tiles.start, column])
                text = f"code {code:#04x} at row {row}, column {column} is no number"
                self._add("error", "codes", codes_name, text)
                return
            if original:
                comparison.add(tiles, original.rows(tiles.start, tiles.start + len(tiles.codes)))
        if not decoder.padding_is_zero:
            self._add("error", "padding", codes_name, "bits that belong to no code are not zero")
        if not original:
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
        elif damage := comparison.damage():
            self._add("error", "codes", codes_name, damage)

    def _find_source(self, module: StoredModule, check: WeightCheck) -> SourceWeight | None:
        if self._source is None:
            return None
        info = self._originals.get(module.name)
        if info is None:
            self._add("error", "source", module.name, "is no weight of the source")
            return None
        dtype = self._source.info(info.source.tensor).dtype
        if info.shape != check.shape:
            text = f"is {list(check.shape)}, in the source {list(info.shape)}"
            self._add("error", "shape", module.parts[module.stored.codes].name, text)
            return None
        if dtype not in FLOAT_DTYPES:
            self._add(
                "warning", "source", info.source.tensor, f"is {dtype}; compared are {', '.join(FLOAT_DTYPES)}"
            )
            return None
        return SourceWeight(self._source, info)

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
        if self._source is None:
            finding = not_finite(self._checkpoint, info)
        elif info.name not in self._source.tensors:
            finding = Finding("error", "untouched", info.name, "is no tensor of the source")
        else:
            finding = compare_bytes(self._checkpoint, self._source, info.name)
            if finding is None:
                self._result.untouched += 1
                self._result.untouched_bytes += info.nbytes
                # A faithful copy of a broken source is still broken.
                finding = not_finite(self._checkpoint, info)
        if finding:
            self._result.findings.append(finding)

    def _check_missing(self, quantized: list[StoredModule]) -> None:
        """Every tensor of the source is here, or all the weights in it are here quantized."""
        assert self._source is not None
        here = {module.name for module in quantized}
        holds: dict[str, list[str]] = {}
        for info in self._originals.values():
            holds.setdefault(info.source.tensor, []).append(info.name)
        for name in self._source.tensors:
            if name in self._checkpoint.tensors:
                continue
            weights = holds.get(name, [])
            absent = [weight for weight in weights if weight not in here]
            if not weights or absent:
                which = f": of its weights {', '.join(absent[:3])}" if len(absent) < len(weights) else ""
                self._add("error", "untouched", name, f"is missing{which}; the source holds it")
