"""The checkpoint that another one was quantized from, with all that the run moved between its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from halfbyte.audit.expected import ExpectedWeight
from halfbyte.audit.modules import StoredModule
from halfbyte.audit.moved import moved_bias, moved_weight
from halfbyte.audit.moved_scales import MovedScales, ScalesUnknownError
from halfbyte.audit.run_report import RunReport, read_run_report
from halfbyte.audit.source import FLOAT_DTYPES
from halfbyte.audit.untouched import compare_bytes, not_finite, other_form
from halfbyte.audit.verification import Finding, Verification
from halfbyte.audit.written import WrittenWeights
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from halfbyte.models.layout import ModuleInfo, Role
from halfbyte.quantization.report import REPORT_FILE

_NO_REPORT = (
    f"; a run that moves scales says so in {REPORT_FILE}, which is missing: without it this cannot be told "
    "from damage"
)


class Reference:
    """What the tensors of ``checkpoint`` are held against. Findings and counts go into ``result``."""

    def __init__(
        self,
        source: Checkpoint,
        checkpoint: Checkpoint,
        modules: Sequence[StoredModule],
        infos: Mapping[str, ModuleInfo],
        result: Verification,
    ) -> None:
        """modules, infos: all weights of ``checkpoint`` as stored and as its layout describes them."""
        self._source, self._checkpoint, self._infos, self._result = source, checkpoint, infos, result
        self._originals = {module.name: module for module in describe(source.config, source.shapes).modules}
        self._holds: dict[str, list[ModuleInfo]] = {}
        for info in self._originals.values():
            self._holds.setdefault(info.source.tensor, []).append(info)
        report = self._read_report()
        self._unreported = report is None
        report = report or RunReport()
        self._rotated, self._elsewhere = report.rotated, report.elsewhere
        written = WrittenWeights(checkpoint, modules, source, self._originals)
        self._moved = MovedScales(report.folds, source, self._originals, written)

    def weight(self, module: StoredModule, shape: tuple[int, ...]) -> ExpectedWeight | None:
        """What a quantized weight of this shape was rounded from; none, with a finding, if that is not known."""
        codes = module.parts[module.stored.codes].name
        info = self._originals.get(module.name)
        if info is None:
            if not (self._rotated and self._is_head(module.name)):
                self._add(Finding("error", "source", module.name, "is no weight of the source"))
            return None
        if info.shape != shape:
            text = f"is {list(shape)}, in the source {list(info.shape)}"
            self._add(Finding("error", "shape", codes, text))
            return None
        if self._rotated:
            return None
        if (dtype := self._source.info(info.source.tensor).dtype) not in FLOAT_DTYPES:
            text = f"is {dtype}; compared are {', '.join(FLOAT_DTYPES)}"
            self._add(Finding("warning", "source", info.source.tensor, text))
            return None
        try:
            expected = self._moved.weight(module.name)
        except ScalesUnknownError as error:
            self._add(self._unknown(error, {module.name}, codes))
            return None
        self._result.estimated += expected.factors.estimated
        return expected

    def is_nearest(self, module: str) -> bool:
        """Whether the codes of a quantized weight should be those nearest to it."""
        return module not in self._elsewhere

    def check_plain(self, info: TensorInfo) -> None:
        """Holds a tensor that is not quantized against the source."""
        name = info.name
        finding: Finding | None = None
        if name not in self._source.tensors:
            if not (self._rotated and self._is_head(name.removesuffix(".weight"))):
                finding = Finding("error", "untouched", name, "is no tensor of the source")
        elif self._rotated:
            if text := other_form(self._checkpoint, self._source, name):
                finding = Finding("error", "untouched", name, text)
        elif self._is_moved(name):
            finding = self._compare_moved(name)
            self._result.moved += finding is None
        else:
            finding = self._compare_bytes(info)
            if finding is None:
                self._result.untouched += 1
                self._result.untouched_bytes += info.nbytes
        # A faithful copy of a broken source is still broken.
        if finding := finding or not_finite(self._checkpoint, info):
            self._add(finding)

    def check_missing(self, quantized: set[str]) -> None:
        """Every tensor of the source is there, or all the weights in it are among the modules ``quantized``."""
        for name in self._source.tensors:
            if name in self._checkpoint.tensors:
                continue
            weights = [info.name for info in self._holds.get(name, [])]
            absent = [weight for weight in weights if weight not in quantized]
            if not weights or absent:
                which = f": of its weights {', '.join(absent[:3])}" if len(absent) < len(weights) else ""
                text = f"is missing{which}; the source holds it"
                self._add(Finding("error", "untouched", name, text))

    def _read_report(self) -> RunReport | None:
        """The report; one that is damaged is a finding, and nothing in it counts."""
        file = str(self._checkpoint.path / REPORT_FILE)
        try:
            report = read_run_report(self._checkpoint.path, self._source.shapes, self._originals)
        except HalfbyteError as error:
            text = f"{error}; what the run moved between tensors is unknown, so they are compared as they are"
            self._add(Finding("error", "report", file, text))
            return RunReport()
        if report and report.rotated:
            text = "the recipe rotates the model: no channel of it is one of the source's, so weights are not compared"
            self._add(Finding("warning", "rotation", file, text))
        return report

    def _is_head(self, module: str) -> bool:
        return module in self._infos and self._infos[module].role is Role.LM_HEAD

    def _is_moved(self, name: str) -> bool:
        moved = self._moved
        inside = (moved.changes_module(info.name) for info in self._holds.get(name, ()))
        return moved.changes_norm(name) or moved.changes_bias(name) or any(inside)

    def _compare_bytes(self, info: TensorInfo) -> Finding | None:
        finding = compare_bytes(self._checkpoint, self._source, info.name)
        if finding and self._unreported and len(info.shape) == 1:
            return finding._replace(message=finding.message + _NO_REPORT)
        return finding

    def _compare_moved(self, name: str) -> Finding | None:
        text = other_form(self._checkpoint, self._source, name)
        dtype = self._source.info(name).dtype
        if text is None and dtype not in FLOAT_DTYPES:
            text = f"is {dtype}; accepted for scales to move into: {', '.join(FLOAT_DTYPES)}"
        try:
            text = text or next(self._differences(name), None)
        except ScalesUnknownError as error:
            return self._unknown(error, {name, *(info.name for info in self._holds.get(name, ()))}, name)
        return Finding("error", "moved scales", name, text) if text else None

    def _differences(self, name: str) -> Iterator[str]:
        """What roundings do not explain in a tensor that scales were moved into."""
        if self._moved.changes_norm(name):
            self._moved.of_norm(name)
        if self._moved.changes_bias(name):
            text = moved_bias(self._checkpoint, self._source, name, self._moved.bias(name))
            if text:
                yield text
        for info in self._holds.get(name, ()):
            text = moved_weight(self._checkpoint, info, self._moved.weight(info.name))
            if text:
                yield text

    def _unknown(self, error: ScalesUnknownError, names: set[str], where: str) -> Finding:
        """An error of the tensor that should tell the scales; the others cannot be compared for it."""
        if error.where in names:
            return Finding("error", "moved scales", where, str(error))
        text = (
            f"is not compared: {error.where}, whose scales were moved into it, does not tell them ({error})"
        )
        return Finding("warning", "moved scales", where, text)

    def _add(self, finding: Finding) -> None:
        self._result.findings.append(finding)
