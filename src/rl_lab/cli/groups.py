"""Config groups as files: what is there and what each file says about itself, without composing anything."""

from __future__ import annotations

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
        """The first comment of the file, after the package line that Hydra wants."""
        with open(self.path, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                text = line.strip()
                if text and not text.startswith("#"):
                    return ""
                text = text.lstrip("#").strip()
                if text and not text.startswith("@package"):
                    return text
        return ""


def config_files(group: str) -> dict[str, ConfigFile]:
    """Return the choices of a group, the user's own first; one of the user's hides one of the package's."""
    found: dict[str, ConfigFile] = {}
    for folder, user in ((Path.cwd() / "configs", True), (PACKAGE_CONFIGS, False)):
        root = folder / group
        for path in sorted(root.rglob("*.yaml")):
            name = path.relative_to(root).with_suffix("").as_posix()
            found.setdefault(name, ConfigFile(name, path, user))
    return found
