"""Pictures of predictions show what they should."""

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components import drawings
from rl_lab.components.drawings import BAR, GAP, HEADER, MARGIN, calibration_picture, curves, draw_dream, filmstrip

GREY, BLUE = (torch.tensor(colour, dtype=torch.uint8) for colour in (drawings._TRUE, drawings._PREDICTED))


def images(num_steps, num_channels=3, side=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num_steps, num_channels, side, side), dtype=torch.uint8, generator=generator)


def frames_of(picture, num_columns):
    """Return the frames [3, F, H, W, 3] of a filmstrip, and the colours [F, 3] of the bars above."""
    below = picture[HEADER:, MARGIN:]
    height, width = below.shape[0] // 3, below.shape[1] // num_columns
    cells = below.view(3, height, num_columns, width, 3).transpose(1, 2)
    bars = picture[HEADER - GAP - BAR : HEADER - GAP, MARGIN:].view(BAR, num_columns, width, 3)[:, :, : width - GAP]
    assert (bars == bars[0, :, 0, None]).all()
    return cells[:, :, : height - GAP, : width - GAP], bars[0, :, 0]


def large(frame):
    return frame.permute(1, 2, 0).repeat_interleave(8, 0).repeat_interleave(8, 1)


def test_a_filmstrip_has_three_rows_and_marks_what_was_seen():
    true = images(20)
    picture = filmstrip(true, true, num_context=5, num_frames=10)
    assert picture.shape == (HEADER + 3 * (64 + GAP), MARGIN + 10 * (64 + GAP), 3)
    assert picture.dtype == torch.uint8
    frames, bars = frames_of(picture, 10)
    assert torch.equal(frames[0], frames[1])
    assert (frames[2] == 0).all()  # no difference
    assert torch.equal(bars, torch.stack([GREY] * 5 + [BLUE] * 5))
    assert torch.equal(picture, filmstrip(true, true, num_context=5, num_frames=10))
    assert filmstrip(true[:3, :1], true[:3, :1], 1).shape[2] == 3


def test_the_difference_is_that_of_the_frames_above_it():
    true, decoded = images(6), images(6).flip(0)
    frames, _ = frames_of(filmstrip(true, decoded, 2), 6)
    assert torch.equal(frames[2].int(), (frames[0].int() - frames[1].int()).abs())
    assert frames[2].any()


def test_a_filmstrip_shows_all_that_was_seen_and_dreams_from_the_first_to_the_last():
    true = images(55)
    frames, bars = frames_of(filmstrip(true, true, 5), 16)
    shown = [*range(5), 5, 9, 14, 19, 24, 29, 34, 39, 44, 49, 54]  # +1, +5, +10, ... +50
    for frame, place in zip(frames[0], shown, strict=True):
        assert torch.equal(frame, large(true[place]))
    assert torch.equal(bars, torch.stack([GREY] * 5 + [BLUE] * 11))


@pytest.mark.parametrize(("num_steps", "num_context", "num_shown"), [(7, 5, 7), (6, 5, 6), (40, 20, 21), (16, 5, 16)])
def test_few_steps_are_all_shown_and_a_long_context_leaves_one_dream(num_steps, num_context, num_shown):
    _, bars = frames_of(filmstrip(images(num_steps), images(num_steps), num_context), num_shown)
    assert (bars == GREY).all(-1).sum() == num_context


def test_steps_and_rows_have_names():
    true = images(8)
    picture = filmstrip(true, true, 5)
    tops = [HEADER + row * (64 + GAP) for row in range(3)]
    names = [written(picture[top : top + 64, :MARGIN]) for top in tops]
    assert all(name.any() for name in names)
    assert not torch.equal(names[0], names[1])
    steps = picture[HEADER - GAP - BAR - 16 : HEADER - GAP - BAR, MARGIN:].view(16, 8, 64 + GAP, 3).transpose(0, 1)
    numbers = [written(step) for step in steps]
    assert all(number.any() for number in numbers)
    again = filmstrip(true, true, 4)[HEADER - GAP - BAR - 16 : HEADER - GAP - BAR, MARGIN:]
    moved = again.view(16, 8, 64 + GAP, 3).transpose(0, 1)
    assert torch.equal(moved[3], steps[4])  # step 0 is the last one that was seen


def written(part):
    return (part != torch.tensor(drawings._PAPER, dtype=torch.uint8)).any(-1)


