"""UserError: a mistake of the user, told on one screen: key, value, what was expected, nearest name, remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_ABSENT: Any = object()
_SECRET = re.compile(r"key|token|password|secret", re.IGNORECASE)


def looks_secret(key: str) -> bool:
    """Whether the last name of a dotted key is one under which people keep secrets."""
    return _SECRET.search(key.rpartition(".")[2]) is not None


class UserError(Exception):
    """Something that the user can mend. The command line prints it without a traceback and exits with 2."""

    def __init__(
        self,
        problem: str,
        *,
        key: str | None = None,
        value: Any = _ABSENT,
        valid: Iterable[Any] = (),
        remedy: str | None = None,
    ) -> None:
        self.problem, self.key, self.remedy = problem, key, remedy
        self.value = None if value is _ABSENT else value
        self._given = value
        self.valid = sorted({str(name) for name in valid})
        lines = [problem]
        if key is not None:
            lines.append(f"  key:      {key}")
        if value is not _ABSENT:
            shown = "(not shown)" if key is not None and looks_secret(key) and value != key else _short(value)
            lines.append(f"  value:    {shown}")
        near = difflib.get_close_matches(str(value), self.valid, n=3, cutoff=0.5) if value is not _ABSENT else []
        if near:
            lines.append(f"  nearest:  {', '.join(near)}")
        if self.valid:
            lines.append(f"  valid:    {_listed(self.valid)}")
        if remedy is not None:
            lines.append(f"  remedy:   {remedy}")
        super().__init__("\n".join(lines))

    def under(self, key: str) -> UserError:
        """Return the same error with its key placed under a parent."""
        full = key if self.key is None else f"{key}.{self.key}"
        return UserError(self.problem, key=full, value=self._given, valid=self.valid, remedy=self.remedy)


def _short(value: Any, limit: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _listed(names: list[str], limit: int = 24) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"


class RunError(Exception):
    """Something that stopped a run and that no configuration mends. The command line says it and exits with 1."""
