"""Pictures of predictions show what they should."""

import torch

from rl_lab.components import drawings
from rl_lab.components.drawings import calibration_picture, curves, filmstrip


def test_a_filmstrip_has_three_rows_and_marks_what_was_seen():
    true = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    picture = filmstrip(true, true, num_context=5, num_frames=10)
    height, width = 3 * (8 * 8 + 6), 10 * (8 * 8 + 4)
    assert picture.shape == (height, width, 3)
    rows = picture.view(3, height // 3, 10, width // 10, 3)
    assert torch.equal(rows[0, 4:-2], rows[1, 4:-2])
    assert (rows[2, 4:-2, :, 2:-2] == 0).all()  # no difference
    assert not torch.equal(rows[0, 1, 0, 4], rows[0, 1, -1, 4])  # seen, dreamed
    assert filmstrip(true[:3, :1], true[:3, :1], 1).shape[2] == 3


def test_of_stacked_frames_the_newest_is_shown():
    grey = torch.randint(0, 256, (2, 4, 64, 64), dtype=torch.uint8)
    colours = torch.randint(0, 256, (2, 6, 64, 64), dtype=torch.uint8)
    shown = filmstrip(grey, grey, 1)[4:68, 2:66]
    assert torch.equal(shown, grey[0, 3, :, :, None].expand(-1, -1, 3))
    assert torch.equal(filmstrip(colours, colours, 1)[4:68, 2:66], colours[0, 3:].permute(1, 2, 0))


def test_curves_of_equal_vectors_lie_on_each_other():
    true = torch.randn(12, 8)
    blue = torch.tensor([49, 110, 181], dtype=torch.uint8)
    same = curves(true, true, 4)
    assert same.shape[0] == 6 * 48
    assert (same == blue).all(-1).any()


def test_the_picture_has_points_where_values_are():
    observed, predicted = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])
    picture = calibration_picture(predicted, observed, size=40)
    assert picture.shape == (40, 40, 3)
    assert picture.dtype == torch.uint8
    point = torch.tensor(drawings._PREDICTED, dtype=torch.uint8)
    drawn = (picture == point).all(-1)
    assert drawn[2, 2]  # observed low and predicted high: left and above
    assert drawn[37, 37]
    assert drawn.sum() == 18
    calibration_picture(torch.zeros(3), torch.zeros(3), size=40)  # a single place is no error