def test_of_stacked_frames_the_newest_is_shown():
    grey, colours = images(2, 4, 64), images(2, 6, 64)
    frames, _ = frames_of(filmstrip(grey, grey, 1), 2)
    assert torch.equal(frames[0, 0], grey[0, 3, :, :, None].expand(-1, -1, 3))
    frames, _ = frames_of(filmstrip(colours, colours, 1), 2)
    assert torch.equal(frames[0, 0], colours[0, 3:].permute(1, 2, 0))


def lines(picture):
    """Return where the grey and the blue line are, below the legend and without the words."""
    below = picture[HEADER:, drawings.NAME_WIDTH + MARGIN :]
    return (below == GREY).all(-1), (below == BLUE).all(-1)


def test_curves_of_equal_vectors_lie_on_each_other():
    true = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    same_grey, same_blue = lines(curves(true, true, 4))
    grey, blue = lines(curves(true, true.flip(0), 4))  # of the same range, so that the grey lines stay
    assert same_blue.any()
    assert same_grey.any()  # it is thicker
    assert not (same_blue & ~widened(grey | blue)).any()
    assert (blue & ~widened(same_grey | same_blue)).any()


def widened(mask):
    """Add the neighbours of true pixels: joints of lines are round."""
    return F.max_pool2d(mask[None].float(), 3, 1, 1)[0] > 0.0


def test_curves_are_connected_wide_and_say_how_many_there_are():
    true = torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None].expand(-1, 8)
    picture = curves(true, true, 2)
    assert picture.shape[1] >= 640
    _, blue = lines(picture)
    panel = blue[: drawings.CURVE_HEIGHT]
    assert panel[:, : drawings.CURVES_WIDTH].any(0).sum() >= drawings.CURVES_WIDTH - 1  # but where the dream begins
    panels = (picture.shape[0] - HEADER) // (drawings.CURVE_HEIGHT + 2 * GAP)
    assert panels == 6
    told = written(picture[:32, -120:])
    assert told.any()  # "6 of 8 entries"
    assert not written(curves(true[:, :6], true[:, :6], 2)[:32, -120:]).any()


def test_the_dream_begins_at_a_vertical_line():
    true = torch.zeros(11, 2)
    places = []
    for num_context in (3, 8):
        below = curves(true, true, num_context)[HEADER:, drawings.NAME_WIDTH + MARGIN :]
        ink = (below == torch.tensor(drawings._INK, dtype=torch.uint8)).all(-1)[: drawings.CURVE_HEIGHT]
        assert ink.any(0).sum() == 1
        places.append(int(ink.any(0).nonzero()))
    step = (drawings.CURVES_WIDTH - 1) / 10
    assert places == pytest.approx([2.5 * step, 7.5 * step], abs=1.0)


def test_numbers_that_are_not_finite_leave_a_gap():
    true, decoded = torch.zeros(9, 1), torch.zeros(9, 1)
    decoded[3:6] = torch.nan
    _, blue = lines(curves(true, decoded, 2))
    step = (drawings.CURVES_WIDTH - 1) / 8
    assert not blue[:, int(2.2 * step) : int(5.8 * step)].any()
    assert blue[:, : int(1.8 * step)].any()
    curves(true, torch.full_like(true, torch.inf), 2)
    nothing = curves(true * torch.nan, true * torch.nan, 2)
    assert not lines(nothing)[1].any()


def test_pictures_of_a_mapping_are_named_after_its_entries():
    seen = {"camera": images(9), "speed": torch.randn(9, 2)}
    pictures = draw_dream(seen, seen, 5)
    assert pictures.keys() == {"dream_camera", "dream_speed"}
    named, plain = (curves(seen["speed"], seen["speed"], 5, name) for name in ("speed", "entry"))
    assert torch.equal(pictures["dream_speed"], named)
    assert not torch.equal(named, plain)


def test_the_picture_has_points_where_values_are():
    observed, predicted = torch.tensor([0.0, 1.0, torch.nan]), torch.tensor([1.0, 0.0, 0.5])
    picture = calibration_picture(predicted, observed, "reward", size=40)
    assert picture.dtype == torch.uint8
    area = picture[HEADER : HEADER + 40, MARGIN : MARGIN + 40]
    drawn = (area == BLUE).all(-1)
    assert drawn[GAP, GAP]  # observed low and predicted high: left and above
    assert drawn[39 - GAP, 39 - GAP]
    assert drawn.sum() == 18
    assert (area[20] == GREY).all(-1).any()  # the diagonal
    beside, below = picture[HEADER : HEADER + 40, :MARGIN], picture[HEADER + 40 :]
    assert written(beside[:16]).any()
    assert written(beside[-16:]).any()
    assert written(below).any()
    calibration_picture(torch.zeros(3), torch.zeros(3), "reward", size=40)  # a single place is no error
