"""UserError: a mistake of the user, told on one screen: key, value, what was expected, nearest name, remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

_ABSENT: Any = object()
_SECRET = re.compile(r"key|token|password|secret", re.IGNORECASE)
_MIN_HIDDEN = 6  # shorter texts are words and numbers that messages need
_MAX_LINE = 600
_hidden: set[str] = set()


def looks_secret(key: str) -> bool:
    """Whether the last name of a dotted key is one under which people keep secrets."""
    return not key.startswith("-") and _SECRET.search(key.rpartition(".")[2]) is not None


def hide(text: str) -> None:
    """Keep a text out of all messages: it came from the environment, where people keep their secrets."""
    if len(text) >= _MIN_HIDDEN:
        _hidden.update((text, repr(text)[1:-1]))


def without_hidden(text: str) -> str:
    """Return a text without what is hidden."""
    for hidden in sorted(_hidden, key=len, reverse=True):
        text = text.replace(hidden, "(from the environment)")
    return text


def shown(text: str) -> str:
    """Return a text as a message may have it: nothing hidden, no control characters, no endless lines."""
    lines = without_hidden(text).split("\n")
    lines = [line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…" for line in lines]
    return "\n".join("".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines)


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
            secret = key is not None and looks_secret(key) and value != key
            lines.append(f"  value:    {'(not shown)' if secret else _short(value)}")
        near = _nearest(_text(value, str), self.valid)
        if near:
            lines.append(f"  nearest:  {', '.join(near)}")
        if self.valid:
            lines.append(f"  valid:    {_listed(self.valid)}")
        if remedy is not None:
            lines.append(f"  remedy:   {remedy}")
        super().__init__(shown("\n".join(lines)))

    def under(self, key: str) -> UserError:
        """Return the same error with its key placed under a parent."""
        full = key if self.key is None else f"{key}.{self.key}"
        return UserError(self.problem, key=full, value=self._given, valid=self.valid, remedy=self.remedy)


def _text(value: Any, write: Callable[[Any], str]) -> str:
    try:
        return "" if value is _ABSENT else write(value)
    except ValueError:  # Python refuses to write numbers of thousands of digits
        return "(too long to be shown)"


def _nearest(value: str, names: list[str]) -> list[str]:
    """Return the names most like a text, in capitals or not."""
    spelled = {name.lower(): name for name in names}
    return [spelled[name] for name in difflib.get_close_matches(value.lower(), spelled, n=3, cutoff=0.5)]


def _short(value: Any, limit: int = 200) -> str:
    text = shown(_text(value, repr))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _listed(names: list[str], limit: int = 24) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"


class RunError(Exception):
    """Something that stopped a run and that no configuration mends. The command line says it and exits with 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was asked for in vain: of NumPy, of torch on a CPU, which has no type for it, or on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in words)
