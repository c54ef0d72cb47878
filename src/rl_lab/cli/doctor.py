"""Report what this machine offers: versions, threads, memory, GPU, working environments. Copy it into an issue."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rl_lab.cli.terminal import shows_unicode

_PACKAGES = (
    *("rl-lab", "torch", "numpy", "gymnasium", "hydra-core", "omegaconf"),
    *("rich", "safetensors", "tensorboardX", "pillow", "psutil"),
)
_TIMEOUT_SECONDS = 60
_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "MUJOCO_GL")


@dataclass(frozen=True)
class Family:
    """A family of environments and a program that tries one of it."""

    name: str
    module: str  # absent: the family is not installed
    install: str
    program: str


_GYMNASIUM = "import gymnasium\nenv = gymnasium.make({id!r})\nenv.reset(seed=0)\nenv.step(env.action_space.sample())"
_OURS = "from rl_lab.envs.make import make_env\nmake_env({id!r}, 2).reset(seed=[0, 1])"
FAMILIES = (
    Family("tiny (ours)", "rl_lab", "rl-lab", _OURS.format(id="tiny/CartPole")),
    Family("classic control", "gymnasium", "gymnasium", _GYMNASIUM.format(id="CartPole-v1")),
    Family("box2d", "Box2D", "gymnasium[box2d]", _GYMNASIUM.format(id="LunarLander-v3")),
    Family("mujoco", "mujoco", "rl-lab[mujoco]", _GYMNASIUM.format(id="HalfCheetah-v5")),
    Family(
        "dm_control",
        "dm_control",
        "rl-lab[dmc]",
        "from dm_control import suite\nsuite.load('cartpole', 'swingup').reset()",
    ),
    Family("atari", "ale_py", "rl-lab[atari]", _OURS.format(id="ALE/Pong-v5")),
    Family("minigrid", "minigrid", "rl-lab[minigrid]", _OURS.format(id="MiniGrid-Empty-5x5-v0")),
)
_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "cuda": torch.version.cuda,
    "threads": torch.get_num_threads(),
    "vectors": torch.backends.cpu.get_cpu_capability(),
    "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}" for gpu in gpus],
}))
"""
_RENDER = """
import mujoco
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
renderer = mujoco.Renderer(model, 16, 16)
renderer.update_scene(mujoco.MjData(model))
assert renderer.render().shape == (16, 16, 3)
"""
_RENDERERS = ("egl", "osmesa", "glfw")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rl-lab doctor`."""
    parser.add_argument(
        "--timeout", type=float, default=_TIMEOUT_SECONDS, metavar="S", help="seconds for each test (default 60)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Report; status 1 if torch or our own environments do not work."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Each test is a process of its own: an import that crashes or hangs must not take the report with it.
    with ThreadPoolExecutor(max(1, min(4, num_cores))) as pool:
        torch_answer = pool.submit(attempt, _TORCH, arguments.timeout)
        families = [(family, pool.submit(_try_family, family, arguments.timeout)) for family in FAMILIES]
        renderers = [
            (name, pool.submit(attempt, _RENDER, arguments.timeout, {"MUJOCO_GL": name}))
            for name in (_RENDERERS if _is_installed("mujoco") else ())
        ]
        torch_works, torch_text = torch_answer.result()
        good, bad, absent = "✓✗·" if shows_unicode() else "+x-"
        lines = ["versions", *_version_lines(), "", "machine", *_machine_lines(num_cores, torch_works, torch_text)]
        lines += ["", "environments"]
        for family, answer in families:
            works, text = answer.result()
            lines.append(f"  {absent if works is None else good if works else bad} {family.name:<16} {text}".rstrip())
        if renderers:
            lines += ["", "rendering with MuJoCo"]
            for name, rendered in renderers:
                works, text = rendered.result()
                lines.append(f"  {good if works else bad} MUJOCO_GL={name:<7} {'' if works else text}".rstrip())
    print("\n".join(lines))
    return 0 if torch_works and families[0][1].result()[0] else 1


def attempt(program: str, timeout: float, environment: dict[str, str] | None = None) -> tuple[bool, str]:
    """Run a Python program in a process of its own; return whether it ended well and its last line of output."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {timeout:g} s"
    if done.returncode < 0:
        return False, f"killed by signal {-done.returncode}"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else ""


def _try_family(family: Family, timeout: float) -> tuple[bool | None, str]:
    if not _is_installed(family.module):
        return None, f'not installed: pip install "{family.install}"'
    works, text = attempt(family.program, timeout)
    lacks = f': pip install "{family.install}"' if "No module named" in text or "not installed" in text else ""
    return works, "" if works else f"{text}{lacks}"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent package is absent
        return False


def _version_lines() -> list[str]:
    found = {"python": f"{platform.python_version()} ({platform.python_implementation()})"}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return [f"  {name:<14} {text}" for name, text in found.items()]


def _machine_lines(num_cores: int, torch_works: bool, torch_text: str) -> list[str]:
    found = {"platform": f"{platform.system()} {platform.release()} {platform.machine()}"}
    found["processor"] = processor_name()
    found["cores"] = f"{num_cores} for us, {os.cpu_count()} in all"
    found["memory"] = _memory()
    found["disk"] = f"{shutil.disk_usage(os.getcwd()).free / 2**30:.1f} GiB free here"
    if torch_works:
        answer = json.loads(torch_text)
        found["torch threads"] = str(answer["threads"])
        found["torch vectors"] = answer["vectors"]  # with AVX512 oneDNN makes large products
        found["GPU"] = "; ".join(answer["gpus"]) or "none"
        found["CUDA"] = answer["cuda"] or "this torch is built without CUDA"
        if not answer["gpus"] and shutil.which("nvidia-smi"):
            found["GPU"] += " that torch can use, though an NVIDIA driver is installed"
    else:
        found["torch"] = f"does not import: {torch_text}"
    found |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return [f"  {name:<20} {text}" for name, text in found.items()]


def processor_name() -> str:
    """Return what Linux calls the processor, and which of that name it is; elsewhere the architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"


def _memory() -> str:
    try:
        import psutil
    except ImportError:
        return "unknown: psutil is not installed"
    memory = psutil.virtual_memory()
    return f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"
