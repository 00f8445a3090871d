"""A line for each kind of check that found nothing wrong, so that a report says what was looked at."""

from __future__ import annotations

from halfbyte.audit.verification import Finding, Verification


def summary(result: Verification) -> list[Finding]:
    """The ``ok`` findings that a finished verification deserves."""
    failed = {finding.rule for finding in result.errors}
    found: list[Finding] = []

    def ok(rule: str, where: str, message: str) -> None:
        found.append(Finding("ok", rule, where, message))

    weights = f"{len(result.weights)} quantized weights"
    if result.weights and not failed & {"partners", "shape", "config"}:
        ok("structure", weights, "complete, with the shapes and dtypes that config.json says")
    if result.weights and not failed & {"scales", "codes", "padding", "finite"}:
        ok("values", weights, "no NaN, Inf, zero or negative scale, no code that is no number")
    if result.schema:
        ok("compressed-tensors 0.17", "config.json", "its schema accepts quantization_config")
    rotated = any(finding.rule == "rotation" for finding in result.findings)
    if result.against and "untouched" not in failed and not rotated:
        text = f"{result.untouched_bytes} bytes equal the source; none is missing"
        ok("untouched", f"{result.untouched} tensors", text)
    if result.moved and "moved scales" not in failed:
        estimates = (
            f"; {result.estimated} weights are compared after scales that were estimated from rounded rows"
        )
        text = "equal the source but for scales that moved" + estimates * bool(result.estimated)
        ok("moved scales", f"{result.moved} tensors", text)
    compared = [weight.relative_error for weight in result.weights if weight.relative_error is not None]
    if compared and "relative error" not in failed:
        text = f"largest {max(compared):.4f}, mean {sum(compared) / len(compared):.4f}"
        ok("relative error", f"{len(compared)} weights", text)
    return found
