"""Run folders: finding them, and what their files say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_lab.core.errors import UserError
from rl_lab.orchestration.files import Files
from rl_lab.run_paths import run_paths

_MAX_BYTES = 2**24


def _named(name: str, config: dict[str, Any]) -> str:
    """Return a name with the values that it refers to, such as `tdmpc2_${environment.task}`."""

    def value(reference: re.Match[str]) -> str:
        found: Any = config
        for key in reference[1].split("."):
            found = found[key]
        return str(found)

    return re.sub(r"\$\{([\w.]+)\}", value, name)


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What summary.json says; empty while there is none."""
        try:
            summary = json.loads(self._read("summary.json"))
        except (OSError, ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def _read(self, name: str) -> bytes:
        """Read a file that a stranger may have written: no link, pipe or device, and nothing huge."""
        files = Files()
        if files.size(self.folder / name) > _MAX_BYTES:
            raise ValueError(f"{name} is too large")
        return files.read(self.folder / name)

    @property
    def name(self) -> str:
        """The experiment's name."""
        return str(self._identity[0])

    @property
    def seed(self) -> int | None:
        """The experiment's seed."""
        return self._identity[1]

    @cached_property
    def _identity(self) -> tuple[str, int | None]:
        if "name" in self.summary and "seed" in self.summary:
            return self.summary["name"], self.summary["seed"]
        import yaml

        try:
            config = yaml.safe_load(self._read("config.yaml"))
            experiment = config["experiment"]
            return _named(experiment["name"], config), experiment["seed"]
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
            return self.folder.name, None

    def records(self, *keys: str) -> Iterator[dict[str, Any]]:
        """Yield the records of metrics.jsonl with these keys (all without keys); a torn last line is left out."""
        marks = [json.dumps(key) for key in keys]
        with open(self.folder / "metrics.jsonl", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if (marks and not any(mark in line for mark in marks)) or not line.endswith("\n"):
                    continue
                try:
                    record = json.loads(line)
                    wanted = {"step", "value", "tags"} <= record.keys() and (not keys or record["key"] in keys)
                except (ValueError, KeyError, AttributeError):
                    raise UserError(
                        f"{self.folder / 'metrics.jsonl'}, line {number}, is no record",
                        value=line.strip(),
                        remedy="remove that line, or resume the run, which cuts the log to its last checkpoint",
                    ) from None
                if wanted:
                    yield record


def find_runs(folder: Path) -> list[Run]:
    """Return the run in this folder, or all runs below it, by path."""
    return [Run(path) for path in run_paths(folder)]
