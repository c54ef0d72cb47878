"""REL5: flipped bits, cuts, zeroed or repeated pages, missing, strange or renamed files: found, named, passed over."""

import random
import shutil

import pytest

from rl_lab.core.errors import RunError, UserError
from rl_lab.orchestration import checkpoint as checkpoint_module
from rl_lab.orchestration.checkpoint import CheckpointError
from rl_lab.orchestration.files import Files
from tests.reliability.compare import differences, newest, snapshot
from tests.reliability.disk import Disk
from tests.reliability.store import FOLDER, LAST, Rows, number_of, restart, save, save_all
from tests.reliability.workloads import train

KINDS = ("flip", "truncate", "page")


def new_files(files, folder):
    """What only the newest checkpoint needs, and the segments that the one before it needs, too."""
    newest = folder / "checkpoints" / f"{LAST:010d}"
    own = [newest / name for name in files.names(newest)]
    before = {start for start, _ in Rows(LAST - 1).segments()}
    shared = []
    for name in files.names(folder / "replay" / "replay"):
        start = int(name.split("-")[0])
        if start in {start for start, _ in Rows(LAST).segments()}:
            (shared if start in before else own).append(folder / "replay" / "replay" / name)
    return own, shared


def damage(files, path, kind, rng):
    """Damage a file so that it differs, and return the names of which the message must have one."""
    data = files.read(path)
    while True:
        if kind == "flip":
            changed = bytearray(data)
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "truncate":
            changed = data[: rng.randrange(len(data))]
        else:
            changed, names = damage_pages(files, path, data, rng)
            if changed is None:
                return names
        if bytes(changed) != data:
            files.write(path, bytes(changed))
            return {path.name}


def damage_pages(files, path, data, rng):
    what = rng.choice(["zero", "zero", "repeat", "repeat", "missing", "strange", "renamed", "swapped", "longer"])
    size = rng.choice([16, 64, 512])
    start = rng.randrange(0, len(data), size)
    page = data[start : start + size]
    other = path.with_name(f"x{path.name}")
    if what == "zero":
        return data[:start] + bytes(len(page)) + data[start + size :], None
    if what == "repeat":
        return data[:start] + page + data[start : len(data) - rng.choice([0, len(page)])], None
    if what == "longer":
        return data + bytes(rng.randrange(1, 100)), None
    if what == "missing":
        files.remove(path)
    elif what == "renamed":
        files.rename(path, other)
    elif what == "strange":
        if path.parent.name == "replay":  # an unlisted segment is nobody's
            files.remove(path)
            files.make_folder(path)
        else:
            files.write(other, data)
    else:
        contents = [files.read(path.with_name(name)) for name in files.names(path.parent)]
        files.write(path, rng.choice([content for content in contents if content != data]))
    return None, {path.name, other.name}


def check(files, folder, rng, kind, counts):
    own, shared = new_files(files, folder)
    is_shared = rng.random() < 0.1
    names = damage(files, rng.choice(shared if is_shared else own), kind, rng)
    said = []
    manager = restart(files, folder, said.append)
    number = number_of(manager.load_latest())
    damaged = {"damaged"} if not is_shared else {"damaged", "both"}
    counts[is_shared] = counts.get(is_shared, 0) + 1
    assert number == (0 if is_shared else LAST - 1), f"{names}: {said}"
    assert all("is damaged" in text and any(name in text for name in names) for text in said), f"{names}: {said}"
    assert len(said) == len(damaged)
    aside = [name for name in files.names(folder / "checkpoints") if name.endswith(".corrupt")]
    assert aside == [f"{n:010d}.corrupt" for n in ((LAST - 1, LAST) if is_shared else (LAST,))]


@pytest.fixture(scope="module")
def good():
    disk = Disk()
    save_all(restart(disk))
    return disk


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_damages_of_a_kind_are_found_and_named(good, kind):
    rng, counts = random.Random(kind), {}
    for _ in range(1000):
        check(good.copy(), FOLDER, rng, kind, counts)
    assert min(counts.values()) > 50


@pytest.mark.chaos
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_damages_of_a_kind_on_a_real_disk(tmp_path, kind):
    save_all(restart(Files(), tmp_path / "good"))
    rng, counts = random.Random(f"disk {kind}"), {}
    for number in range(1000):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", folder)
        check(Files(), folder, rng, kind, counts)
        shutil.rmtree(folder)


