"""A sandbox: calls run in a forked child under an audit hook that notes everything a hostile file must not cause."""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SECONDS, MAX_MEGABYTES, MAX_LINES = 2.0, 200, 24
PATIENCE = 30.0  # seconds until a call that hangs is killed

# Python itself makes code of annotations, signatures and tuples with names; what it makes is not data's.
OWN_CODE = ("typing.py", "dataclasses.py", "inspect.py", "collections/__init__.py", "enum.py")
GIT = ["git", "rev-parse", "HEAD"]  # every run notes its commit
FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "os.startfile"),
    *("marshal.loads", "pickle.find_class", "code.__new__", "ctypes.dlopen", "ctypes.cdata", "webbrowser.open"),
    *("urllib.Request", "ftplib.connect", "smtplib.connect", "http.client.connect", "sys._getframe.f_locals"),
}
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind"}
PATHS = {  # event: which of its arguments are paths, and which one is the folder that they start from
    "os.remove": ((0,), 1),
    "os.rename": ((0, 1), None),
    "os.mkdir": ((0,), 2),
    "os.rmdir": ((0,), 1),
    "os.link": ((0, 1), None),
    "os.symlink": ((1,), 2),
    "os.truncate": ((0,), None),
    "os.chmod": ((0,), 2),
    "os.chown": ((0,), 3),
    "os.utime": ((0,), 3),
    "os.mkfifo": ((0,), None),
    "shutil.rmtree": ((0,), None),
    "shutil.move": ((0, 1), None),
    "shutil.copyfile": ((1,), None),
    "tempfile.mkstemp": ((0,), None),
    "tempfile.mkdtemp": ((0,), None),
}
WATCHED = {"exec", "compile", "open", "subprocess.Popen", *FORBIDDEN, *NETWORK, *PATHS}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Guard:
    """The audit hook: notes what must not happen. A module that is imported is code that is executed."""

    def __init__(self, writable: Iterable[Path], untouchable: Iterable[Path]) -> None:
        self.writable = tuple(os.path.realpath(path) for path in writable)
        self.untouchable = tuple(os.path.realpath(path) for path in untouchable)
        self.violations: list[str] = []
        self.armed = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED or not self.armed:
            return
        self.armed = False  # what the hook does itself is not watched
        try:
            self._note(event, arguments)
        finally:
            self.armed = True

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("exec", "compile"):
            caller = sys._getframe(2).f_code.co_filename
            if not caller.endswith(OWN_CODE):
                self.violations.append(f"{event} in {caller}: {str(arguments[0])[:100]}")
        elif event == "subprocess.Popen":
            if list(arguments[1]) != GIT:
                self.violations.append(f"subprocess {arguments[1]}")
        elif event in FORBIDDEN:
            self.violations.append(f"{event} {str(arguments)[:100]}")
        elif event in NETWORK:
            if not is_local(arguments):
                self.violations.append(f"{event} {str(arguments)[:100]}")
        elif event == "open":
            path, mode, flags = arguments
            writes = bool(flags & WRITING) or (isinstance(mode, str) and any(letter in mode for letter in "wax+"))
            self._note_path(f"open({mode})", path, writes=writes)
        elif event in PATHS:
            indices, folder = PATHS[event]
            start = arguments[folder] if folder is not None and len(arguments) > folder else -1
            for index in indices:
                self._note_path(event, arguments[index], writes=True, start=start)

    def _note_path(self, event: str, path: Any, *, writes: bool, start: int = -1) -> None:
        if path is None or isinstance(path, int):  # already open
            return
        folder = os.readlink(f"/proc/self/fd/{start}") if isinstance(start, int) and start >= 0 else os.getcwd()
        full = os.path.realpath(os.path.join(folder, os.fsdecode(path)))
        inside = _below(full, self.writable) or full == os.devnull
        if (writes and not inside) or _below(full, self.untouchable):
            self.violations.append(f"{event} {full}")


def is_local(arguments: tuple[Any, ...]) -> bool:
    """Whether a socket event stays on this machine: the loopback address, or a file."""
    address = arguments[1] if len(arguments) > 1 and not isinstance(arguments[0], (str, bytes)) else arguments[0]
    host = address[0] if isinstance(address, tuple) else address
    return isinstance(address, (str, bytes)) or str(host) in ("127.0.0.1", "::1", "localhost")


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


@dataclass
class Report:
    """How a call in the sandbox went."""

    code: int | str  # exit status; a text where an exception came out
    output: str
    violations: list[str]
    seconds: float  # of the processor
    megabytes: float  # by which memory grew at most

    def check(self, *codes: int) -> None:
        """Assert that the call was harmless, cheap and ended with one of these codes and one screen of text."""
        assert self.violations == [], self.output
        assert self.code in codes, f"exit {self.code}: {self.output[-3000:]}"
        assert "Traceback" not in self.output, self.output[-3000:]
        assert self.seconds <= MAX_SECONDS, f"{self.seconds:.1f} s"
        assert self.megabytes <= MAX_MEGABYTES, f"{self.megabytes:.0f} MB"
        lines = self.output.splitlines()
        assert len(lines) <= MAX_LINES, self.output
        assert all(len(line) <= 1_000 for line in lines), self.output


def run_guarded(
    call: Callable[[], Any],
    *,
    cwd: Path,
    writable: Iterable[Path] = (),
    untouchable: Iterable[Path] = (),
    environment: dict[str, str] | None = None,
) -> Report:
    """Run a call in a forked child and report; the child's exit status is what the call returns."""
    reader, writer = os.pipe()
    printed = cwd / f".printed-{time.monotonic_ns()}"
    child = os.fork()
    if child == 0:
        os.close(reader)
        _in_child(call, writer, printed, cwd, Guard(writable, untouchable), environment or {})
    os.close(writer)
    answer = _read_all(reader, child)
    output = printed.read_text(errors="replace") if printed.exists() else ""
    printed.unlink(missing_ok=True)
    if not answer:
        return Report("killed or crashed", output, ["no answer"], PATIENCE, 0.0)
    return Report(output=output, **json.loads(answer))


def _in_child(
    call: Callable[[], Any], writer: int, printed: Path, cwd: Path, guard: Guard, environment: dict[str, str]
) -> None:
    try:
        gc.freeze()  # collecting what the parent left would copy its whole memory
        os.environ.update(environment)
        os.chdir(cwd)
        descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.addaudithook(guard)
        before, started = _memory("VmRSS"), time.process_time()
        guard.armed = True
        try:
            code = call()
        except BaseException as error:
            guard.armed = False
            traceback.print_exc()
            code = f"{type(error).__name__}: {error}"
        guard.armed = False
        answer = {
            "code": code,
            "violations": guard.violations,
            "seconds": time.process_time() - started,
            "megabytes": (_memory("VmHWM") - before) / 1024,
        }
        sys.stdout.flush()
        os.write(writer, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _read_all(reader: int, child: int) -> bytes:
    """Read what the child says until it ends; kill it when it takes too long."""
    os.set_blocking(reader, False)
    data, deadline = b"", time.monotonic() + PATIENCE
    while True:
        try:
            part = os.read(reader, 2**16)
            if not part:
                break
            data += part
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.002)
    os.close(reader)
    os.waitpid(child, 0)
    return data
