"""What updates write to a replay is saved in pages: one in memory at a time, and only those that changed."""

import weakref

import pytest
import torch

from rl_lab.orchestration.checkpoint import CheckpointError, CheckpointManager

NUM_PAGES = 5


class Latents:
    """Pages of a tensor each, of which one changes; none is still held when the next is read."""

    def __init__(self):
        self.values = torch.arange(float(NUM_PAGES)).repeat_interleave(4)
        self.held = []

    def segments(self):
        return []

    def pages(self):
        return [(4 * i, 4 * i + 4) for i in range(NUM_PAGES)]

    def read_page(self, start, stop):
        assert [reference() for reference in self.held] == [None] * len(self.held)
        page = self.values[start:stop].clone()
        self.held.append(weakref.ref(page))
        return {"rewritten": {}, "written": {"latents": page}}


def files_of(folder):
    return {path.name: path.stat().st_ino for path in (folder / "replay" / "memory").iterdir()}


def save(manager, number, latents):
    manager.save(number, {"counters": {"actions": number}}, {"counters": {}}, {"memory": latents})


def test_pages_that_did_not_change_are_not_written_again(tmp_path):
    latents, manager = Latents(), CheckpointManager(tmp_path, keep=2)
    save(manager, 1, latents)
    first = files_of(tmp_path)
    assert len(first) == NUM_PAGES
    latents.values[9] = -1.0  # on the third page
    save(manager, 2, latents)
    second = files_of(tmp_path)
    assert len(second) == NUM_PAGES + 1
    assert first.items() <= second.items()
    saved = manager.load(manager.numbered()[-1]).histories["memory"].pages
    assert torch.equal(torch.cat([saved[start]["written"]["latents"] for start in sorted(saved)]), latents.values)
    before = manager.load(manager.numbered()[0]).histories["memory"].pages
    assert before[8]["written"]["latents"].tolist() == [2.0, 2.0, 2.0, 2.0]
    save(manager, 3, latents)
    assert files_of(tmp_path).items() <= second.items()
    assert len(files_of(tmp_path)) == NUM_PAGES  # what only the first checkpoint needed is gone


def test_a_damaged_page_is_found_before_anything_is_restored(tmp_path):
    latents, manager = Latents(), CheckpointManager(tmp_path)
    save(manager, 1, latents)
    latents.values[0] = 7.0
    save(manager, 2, latents)
    listed = manager.load(manager.numbered()[-1]).manifest["pages"]["memory"][0]["file"]
    path = tmp_path / "replay" / "memory" / listed
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="does not match its digest"):
        manager.load(manager.numbered()[-1])
    said = []
    found = CheckpointManager(tmp_path, say=said.append).load_latest()
    assert found.state["counters"]["actions"] == 1
    assert "set aside" in said[0]
