"""Config groups as files: what is there and what each file says about itself, without composing anything."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PACKAGE_CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class ConfigFile:
    """One choice of a config group."""

    name: str  # as in group=name
    path: Path
    user: bool  # from ./configs in the working directory

    @property
    def description(self) -> str:
        """The first comment at the top, after the package line that Hydra wants; without one, what it names."""
        text = self.path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                break
            comment = line.lstrip("#").strip()
            if comment and not comment.startswith("@package"):
                return comment
        named = re.search(r"^\s*(?:_target_|id):\s*(\S+)\s*$", text, re.MULTILINE)
        return named.group(1) if named else ""


def config_files(group: str) -> dict[str, ConfigFile]:
    """Return the choices of a group, the user's own first; one of the user's hides one of the package's."""
    found: dict[str, ConfigFile] = {}
    for folder, user in ((Path.cwd() / "configs", True), (PACKAGE_CONFIGS, False)):
        root = folder / group
        for path in sorted(root.rglob("*.yaml")):
            name = path.relative_to(root).with_suffix("").as_posix()
            found.setdefault(name, ConfigFile(name, path, user))
    return found
