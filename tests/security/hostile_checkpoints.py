"""SEC1: what a stranger may put into a checkpoint. All digests are right where they can be: that proves nothing."""

import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.orchestration.state_files import decode, encode
from tests.security.artefacts import newest, read_safetensors, safetensors, seal, seal_segment, sealed

Tamper = Callable[[Path], None]
SPARSE_BYTES = 256 * 2**20


class Payload:
    """Unpickled, it leaves a mark."""

    def __reduce__(self):
        return os.system, ("touch MARK",)


def archive(kind: str) -> bytes:
    """Return a zip or tar whose member climbs out."""
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as members:
            members.writestr("../../MARK", "x")
            members.writestr("archive/data.pkl", pickle.dumps(Payload()))
    else:
        with tarfile.open(fileobj=file, mode="w") as members:
            member = tarfile.TarInfo("../../MARK")
            member.size = 1
            members.addfile(member, io.BytesIO(b"x"))
    return file.getvalue()


def saved_by_torch(*, archived: bool) -> bytes:
    file = io.BytesIO()
    torch.save({"weights": Payload()}, file, _use_new_zipfile_serialization=archived)
    return file.getvalue()


def saved_by_numpy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Payload()], dtype=object), allow_pickle=True)
    return file.getvalue()


PAYLOADS = {
    "pickle": pickle.dumps(Payload()),
    "pickle, protocol 0": pickle.dumps(Payload(), protocol=0),
    "torch.save": saved_by_torch(archived=True),
    "torch.save, old": saved_by_torch(archived=False),
    "numpy objects": saved_by_numpy(),
    "zip": archive("zip"),
    "tar": archive("tar"),
    "python": b"import os; os.system('touch MARK')\n",
    "yaml": b"!!python/object/apply:os.system ['touch MARK']\n",
}


def replaced(name: str, data: bytes) -> Tamper:
    """Another content for a file, with right digests."""

    def tamper(folder: Path) -> None:
        (folder / name).write_bytes(data)
        seal(folder)

    return tamper


def manifest(**changes: Any) -> Tamper:
    """Another entry of the manifest, sealed."""
    return lambda folder: seal(folder, lambda entries: entries.update(changes))


def edited(edit: Callable[[dict[str, Any]], Any]) -> Tamper:
    return lambda folder: seal(folder, lambda entries: edit(entries) and None)


