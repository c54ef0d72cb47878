import errno
import json
import math
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_lab.orchestration import loggers
from rl_lab.orchestration.loggers import JsonlLogger, MetricSums, Record, TensorBoardLogger, prefixed

TAGS = {"phase": "main", "agent_steps": 8, "updates": 2, "episodes": 1}


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("hook", "prefix"),
    [
        ("collect", "collect/"),
        ("update_world_model", "train/"),
        ("update_controller", "controller/"),
        ("evaluate", "eval/"),
        ("update_agent", "agent/"),
        ("update_vae", "vae/"),
        ("workflow", "workflow/"),
    ],
)
def test_prefix_comes_from_the_hook_and_a_given_prefix_stays(hook, prefix):
    assert prefixed(hook, {"loss": 1.0, "mine/loss": 2.0}) == {prefix + "loss": 1.0, "mine/loss": 2.0}
    assert list(prefixed(hook, {"b": 1, "a": 2})) == [prefix + "b", prefix + "a"]


@pytest.mark.parametrize("name", [3, "", None])
def test_a_metric_name_that_is_no_text_is_refused(name):
    with pytest.raises(ValueError, match="update_agent"):
        prefixed("update_agent", {name: 1.0})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1e6, 1e6), st.integers(0, 5)), max_size=30))
def test_means_equal_brute_force(entries):
    sums = MetricSums()
    expected = {}
    for key, value, weight in entries:
        sums.add(key, value, weight)
        expected.setdefault(key, []).extend([value] * weight)
    expected = {key: values for key, values in expected.items() if values}
    drained = sums.drain()
    assert drained.keys() == expected.keys()
    for key, values in expected.items():
        assert math.isclose(drained[key], sum(values) / len(values), rel_tol=1e-9, abs_tol=1e-6)
    assert sums.drain() == {}


def test_every_kind_of_number_is_taken_and_keys_keep_their_order():
    sums = MetricSums()
    values = [2, True, 2.5, np.float32(0.5), np.int64(7), np.array(3.0), torch.tensor(4.0), torch.tensor(5)]
    sums.add_all({f"k{9 - i}": value for i, value in enumerate(values)})
    assert sums.drain() == {f"k{9 - i}": float(value) for i, value in enumerate(values)}
    sums.add("z", 1.0)
    sums.add("a", 1.0)
    assert list(sums.drain()) == ["z", "a"]


@pytest.mark.parametrize(
    "value",
    ["high", None, [1.0], {}, torch.zeros(1), torch.zeros(2, 2), np.zeros(1), np.array("x"), 1j, torch.tensor(1j)],
)
def test_what_is_no_number_is_refused_by_name(value, tmp_path):
    with pytest.raises(ValueError, match="train/strange"):
        MetricSums().add("train/strange", value)
    if not isinstance(value, list):
        with pytest.raises(ValueError, match="train/strange"):
            JsonlLogger(tmp_path / "m.jsonl").write([Record(0.0, 0, "train/strange", value, TAGS)])


def test_negative_weight_is_refused():
    with pytest.raises(ValueError, match="'x' has weight -1"):
        MetricSums().add("x", 1.0, -1)


def test_a_tensor_that_changes_later_does_not_change_the_sum():
    for add in (MetricSums.add, MetricSums._add_on_device):
        sums, value = MetricSums(), torch.tensor(1.0)
        add(sums, "loss", value, 1)
        value.fill_(100.0)
        add(sums, "loss", value, 3)
        assert sums.drain() == {"loss": (1 + 300) / 4}


def test_adding_on_a_device_never_reads_the_value(monkeypatch):
    sums = MetricSums()

    def reading(*_):
        raise AssertionError("waited for the device")

    with monkeypatch.context() as patch:
        for method in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, method, reading)
        for value in range(4):
            sums._add_on_device("loss", torch.tensor(float(value), requires_grad=True), 2)
            sums._add_on_device("other", torch.tensor(value), 1)
    sums.add("loss", 10.0, 2)
    assert sums.drain() == {"loss": (2 * 6 + 20) / 10, "other": 1.5}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sums_on_a_gpu():
    sums = MetricSums()
    for value in range(4):
        sums.add("loss", torch.tensor(float(value), device="cuda"))
        sums.add("loss", torch.tensor(float(value)))
    assert sums.drain() == {"loss": 1.5}


