import numpy as np
import pytest
from PIL import Image, ImageSequence

from rl_lab.cli.gif import write_gif


def read(path):
    with Image.open(path) as image:
        frames, durations = [], []
        for frame in ImageSequence.Iterator(image):
            durations.append(frame.info["duration"])
            frames.append(np.asarray(frame.convert("RGB")))
        return frames, durations, image.info["loop"]


def moving_square(num_frames, colours=((255, 255, 255), (200, 30, 40))):
    frames = np.empty((num_frames, 24, 32, 3), dtype=np.uint8)
    frames[:] = colours[0]
    for i in range(num_frames):
        frames[i, 4:10, i : i + 6] = colours[1]
    return list(frames)


def test_frames_come_back_exactly_and_loop(tmp_path):
    frames = moving_square(20)
    write_gif(tmp_path / "new" / "a.gif", frames, fps=25)
    found, durations, loop = read(tmp_path / "new" / "a.gif")
    assert loop == 0
    assert durations == [40] * 20
    assert np.array_equal(np.stack(found), np.stack(frames))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.gif"]


def test_up_to_256_colours_are_kept_exactly_wherever_they_appear(tmp_path):
    frames = moving_square(20)
    shades = np.arange(120, dtype=np.uint8).reshape(8, 15)
    frames[0][:8, :15] = np.stack([shades, shades, shades], -1)
    frames[13][:8, :15] = np.stack([shades, 0 * shades, 2 * shades], -1)[:, :, ::-1]
    frames[13][0, 0] = (1, 2, 3)  # a colour that a sample of the frames would miss
    write_gif(tmp_path / "a.gif", frames)
    assert np.array_equal(np.stack(read(tmp_path / "a.gif")[0]), np.stack(frames))


def test_many_colours_stay_close(tmp_path):
    y, x = np.mgrid[0:48, 0:64]
    frames = [np.stack([x * 4, y * 5, (x + y + 5 * i) % 256], -1).astype(np.uint8) for i in range(6)]
    write_gif(tmp_path / "a.gif", frames)
    found, _, _ = read(tmp_path / "a.gif")
    error = np.abs(np.stack(found).astype(int) - np.stack(frames).astype(int))
    assert len(found) == 6
    assert error.mean() < 12


@pytest.mark.parametrize("fps", [10, 24, 30, 33, 50])
def test_the_animation_takes_the_time_of_the_episode(tmp_path, fps):
    write_gif(tmp_path / "a.gif", moving_square(26), fps=fps)
    _, durations, _ = read(tmp_path / "a.gif")
    assert sum(durations) == pytest.approx(26 * 1000 / fps, abs=10)
    assert min(durations) >= 20


def test_frames_that_stay_the_same_keep_their_time(tmp_path):
    frames = moving_square(3)
    write_gif(tmp_path / "a.gif", [frames[0]] * 10 + [frames[1]] + [frames[2]] * 5, fps=20)
    found, durations, _ = read(tmp_path / "a.gif")
    assert sum(durations) == 16 * 50
    assert np.array_equal(found[-1], frames[2])


def test_viewers_cannot_show_more_than_fifty_frames_a_second(tmp_path):
    write_gif(tmp_path / "a.gif", moving_square(5), fps=200)
    assert read(tmp_path / "a.gif")[1] == [20] * 5


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ([], "no frames"),
        ([np.zeros((4, 4, 3), np.float32)], "frame 0 is float32"),
        ([np.zeros((4, 4), np.uint8)], "frame 0"),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((5, 4, 3), np.uint8)], "frame 1"),
    ],
)
def test_wrong_frames_are_named_and_leave_nothing(tmp_path, frames, text):
    with pytest.raises(ValueError, match=text):
        write_gif(tmp_path / "a.gif", frames)
    assert list(tmp_path.iterdir()) == []


def test_an_array_of_frames_that_is_not_contiguous_is_taken(tmp_path):
    frames = np.stack(moving_square(4))[:, ::2]
    write_gif(tmp_path / "a.gif", frames)
    assert np.array_equal(np.stack(read(tmp_path / "a.gif")[0]), frames)
