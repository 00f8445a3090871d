"""What is peculiar about the model itself: heads, unknown families, weights that stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from halfbyte.assignment import Assignment
from halfbyte.models.layout import ModelLayout, Role
from halfbyte.models.names import template
from halfbyte.preflight.finding import Findings

_NAMED = 4


def check_model(findings: Findings, layout: ModelLayout, assignment: Assignment) -> None:
    """Says what is tied, missing, unknown or left out, and refuses a recipe that quantizes nothing."""
    if not any(assignment.schemes.values()):
        findings.add(
            "error", layout.family, "nothing would be quantized; accepted: a recipe that means some layer"
        )
    heads = [module for module in layout.modules if module.role is Role.LM_HEAD]
    if layout.tied:
        for head in heads:
            findings.add(
                "warning",
                head.source.tensor,
                "is stored although tie_word_embeddings is true: copied as it is; engines skip it and use "
                "the embedding, so set tie_word_embeddings to false if the two differ",
            )
    elif not heads:
        findings.add(
            "warning", "lm_head", "is neither stored nor tied to the embedding; is this a causal LM?"
        )
    if not layout.known:
        findings.add("note", layout.family, "is no family in the table: roles come from names and shapes")
    kept = [m.name for m in layout.modules if m.role is Role.OTHER and assignment.schemes[m.name] is None]
    _say(findings, "weights outside the language model's blocks, or tiny, stay as they are", kept)
    _say(findings, "tensors that are no linear weight stay as they are", layout.left_out)


def _say(findings: Findings, what: str, names: Iterable[str]) -> None:
    counts = Counter(map(template, names))
    if counts:
        first = [f"{name} ({count})" if count > 1 else name for name, count in counts.most_common(_NAMED)]
        more = f" and {len(counts) - _NAMED} more kinds" if len(counts) > _NAMED else ""
        findings.add("note", next(iter(counts)), f"{what}: {', '.join(first)}{more}")
