"""Typed look-ups in a draft's configuration: a value of the wrong kind is refused by its key, never converted.

A flag that says "no" as text, or a size that was rounded, would run as another network and be accepted nowhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError


def _refuse(key: str, value: Any, needed: str) -> ModelError:
    shown = repr(value)
    return ModelError(f"{key} is {shown if len(shown) <= 60 else shown[:57] + '...'}; {needed} is needed")


class Keys:
    """One JSON object. `None` and a key that is not there are the same: the default.

    Without a default a missing key raises KeyError; every other fault is a ModelError naming key and value.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __getitem__(self, key: str) -> Any:
        value = self._values.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of any size."""
        value = self[key] if default is None else self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise _refuse(key, value, "a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise _refuse(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise _refuse(key, value, "a text")
        return value

    def whole_numbers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers; None where there is none."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise _refuse(key, value, "a list of whole numbers")
        return tuple(value)

    def texts(self, key: str) -> list[str] | None:
        """A list of texts; None where there is none."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise _refuse(key, value, "a list of texts")
        return value

    def part(self, key: str) -> Keys:
        """The object under `key`, an empty one where there is none."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise _refuse(key, value, "an object")
        return Keys(value or {})

    def numbers(self) -> dict[str, float]:
        """Every finite number of the object, flags not counted."""
        found = {k: v for k, v in self._values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        return {k: self.number(k, 0.0) for k in found}