def test_a_damaged_best_agent_is_refused(good):
    rng = random.Random(0)
    for _ in range(200):
        disk = good.copy()
        names = damage(disk, FOLDER / "best" / rng.choice(disk.names(FOLDER / "best")), rng.choice(KINDS), rng)
        with pytest.raises(CheckpointError) as refusal:
            restart(disk).load_best()
        assert any(name in str(refusal.value) for name in names)


def test_who_only_looks_moves_nothing_and_needs_no_replay(good):
    disk = good.copy()
    disk.remove(FOLDER / "replay")
    before = disk.names(FOLDER / "checkpoints")
    found = restart(disk).load_latest(sections=["components", "counters"])
    assert (number_of(found), found.histories) == (LAST, {})
    damage(disk, found.path / "counters.json", "flip", random.Random(0))
    assert number_of(restart(disk).load_latest(sections=["components", "counters"])) == LAST - 1
    assert disk.names(FOLDER / "checkpoints") == before


def test_who_looks_while_the_owner_removes_finds_the_next(good):
    disk, owner = good.copy(), None
    read, reads = disk.read, []

    def read_late(path):
        reads.append(path)
        if len(reads) == 2:  # after the manifest
            for number in (LAST + 1, LAST + 2):
                save(owner, number)
        return read(path)

    owner = restart(disk)
    owner.load_latest()
    disk.read = read_late
    assert number_of(restart(disk).load_latest(sections=["components", "counters"])) == LAST + 2


def test_a_segment_that_somebody_removed_is_written_again(good):
    disk = good.copy()
    manager = restart(disk)
    manager.load_latest()
    for name in disk.names(FOLDER / "replay" / "replay")[-2:]:
        disk.remove(FOLDER / "replay" / "replay" / name)
    save(manager, LAST + 1)
    assert number_of(restart(disk).load_latest()) == LAST + 1


@pytest.mark.parametrize("number", [13, 24])  # permission, too many open files
def test_what_cannot_be_read_now_is_not_damaged(good, number):
    disk = good.copy()

    def refuse(path):
        raise OSError(number, "not now", str(path))

    disk.read = refuse
    with pytest.raises(RunError, match="cannot be read: not now"):
        restart(disk).load_latest()
    assert not [name for name in disk.names(FOLDER / "checkpoints") if "corrupt" in name]


def test_a_newer_format_is_refused_and_stays(good, monkeypatch):
    disk = good.copy()
    monkeypatch.setattr(checkpoint_module, "FORMAT", checkpoint_module.FORMAT + 1)
    manager = restart(disk)
    manager.load_latest()
    save(manager, LAST + 1)
    monkeypatch.undo()
    before = disk.names(FOLDER / "checkpoints")
    with pytest.raises(UserError, match="install a newer rl-lab"):
        restart(disk).load_latest()
    assert disk.names(FOLDER / "checkpoints") == before


@pytest.fixture(scope="module")
def stopped(warm, memory_folder):
    """A run that was stopped, with what it would have become."""
    log = memory_folder / "corruption.log"
    assert warm.run(train("dqn", memory_folder / "whole"), log, ("small_segments", 700)) == 0
    folder = memory_folder / "stopped"
    assert warm.run(train("dqn", folder), log, ("small_segments", 700), ("stop_at", 51, "SIGTERM")) == 75
    return folder, snapshot(memory_folder / "whole")


@pytest.mark.parametrize("seed", range(20))
def test_a_resumed_run_passes_over_a_damaged_checkpoint(warm, stopped, folder, seed):
    original, expected = stopped
    rng, run = random.Random(seed), folder / "run"
    shutil.copytree(original, run)
    files = Files()
    newest_path = newest(run).path
    names = damage(files, newest_path / rng.choice(files.names(newest_path)), rng.choice(KINDS), rng)
    log = folder / "log"
    assert warm.run(train("dqn", run), log, ("small_segments", 700)) == 0
    said = log.read_text()
    assert said.count("\n") == 1
    assert f"checkpoint {newest_path.name} is damaged" in said
    assert any(name in said for name in names)
    assert differences(snapshot(run), expected) == []


def test_a_run_without_a_good_checkpoint_starts_over_and_keeps_its_log(warm, stopped, folder):
    original, expected = stopped
    run = folder / "run"
    shutil.copytree(original, run)
    old_log = (run / "metrics.jsonl").read_bytes()
    for path in (run / "checkpoints").iterdir():
        damage(Files(), path / "components.json", "flip", random.Random(0))
    assert warm.run(train("dqn", run), folder / "log") == 0
    assert "no good checkpoint is left" in (folder / "log").read_text()
    assert (run / "metrics.old.jsonl").read_bytes() == old_log
    assert differences(snapshot(run), expected) == []