def test_state_continues_bit_for_bit_through_json():
    values = [0.1 * i for i in range(20)]
    whole, first, second = MetricSums(), MetricSums(), MetricSums()
    for i, value in enumerate(values):
        whole.add("b", value, 3)
        whole.add("a", torch.tensor(value))
        part = first if i < 7 else second
        if i == 7:
            second.set_state(json.loads(json.dumps(first.get_state(), allow_nan=False, sort_keys=True)))
        part.add("b", value, 3)
        part.add("a", torch.tensor(value))
    assert list(second.drain().items()) == list(whole.drain().items())


def test_state_keeps_sums_that_are_not_finite():
    sums, restored = MetricSums(), MetricSums()
    sums.add_all({"bad": float("nan"), "big": float("-inf"), "good": 1.0})
    restored.set_state(json.loads(json.dumps(sums.get_state(), allow_nan=False)))
    drained = restored.drain()
    assert math.isnan(drained["bad"])
    assert drained["big"] == -math.inf
    assert drained["good"] == 1.0


def test_jsonl_writes_the_record_and_knows_its_length(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    assert logger.offset == 0
    records = [
        Record(12.5, 100, 'a/"quoted" é', 0.1, TAGS),
        Record(12.5, 100, "b", 3, TAGS),
        Record(13, 101, "c", 1e300),
    ]
    logger.write(records)
    logger.write([Record(np.float64(14.0), np.int64(102), "d", np.float32(0.5), {"phase": "x"})])
    logger.write([])
    logger.close()
    logger.close()
    assert path.stat().st_size == logger.offset
    lines = strict(path.read_text(encoding="utf-8"))
    assert lines[0] == {"ts": 12.5, "step": 100, "key": 'a/"quoted" é', "value": 0.1, "tags": TAGS}
    assert list(lines[0]) == ["ts", "step", "key", "value", "tags"]
    assert lines[1]["value"] == 3
    assert lines[2] == {"ts": 13.0, "step": 101, "key": "c", "value": 1e300, "tags": {}}
    assert lines[3] == {"ts": 14.0, "step": 102, "key": "d", "value": 0.5, "tags": {"phase": "x"}}


def test_jsonl_keeps_lists_and_writes_null_for_what_json_cannot_say(tmp_path):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    values = [float("nan"), float("inf"), torch.tensor(-math.inf), [1.0, float("nan"), 2], (3.0,), 5.0]
    logger.write([Record(0.0, 1, "k", value, TAGS) for value in values])
    lines = strict((tmp_path / "m.jsonl").read_text())
    assert [line["value"] for line in lines] == [None, None, None, [1.0, None, 2.0], [3.0], 5.0]
    strange = [line["tags"].get("nonfinite") for line in lines]
    assert strange == ["nan", "inf", "-inf", ["nan"], None, None]
    assert all({**TAGS, **line["tags"]} == line["tags"] for line in lines)


def test_jsonl_writes_once_per_call(tmp_path, monkeypatch):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    calls = []
    real = os.write
    monkeypatch.setattr(loggers.os, "write", lambda file, data: calls.append(len(data)) or real(file, data))
    logger.write([Record(0.0, i, "k", float(i), TAGS) for i in range(50)])
    assert calls == [logger.offset]


@pytest.mark.parametrize("tail", [b'{"ts": 1, "st', b"\x00" * 100, b"x" * 200_000])
@pytest.mark.parametrize("num_whole", [0, 3])
def test_jsonl_cuts_a_torn_last_line(tmp_path, tail, num_whole):
    path = tmp_path / "m.jsonl"
    logger = JsonlLogger(path)
    logger.write([Record(0.0, i, "k", 1.0, TAGS) for i in range(num_whole)])
    logger.close()
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    logger = JsonlLogger(path)
    assert path.read_bytes() == whole
    assert logger.offset == len(whole)
    logger.write([Record(0.0, 9, "k", 1.0, TAGS)])
    assert [line["step"] for line in strict(path.read_text())] == [*range(num_whole), 9]


def test_jsonl_truncate_goes_back_to_a_reported_offset(tmp_path):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    offsets = []
    for i in range(4):
        offsets.append(logger.offset)
        logger.write([Record(0.0, i, "k", 1.0, TAGS)])
    logger.sync()
    with pytest.raises(ValueError, match="records were lost"):
        logger.truncate(logger.offset + 1)
    with pytest.raises(ValueError, match="no line ends there"):
        logger.truncate(offsets[2] - 1)
    logger.truncate(offsets[2])
    logger.write([Record(0.0, 7, "k", 1.0, TAGS)])
    assert [line["step"] for line in strict(logger.path.read_text())] == [0, 1, 7]
    logger.truncate(0)
    assert logger.path.read_bytes() == b""


def test_jsonl_finishes_a_short_write_and_leaves_no_part_when_the_disk_is_full(tmp_path, monkeypatch):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    logger.write([Record(0.0, 0, "k", 1.0, TAGS)])
    real, room = os.write, [200]

    def narrow(file, data):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(file, data[: min(10, room[0])])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(loggers.os, "write", narrow)
        logger.write([Record(0.0, 1, "k", 1.0, TAGS)])
        before = logger.offset
        with pytest.raises(OSError, match="No space"):
            logger.write([Record(0.0, 2, "k", 1.0, TAGS)])
    assert logger.offset == before == logger.path.stat().st_size
    logger.write([Record(0.0, 3, "k", 1.0, TAGS)])
    assert [line["step"] for line in strict(logger.path.read_text())] == [0, 1, 3]


def events_of(path):
    """Read a TensorBoard file by its format: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event()
        event.ParseFromString(data[12 : 12 + length])
        events.append(event)
        data = data[16 + length :]
    return events


def test_tensorboard_events_hold_the_scalars_and_not_the_lists(tmp_path):
    logger = TensorBoardLogger(tmp_path / "tensorboard", purge_step=50)
    values = [("train/loss", 0.25), ("eval/returns", [1.0, 2.0]), ("train/q", torch.tensor(3.0))]
    logger.write([Record(7.0, 60, key, value, TAGS) for key, value in values])
    logger.write([Record(8.0, 61, "train/loss", 0.5, TAGS), Record(8.0, 62, "train/loss", float("nan"), TAGS)])
    logger.write([Record(8.0, 63, "eval/returns", [1.0], TAGS)])
    logger.close()
    logger.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert "tfevents" in path.name
    version, purge, *events = events_of(path)
    assert version.file_version == "brain.Event:2"
    assert (purge.step, purge.session_log.status) == (50, purge.session_log.START)
    found = [
        (event.wall_time, event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]
    assert found[:3] == [(7.0, 60, "train/loss", 0.25), (7.0, 60, "train/q", 3.0), (8.0, 61, "train/loss", 0.5)]
    assert found[3][:3] == (8.0, 62, "train/loss")
    assert math.isnan(found[3][3])
    assert len(found) == 4


def test_a_quick_restart_does_not_overwrite_the_events(tmp_path):
    for step in range(3):
        logger = TensorBoardLogger(tmp_path)
        logger.write([Record(0.0, step, "k", 1.0)])
        logger.close()
    steps = [event.step for path in sorted(tmp_path.iterdir()) for event in events_of(path) if event.summary.value]
    assert sorted(steps) == [0, 1, 2]


def test_tensorboard_and_rich_are_imported_only_when_used():
    program = (
        "import sys, types\n"
        "sys.modules['torch'] = types.SimpleNamespace(Tensor=object)  # a real one takes seconds to import\n"
        "import rl_lab.orchestration.loggers, rl_lab.orchestration.dashboard\n"
        "found = {'tensorboardX', 'rich'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
