"""A sandbox: jobs run in a forked child under an audit hook that notes everything a hostile file must not cause."""

import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_SECONDS, MAX_MEGABYTES, MAX_LINES = 2.0, 200, 24
PATIENCE = 20.0  # seconds until a job that hangs is killed

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


@dataclass(frozen=True)
class Job:
    """A call in a folder: where it may write, what it may not even read."""

    call: Callable[[], Any]
    cwd: Path
    writable: Sequence[Path] = ()
    untouchable: Sequence[Path] = ()


class Guard:
    """The audit hook: notes what must not happen. A module that is imported is code that is executed."""

    def __init__(self) -> None:
        self.armed = False

    def arm(self, job: Job) -> None:
        self.writable = tuple(os.path.realpath(path) for path in job.writable)
        self.untouchable = tuple(os.path.realpath(path) for path in job.untouchable)
        self.violations: list[str] = []
        self.armed = True

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
        else:
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
    is_file = isinstance(address, (str, bytes)) and len(arguments) > 1 and arguments[1] is address
    return is_file or str(host) in ("127.0.0.1", "::1", "localhost")


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


@dataclass
class Report:
    """How a job went."""

    code: int | str  # exit status; a text where an exception came out
    output: str
    violations: list[str]
    seconds: float  # of the processor
    megabytes: float  # by which memory grew at most

    def problem(self, *codes: int) -> str | None:
        """Say why the job was not harmless, cheap, told on one screen and ended with one of these codes."""
        lines = self.output.splitlines()
        if self.violations:
            return f"violations: {self.violations[:5]} of {len(self.violations)}"
        if self.code not in codes or "Traceback" in self.output:
            return f"exit {self.code}: {self.output[-2000:]}"
        if self.seconds > MAX_SECONDS or self.megabytes > MAX_MEGABYTES:
            return f"{self.seconds:.1f} s, {self.megabytes:.0f} MB"
        if len(lines) > MAX_LINES or any(len(line) > 1_000 for line in lines):
            return f"more than a screen: {self.output[:2000]}"
        return None


def run_guarded(jobs: Sequence[Job], environment: Mapping[str, str] | None = None) -> list[Report]:
    """Run jobs one after the other in a forked child. Those after one that crashed or hung have not been run."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _in_child(jobs, writer, environment or {})
    os.close(writer)
    reports = [Report(**json.loads(line)) for line in _read_lines(reader, child)]
    missing = [Report("crashed, hung or not run", "", ["no answer"], 0.0, 0.0)] * (len(jobs) - len(reports))
    return reports + missing


def run_one(call: Callable[[], Any], cwd: Path, **options: Any) -> Report:
    """Run a single job that may write below its folder."""
    environment = options.pop("environment", None)
    return run_guarded([Job(call, cwd, **{"writable": [cwd], **options})], environment)[0]


def _in_child(jobs: Sequence[Job], writer: int, environment: Mapping[str, str]) -> None:
    try:
        gc.freeze()  # collecting what the parent left would copy its whole memory
        os.environ.update(environment)
        guard = Guard()
        sys.addaudithook(guard)
        with tempfile.TemporaryFile() as printed:
            for descriptor in (1, 2):
                os.dup2(printed.fileno(), descriptor)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            for job in jobs:
                report = _run(job, guard)
                printed.seek(0)
                report.output = printed.read().decode(errors="replace")
                printed.seek(0)
                printed.truncate()
                os.write(writer, json.dumps(asdict(report)).encode() + b"\n")
    finally:
        os._exit(0)


def _run(job: Job, guard: Guard) -> Report:
    os.chdir(job.cwd)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, started = _memory("VmRSS"), time.process_time()
    guard.arm(job)
    try:
        code = job.call()
    except BaseException as error:
        guard.armed = False
        traceback.print_exc()
        code = f"{type(error).__name__}: {error}"
    guard.armed = False
    seconds = time.process_time() - started
    sys.stdout.flush()
    return Report(code, "", guard.violations, seconds, (_memory("VmHWM") - before) / 1024)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _read_lines(reader: int, child: int) -> list[bytes]:
    """Read what the child says until it ends; kill it when it says nothing for too long."""
    os.set_blocking(reader, False)
    data, heard = b"", time.monotonic()
    while True:
        try:
            part = os.read(reader, 2**16)
            if not part:
                break
            data, heard = data + part, time.monotonic()
        except BlockingIOError:
            if time.monotonic() > heard + PATIENCE:
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.002)
    os.close(reader)
    os.waitpid(child, 0)
    return data.splitlines()
