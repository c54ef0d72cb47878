"""What a saved configuration and a state may contain: the limits themselves, and that good ones are far from them."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rl_lab.composition import load_experiment, to_yaml
from rl_lab.core.errors import UserError, hide, shown
from rl_lab.orchestration import state_files
from rl_lab.orchestration.files import Files
from rl_lab.orchestration.state_files import decode, encode, read_json
from rl_lab.overrides import group_options
from rl_lab.trust import MAX_CONFIG_BYTES, MAX_NODES, check_folder, load_saved, read_saved, read_text
from tests.security.artefacts import safetensors


def saved(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", group_options("experiment"))
def test_shipped_experiments_can_be_saved_and_loaded(name, tmp_path):
    composed = load_experiment(name)
    path = saved(tmp_path, to_yaml(composed))
    assert load_saved(path) == composed
    assert path.stat().st_size < MAX_CONFIG_BYTES / 20
    assert len(path.read_text().splitlines()) < MAX_NODES / 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{a: 1, b: '${a}'}", {"a": 1, "b": 1}),
        ("{a: {x: 2, y: '${.x}', z: '${..b}'}, b: 3}", {"a": {"x": 2, "y": 2, "z": 3}, "b": 3}),
        ("{a: [5, 6], b: '${a[1]}', c: '${a.0}'}", {"a": [5, 6], "b": 6, "c": 5}),
        ("{a: {x: 1}, b: '${a}', c: '${b.x}'}", {"a": {"x": 1}, "b": {"x": 1}, "c": 1}),
        ("{a: 1, b: '${add:${a}, ${a}}'}", {"a": 1, "b": 2}),
        ("{a: x, b: 'y ${a} z'}", {"a": "x", "b": "y x z"}),
    ],
)
def test_references_that_are_followed(text, expected, tmp_path):
    assert OmegaConf.to_container(load_saved(saved(tmp_path, text)), resolve=True) == expected


def test_resolvers_that_the_user_allows(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERE", "here")
    path = saved(tmp_path, "{a: '${oc.env:WHERE}'}")
    with pytest.raises(UserError, match=r"--allow oc\.env"):
        load_saved(path)
    assert load_saved(path, ["oc.env"]).a == "here"
    assert OmegaConf.to_container(read_saved(path)) == {"a": "${oc.env:WHERE}"}


def test_folders_may_lie_behind_links_but_not_contain_any(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (tmp_path / "link").symlink_to(run)
    check_folder(tmp_path / "link")
    (run / "checkpoints" / "latest").symlink_to(run)
    with pytest.raises(UserError, match="there is a link"):
        check_folder(tmp_path / "link")


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "folder"])
def test_only_regular_files_are_read(kind, tmp_path):
    """The store itself does not follow links or wait for pipes, whoever has looked at the folder before."""
    (tmp_path / "real").write_text("secret")
    make = {
        "link": lambda path: path.symlink_to(tmp_path / "real"),
        "pipe": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
    }
    make[kind](tmp_path / "file")
    for call in (Files().size, Files().read, partial(read_text, max_bytes=100)):
        with pytest.raises((OSError, ValueError)):
            call(tmp_path / "file")


def tensors(count: int) -> bytes:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return safetensors({str(i): entry for i in range(count)})


def test_limits_of_tensor_files():
    assert decode(tensors(state_files.MAX_TENSORS), b"{}") == {}
    for data in (tensors(state_files.MAX_TENSORS + 1), safetensors("{}" + " " * state_files.MAX_HEADER_BYTES)):
        with pytest.raises(ValueError, match=r"tensors|header"):
            decode(data, b"{}")


def test_limits_of_plain_data():
    lists = state_files.MAX_CONTAINERS
    assert len(read_json(json.dumps([[]] * (lists - 1)).encode())) == lists - 1
    for text in (
        "[" + "[]," * lists + "[]]",
        "[" + '"",' * (state_files.MAX_TEXTS + 1) + "0]",
        '"' + " " * 2**24 + '"',
    ):
        with pytest.raises(ValueError, match="too much plain data"):
            read_json(text.encode())


def test_what_could_not_be_read_again_is_not_written():
    with pytest.raises(ValueError, match="too much plain data"):
        encode([[]] * (state_files.MAX_CONTAINERS + 1))
    with pytest.raises(ValueError, match="tensors"):
        encode([torch.zeros(1)] * (state_files.MAX_TENSORS + 1))


def test_messages_are_one_screen_without_control_characters():
    text = str(UserError("a\x1b[2Jb", key="k" * 10_000, value="\x07", valid=["\r" * 50], remedy="x\ny"))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert max(map(len, text.splitlines())) <= 1_000
    assert "too long to be shown" in str(UserError("no", value=1 << 20_000, valid=["a"]))


def test_what_is_hidden_is_hidden_in_every_message():
    secret = "a-very-long-secret's"
    hide(secret)
    hide("short")
    text = str(UserError("x", key="k", value={"url": f"me:{secret}@host"}, valid=[secret]))
    assert "long-secret" not in text
    assert "me:(from the environment)@host" in text
    assert shown("short words stay") == "short words stay"