def raw_manifest(data: bytes | Callable[[bytes], bytes]) -> Tamper:
    """A manifest that is not even sealed."""

    def tamper(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_bytes(data(path.read_bytes()) if callable(data) else data)

    return tamper


def header(edit: Callable[[dict[str, Any]], Any]) -> Tamper:
    """Another header of the weights, over the same data."""

    def tamper(folder: Path) -> None:
        path = folder / "components.safetensors"
        entries, data = read_safetensors(path)
        given = edit(entries)
        path.write_bytes(safetensors(entries if given is None else given, data))
        seal(folder)

    return tamper


def first(entries: dict[str, Any]) -> dict[str, Any]:
    return next(iter(entries.values()))


def state(section: str, edit: Callable[[Any], Any]) -> Tamper:
    """Another state of a section, written as the store would write it."""

    def tamper(folder: Path) -> None:
        paths = folder / f"{section}.safetensors", folder / f"{section}.json"
        value = decode(*(path.read_bytes() for path in paths))
        given = edit(value)
        for path, data in zip(paths, encode(value if given is None else given), strict=True):
            path.write_bytes(data)
        seal(folder)

    return tamper


def plain(section: str, text: str | bytes) -> Tamper:
    return replaced(f"{section}.json", text if isinstance(text, bytes) else text.encode())


def weights(change: Callable[[torch.Tensor], Any]) -> Tamper:
    """Another value of every weight, under the right names."""

    def edit(value: dict[str, Any]) -> None:
        for module in value.values():
            for name in module:
                module[name] = change(module[name])

    return state("components", edit)


def section_named(name: str) -> Tamper:
    """A section whose name leads elsewhere; its files are there if they can be."""

    def tamper(folder: Path) -> None:
        def edit(entries: dict[str, Any]) -> None:
            entries["sections"].append(name)
            for ending in ("safetensors", "json"):
                data = (folder / f"components.{ending}").read_bytes()
                entries["files"][f"{name}.{ending}"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                target = folder / f"{name}.{ending}"
                if folder in target.parents and "\0" not in name:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)

        seal(folder, edit)

    return tamper


def without(section: str) -> Tamper:
    def tamper(folder: Path) -> None:
        def edit(entries: dict[str, Any]) -> None:
            entries["sections"].remove(section)
            for ending in ("safetensors", "json"):
                del entries["files"][f"{section}.{ending}"]
                (folder / f"{section}.{ending}").unlink()

        seal(folder, edit)

    return tamper


def beside(name: str, data: bytes = b"import os; os.system('touch MARK')") -> Tamper:
    """A file that nobody asked for."""

    def tamper(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return tamper


def special(name: str, make: Callable[[Path], Any]) -> Tamper:
    """Something that is no file in the place of one."""

    def tamper(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return tamper


def sparse(folder: Path) -> None:
    """A file that is large and takes no room, with its right digest: a quarter of a gigabyte of zeros."""
    digest = hashlib.sha256()
    for _ in range(SPARSE_BYTES // 2**20):
        digest.update(bytes(2**20))
    with open(folder / "components.safetensors", "wb") as file:
        file.truncate(SPARSE_BYTES)
    path = folder / "manifest.json"
    entries = json.loads(path.read_text())
    del entries["sha256"]
    entries["files"]["components.safetensors"] = {"size": SPARSE_BYTES, "sha256": digest.hexdigest()}
    path.write_bytes(sealed(entries))


def listen(path: Path) -> None:
    """Leave a socket at a path that may be too long for one."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


MANY = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(100_000))

# In any checkpoint, best agent or export.
WEIGHTS: dict[str, Tamper] = {
    **{f"{name} as tensors": replaced("components.safetensors", data) for name, data in PAYLOADS.items()},
    **{f"{name} as plain data": replaced("components.json", data) for name, data in list(PAYLOADS.items())[:4]},
    **{f"{name} as manifest": raw_manifest(data) for name, data in list(PAYLOADS.items())[:4]},
    "a pickle beside": beside("components.pt", PAYLOADS["pickle"]),
    "a module beside": beside("__init__.py"),
    "a site module beside": beside("sitecustomize.py"),
    "a folder beside": beside("state/components.safetensors", b""),
    "a listed pickle": edited(
        lambda entries: entries["files"].update({"components.pt": {"size": 1, "sha256": "0" * 64}})
    ),
    "section ..": section_named("../../victim/diary"),
    "section /": section_named("/etc/passwd"),
    "section with a folder": section_named("state/components"),
    "section .": section_named("."),
    "section without a name": section_named(""),
    "section with a zero": section_named("a\0b"),
    "section with a line": section_named("components\n"),
    "sections twice": edited(lambda entries: entries["sections"].append("components")),
    "sections that are numbers": manifest(sections=[1, 2]),
    "sections that are lists": manifest(sections=[["components"]]),
    "sections that are nothing": manifest(sections=None),
    "sections that are a text": manifest(sections="components"),
    "files that are a list": manifest(files=[]),
    "files that are nothing": manifest(files=None),
    "header of 2**63 bytes": replaced("components.safetensors", (2**63).to_bytes(8, "little") + b"{}"),
    "header of 2**64-1 bytes": replaced("components.safetensors", b"\xff" * 8 + b"{}"),
    "header longer than the file": replaced("components.safetensors", (1000).to_bytes(8, "little") + b"{}"),
    "no header": replaced("components.safetensors", b""),
    "header of five megabytes": replaced("components.safetensors", safetensors("{}" + " " * 5 * 2**20)),
    "header that is a list": header(lambda entries: list(entries)),
    "header that is deep": replaced("components.safetensors", safetensors('{"a":' + "[" * 10**5 + "]" * 10**5 + "}")),
    "header that is wide": replaced("components.safetensors", safetensors('{"a":[' + "[]," * 10**6 + "[]]}")),
    "header that is no text": replaced("components.safetensors", safetensors(b'{"\xff\xfe": {}}')),
    "header twice the same name": header(
        lambda entries: "{" + ",".join(f'"x":{json.dumps(first(entries))}' for _ in range(1000)) + "}"
    ),
    "100,000 tensors": replaced("components.safetensors", safetensors("{" + MANY + "}")),
    "overlapping tensors": header(
        lambda entries: [entry.update(data_offsets=[0, 4]) for entry in entries.values()][:0]
    ),
    "tensors in one place": header(
        lambda entries: entries.update({f"copy/{name}": entry for name, entry in entries.items()})
    ),
    "offsets beyond the end": header(lambda entries: first(entries).update(data_offsets=[0, 10**15])),
    "offsets reversed": header(lambda entries: first(entries).update(data_offsets=[64, 0])),
    "offsets below zero": header(lambda entries: first(entries).update(data_offsets=[-64, 0])),
    "offsets that are not numbers": header(lambda entries: first(entries).update(data_offsets=["0", None])),
    "shape that overflows": header(lambda entries: first(entries).update(shape=[2**62, 8])),
    "shape of nothing times all": header(lambda entries: first(entries).update(shape=[0, 2**62, 2**62])),
    "shape below zero": header(lambda entries: first(entries).update(shape=[-16, -4])),
    "shape that is NaN": header(lambda entries: json.dumps(entries).replace("[16]", "[NaN]")),
    "shape of fractions": header(lambda entries: first(entries).update(shape=[15.5])),
    "shape that is a text": header(lambda entries: first(entries).update(shape="16")),
    "shape of 10,000 dimensions": header(lambda entries: first(entries).update(shape=[1] * 10_000)),
    "type that is none": header(lambda entries: first(entries).update(dtype="OBJECT")),
    "type of four bits": header(lambda entries: first(entries).update(dtype="F4")),
    "type that is a list": header(lambda entries: first(entries).update(dtype=["F32"])),
    "entry without a type": header(lambda entries: first(entries).pop("dtype") and None),
    "metadata that is a mapping": header(lambda entries: entries.update(__metadata__={"a": {"b": 1}})),
    "data with a hole": header(lambda entries: entries.pop(next(iter(entries))) and None),
    "other shapes": weights(lambda value: torch.zeros(3, 3)),
    "transposed shapes": weights(lambda value: value.T.contiguous() if value.dim() == 2 else value[:1]),
    "empty tensors": weights(lambda value: value[:0]),
    "double precision": weights(torch.Tensor.double),
    "bytes": weights(lambda value: value.to(torch.uint8)),
    "bfloat16": weights(torch.Tensor.bfloat16),
    "complex numbers": weights(lambda value: value.to(torch.complex64)),
    "truth values": weights(torch.Tensor.bool),
    "numbers instead of tensors": weights(lambda value: 0.0),
    "texts instead of tensors": weights(lambda value: "zeros"),
    "lists instead of tensors": weights(lambda value: [[0.0]]),
    "arrays instead of tensors": weights(torch.Tensor.numpy),
    "a weight too many": state("components", lambda value: value["q_network"].update({"__class__": torch.zeros(1)})),
    "a weight too few": state("components", lambda value: value["q_network"].popitem() and None),
    "no weights": state("components", lambda value: {}),
    "a list of weights": state("components", lambda value: [value]),
    "a mark that points nowhere": plain("components", '{"q_network": {"$tensor": "/nowhere"}}'),
    "a mark that points to a list": plain("components", '{"q_network": {"$tensor": ["/"]}}'),
    "a mark that points to a mark": plain("components", '{"q_network": {"$array": {"$tensor": "/"}}}'),
    "a tuple of nothing": plain("components", '{"q_network": {"$tuple": 3}}'),
    "items that are none": plain("components", '{"q_network": {"$items": [[1, 2, 3]]}}'),
    "items with lists as keys": plain("components", '{"q_network": {"$items": [[[1], 2]]}}'),
    "plain data that is deep": plain("components", "[" * 10**5 + "]" * 10**5),
    "plain data that is deep in marks": plain("components", '{"$tuple":[' * 20_000 + "]}" * 20_000),
    "a number of 10,000 digits": plain("components", '{"q_network": ' + "9" * 10_000 + "}"),
    "NaN": plain("components", '{"q_network": NaN}'),
    "five million lists": plain("components", "[" + "[]," * 5_000_000 + "[]]"),
    "a million texts": plain("components", "[" + '"ab",' * 10**6 + '""]'),
    "15 MB of wide letters": plain("components", '"' + "a" * (15 * 2**20) + "\U0001f4a5" + '"'),
    "names twice": plain("components", '{"q_network": {}, "q_network": []}'),
    "UTF-16": plain("components", '{"q_network": {}}'.encode("utf-16")),
    "no plain data": plain("components", b""),
    "plain data that is null": plain("components", "null"),
    "format that is true": manifest(format=True),
    "format that is a text": manifest(format="1"),
    "format 0": manifest(format=0),
    "format 99": manifest(format=99),
    "format that is a fraction": manifest(format=1.5),
    "size below zero": edited(lambda entries: first(entries["files"]).update(size=-1)),
    "size that is true": edited(lambda entries: first(entries["files"]).update(size=True)),
    "size that is a text": edited(lambda entries: first(entries["files"]).update(size="9")),
    "size of an exabyte": edited(lambda entries: first(entries["files"]).update(size=2**60)),
    "size that is NaN": edited(lambda entries: first(entries["files"]).update(size=float("nan"))),
    "digest that is none": edited(lambda entries: first(entries["files"]).update(sha256=None)),
    "digest in capitals": edited(lambda entries: first(entries["files"]).update(sha256="A" * 64)),
    "a sparse file": sparse,
    "a million threads": manifest(threads=10**6),
    "threads that are a text": manifest(threads="4"),
    "no threads": manifest(threads=0),
    "versions that are a text": manifest(versions="torch numpy"),
    "versions of versions": manifest(versions={"torch": {"a": 1}}),
    "manifest that is a list": raw_manifest(b"[]"),
    "manifest that is deep": raw_manifest(b"[" * 10**5 + b"]" * 10**5),
    "manifest of 15 MB": raw_manifest(b"[" + b"{}," * 5_000_000 + b"{}]"),
    "manifest of 17 MB": raw_manifest(b" " * 17 * 2**20),
    "manifest with white space": raw_manifest(lambda data: data + b"\n"),
    "manifest with two digests": raw_manifest(lambda data: data.replace(b'"format"', b'"sha256": "0",\n "format"')),
    "manifest with names that move the cursor": edited(
        lambda entries: entries["sections"].append("\x1b]0;owned\x07\x1b[2J" * 50)
    ),
    "weights behind a link": special("components.safetensors", lambda path: path.symlink_to("/etc/hostname")),
    "plain data behind a link": special("components.json", lambda path: path.symlink_to("/etc/passwd")),
    "manifest behind a link": special("manifest.json", lambda path: path.symlink_to("/dev/zero")),
    "weights behind a device": special("components.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "weights from a pipe": special("components.safetensors", os.mkfifo),
    "plain data from a pipe": special("components.json", os.mkfifo),
    "weights from a socket": special("components.safetensors", listen),
    "a folder as weights": special("components.safetensors", Path.mkdir),
}


def optimizer(edit: Callable[[dict[str, Any]], Any]) -> Tamper:
    return state("optimizers", lambda value: edit(value["agent"]["optimizer"]) and None)


def moments(change: Callable[[torch.Tensor], Any]) -> Tamper:
    """Other moments of every parameter: fused kernels trust their shapes."""

    def edit(value: dict[str, Any]) -> None:
        for entry in value["state"].values():
            entry["exp_avg"] = change(entry["exp_avg"])

    return optimizer(edit)


def group(**changes: Any) -> Tamper:
    return optimizer(lambda value: value["param_groups"][0].update(changes))


def ring(edit: Callable[[dict[str, Any]], Any]) -> Tamper:
    return state("sources", lambda value: edit(value["replay"]["ring"]) and None)


def row(name: str, change: Callable[[torch.Tensor], Any]) -> Tamper:
    return ring(lambda value: value["tail"].update({name: change(value["tail"][name])}))


def numpy_words(**changes: Any) -> Tamper:
    return state("rng_state", lambda value: value["numpy"].update(changes))


# In a checkpoint that a run would continue from.
STATES: dict[str, Tamper] = {
    **{
        f"no {section}": without(section)
        for section in ("optimizers", "sources", "counters", "phase_state", "run", "rng_state", "generators", "sums")
    },
    "moments too small": moments(lambda value: value.reshape(-1)[:1].clone()),
    "moments too large": moments(lambda value: torch.zeros(1000, 1000)),
    "moments of other dimensions": moments(lambda value: value[None].clone()),
    "empty moments": moments(lambda value: value[:0].clone()),
    "moments that are lists": moments(lambda value: [0.0]),
    "moments of a parameter too many": optimizer(
        lambda value: value["state"].update({99: {"exp_avg": torch.zeros(1)}})
    ),
    "moments of a parameter before the first": optimizer(
        lambda value: value["state"].update({-1: {"exp_avg": torch.zeros(1)}})
    ),
    "betas that are texts": group(betas=("a", "b")),
    "betas that are many": group(betas=(0.9,) * 100),
    "a learning rate that is a text": group(lr="fast"),
    "a learning rate of many numbers": group(lr=torch.ones(7)),
    "a group too many": optimizer(lambda value: value["param_groups"].append(dict(value["param_groups"][0]))),
    "NumPy's generator beyond its end": numpy_words(position=10**9),
    "NumPy's generator before its begin": numpy_words(position=-5),
    "NumPy's generator too short": numpy_words(keys=[1, 2, 3]),
    "NumPy's generator of another kind": numpy_words(name="SFC64"),
    "Python's generator too short": state("rng_state", lambda value: value["python"].update(words=[1])),
    "torch's generator too short": state(
        "rng_state", lambda value: value.update(torch=torch.zeros(3, dtype=torch.uint8))
    ),
    "torch's generator of numbers": state("rng_state", lambda value: value.update(torch=torch.zeros(5056))),
    "a generator that is none": state(
        "generators", lambda value: value["torch"].update({"collect/act": torch.zeros(1)})
    ),
    "a generator of another kind": state(
        "generators", lambda value: value["numpy"].update({"source/replay": {"bit_generator": "os.system"}})
    ),
    "counters that are texts": state("counters", lambda value: value.update(actions="../../x")),
    "counters with other names": state("counters", lambda value: value.update({"__class__": 1, "save": 2})),
    "a phase that is not there": state("phase_state", lambda value: value.update(hook_index=99)),
    "a phase that is a text": state("phase_state", lambda value: value.update(phase_index="0")),
    "debts that are texts": state("phase_state", lambda value: value.update(ratio_calls=["a", "b"])),
    "a log cut before its begin": state("run", lambda value: value.update(jsonl_offset=-1)),
    "a log cut at a text": state("run", lambda value: value.update(jsonl_offset="0")),
    "evaluations without episodes": state("evaluation", lambda value: value.update(returns=np.zeros((1, 0)))),
    "evaluations of texts": state("evaluation", lambda value: value.update(returns=[["a"]])),
    "evaluations of different lengths": state("evaluation", lambda value: value.update(env_steps=np.arange(9))),
    "sums that are none": state("sums", lambda value: [["a", 1.0, 0]]),
    "sums of lists": state("sums", lambda value: [["a", [], "b"]]),
    "episodes of other environments": state(
        "collector", lambda value: value.update(running_lengths=np.zeros(9, np.int64))
    ),
    "episodes before the first": state("collector", lambda value: value.update(episode_index=np.array([-(2**62)]))),
    "observations of other sizes": state("collector", lambda value: value.update(observations=np.zeros((1, 7)))),
    "actions that are none": state("collector", lambda value: value.update(actions=np.full((3, 1), 10**9))),
    "actions of texts": state("collector", lambda value: value.update(actions=[["left"]])),
    "recurrent state from nowhere": state("collector", lambda value: value.update(state={"h": torch.zeros(1, 4)})),
    "replay of other sizes": row("observations", lambda value: torch.zeros(*value.shape[:2], 7)),
    "replay of other types": row("observations", torch.Tensor.double),
    "rewards of other types": row("rewards", torch.Tensor.long),
    "ends of other types": row("terminated", torch.Tensor.float),
    "replay without a column": ring(lambda value: value["tail"].pop("rewards") is None),
    "replay of other lengths": row("actions", lambda value: value[:1]),
    "replay of another shape": ring(lambda value: value.update(shape=[3, 1])),
    "heads of other environments": ring(lambda value: value.update(heads=np.zeros(5, np.int64))),
    "heads that are texts": ring(lambda value: value.update(heads=["a"])),
    "a tail that starts nowhere": ring(lambda value: value.update(start="x")),
    "written columns of other lengths": ring(lambda value: value.update(written={"latent": torch.zeros(3, 2)})),
}


def segments(**changes: Any) -> Tamper:
    """Other segments in the manifest of a run's newest checkpoint."""
    return lambda run: manifest(segments=changes)(newest(run))


def segment(edit: Callable[[dict[str, Any]], Any]) -> Tamper:
    def tamper(run: Path) -> None:
        seal(newest(run), lambda entries: edit(entries["segments"]["replay"][0]) and None)

    return tamper


def at(name: str, make: Callable[[Path, Path], Any]) -> Tamper:
    """Replace a file or folder of a run by what `make(path, victim)` leaves there."""

    def tamper(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        make(path, run.parent / "victim")

    return tamper


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def link_to_file(path: Path, victim: Path) -> None:
    path.symlink_to(victim / "diary.txt")


def holding(text: str) -> Callable[[Path, Path], Any]:
    return lambda path, victim: path.write_text(text)


def wrong_rows(run: Path) -> None:
    data, _ = encode({"observations": torch.zeros(8, 1, 7), "steps": np.zeros((8, 1)), "last": np.zeros((8, 1), bool)})
    seal_segment(run, data)


SUMMARY = '{"finished": true, "name": 5, "agent_steps": "many", "best_evaluation": [], "last_evaluation": "\\u001b[2J"}'

# In the folder of a run, around its checkpoints. `victim` lies beside it.
RUNS: dict[str, Tamper] = {
    "a buffer that climbs out": segments(**{"replay": [], "../../victim": []}),
    "a buffer that is elsewhere": segments(**{"replay": [], "/etc": []}),
    "a buffer that is here": segments(**{".": []}),
    "a buffer that is above": segments(**{"..": []}),
    "segments that are a list": lambda run: manifest(segments=[1])(newest(run)),
    "segments that are numbers": segments(replay=[1]),
    "segments that are a text": segments(replay="abc"),
    "a segment that climbs out": segment(lambda entry: entry.update(file="../../../victim/diary.txt")),
    "a segment with a zero": segment(lambda entry: entry.update(file="a\0b")),
    "a segment that is a list": segment(lambda entry: entry.update(file=["a"])),
    "a segment that is absent": segment(lambda entry: entry.update(file="000000000000-0123456789ab.safetensors")),
    "a segment before the first": segment(lambda entry: entry.update(start=-1)),
    "a segment that starts at a text": segment(lambda entry: entry.update(start="0")),
    "a segment of an exabyte": segment(lambda entry: entry.update(size=2**60)),
    "a segment without columns": segment(lambda entry: entry.update(columns=None)),
    "a segment with columns that point nowhere": segment(
        lambda entry: entry.update(columns={"steps": {"$array": "/x"}})
    ),
    "a segment of other rows": wrong_rows,
    "a segment that is a pickle": lambda run: seal_segment(run, PAYLOADS["pickle"]),
    "a segment that is a zip": lambda run: seal_segment(run, PAYLOADS["zip"]),
    "a segment that overflows": lambda run: seal_segment(
        run, safetensors({"/steps": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]}})
    ),
    "checkpoints behind a link": at("checkpoints", link),
    "replay behind a link": at("replay", link),
    "a buffer behind a link": at("replay/replay", link),
    "best behind a link": at("best", link),
    "events behind a link": at("tensorboard", link),
    "log behind a link": at("metrics.jsonl", link_to_file),
    "lock behind a link": at(".lock", link_to_file),
    "summary behind a link": at("summary.json", link_to_file),
    "command behind a link": at("command.txt", link_to_file),
    "configuration behind a link": at("config.yaml", link_to_file),
    "batches behind a link": at("nonfinite", link),
    "log that is a pipe": at("metrics.jsonl", lambda path, victim: os.mkfifo(path)),
    "lock that is a pipe": at(".lock", lambda path, victim: os.mkfifo(path)),
    "summary that is a pipe": at("summary.json", lambda path, victim: os.mkfifo(path)),
    "configuration that is a pipe": at("config.yaml", lambda path, victim: os.mkfifo(path)),
    "summary that is a device": at("summary.json", lambda path, victim: path.symlink_to("/dev/zero")),
}

# These are odd and harmless: the run goes on, and nothing else happens.
HARMLESS: dict[str, Tamper] = {
    "summary that is deep": at("summary.json", holding("[" * 10**5)),
    "summary that is wrong": at("summary.json", holding(SUMMARY)),
    "summary that is sparse": at("summary.json", lambda path, victim: (path.touch(), os.truncate(path, 2**40))),
    "a module in the run": at("sitecustomize.py", holding("open('MARK', 'w')")),
    "a pickle in the run": at("best.pt", lambda path, victim: path.write_bytes(PAYLOADS["pickle"])),
    "a checkpoint that is half written": at("checkpoints/.0000000009.tmp-1/evil.py", holding("open('MARK', 'w')")),
    "a log cut beyond its end": lambda run: state("run", lambda value: value.update(jsonl_offset=10**12))(newest(run)),
    "a section too many": lambda run: section_named("evil")(newest(run)),
    "facts of other kinds": lambda run: manifest(
        commit={"a": 1}, config_hash=[1], device=7, meta="\x1b[2J", counters="many", evaluation=[[]]
    )(newest(run)),
}
