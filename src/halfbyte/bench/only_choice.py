"""What a benchmark of one scheme and one method measures."""

from __future__ import annotations

from halfbyte.assignment import Choice
from halfbyte.errors import HalfbyteError
from halfbyte.recipe import Recipe


def only_choice(recipe: Recipe) -> Choice:
    """The scheme and method of all layers. Errors: a recipe that leaves them as they are."""
    if recipe.default is None:
        raise HalfbyteError(f"scheme {recipe.scheme!r} quantizes nothing; accepted: a scheme")
    return recipe.default
