"""Rules of a recipe that do not do what they seem to."""

from __future__ import annotations

from collections import Counter

from halfbyte.assignment import Assignment
from halfbyte.matching import matches, specificity
from halfbyte.models.layout import ModelLayout
from halfbyte.models.names import template
from halfbyte.preflight.finding import Findings
from halfbyte.recipe import Recipe

_TIED_HEAD = "lm_head"


def check_rules(findings: Findings, layout: ModelLayout, recipe: Recipe, assignment: Assignment) -> None:
    """Warns of patterns that mean nothing, never decide, or stand there twice."""
    for pattern, count in Counter(recipe.ignore).items():
        if count > 1:
            findings.add("warning", pattern, f"stands in ignore {count} times")
    for pattern in dict.fromkeys([*recipe.ignore, *recipe.targets]):
        if not assignment.means.get(pattern):
            # Everybody ignores lm_head; of a tied one there is nothing to ignore, which is what they want.
            if not (pattern in recipe.ignore and layout.tied and matches(_TIED_HEAD, pattern)):
                findings.add("warning", pattern, f"matches no module{_hint(pattern, layout)}")
        elif not assignment.decides.get(pattern):
            findings.add(
                "warning",
                pattern,
                f"matches {assignment.means[pattern]} modules and decides for none: more specific or earlier "
                "rules come first, and lm_head, embeddings, routers and norms stay out unless named alone",
            )


def _hint(pattern: str, layout: ModelLayout) -> str:
    if specificity(pattern) != 0:
        return ""
    if pattern[:1].isupper() and pattern.isidentifier():
        return ": class names mean nothing here, scheme covers every linear layer"
    longer = next((m.name for m in layout.modules if f".{m.name}".endswith(f".{pattern}")), None)
    return f": write {template(longer) if '*' in template(longer) else longer}" if longer else ""
