import pytest
import torch

from midlayer_encoders.extras.probing.probe_result import ProbeResult


def test_curve_is_in_percent_and_marks_the_layer_selected_on_validation() -> None:
    right = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)  # layer 2 is best on the test
    result = ProbeResult(
        model="m", revision="default", num_layers=4, layers=(0, 2, 4), kind="linear", dataset="d", classes=["a", "b"],
        right=right, validation=torch.tensor([0.9, 0.5, 0.4]), epochs=torch.ones(3), chance=0.25, num_train=8,
    )  # fmt: skip
    figure = result.plot()
    (axes,) = figure.axes
    line, best, guessing = axes.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0, 2, 4], [50, 75, 25])
    assert (best.get_xdata()[0], best.get_ydata()[0]) == (0, 50)
    assert guessing.get_ydata()[0] == pytest.approx(25)
    corners = {tuple(corner) for corner in axes.collections[0].get_paths()[0].vertices.tolist()}
    table = result.table
    ends = {(layer, 100 * end) for name in ("low", "high") for layer, end in table.select("layer", name).iter_rows()}
    assert ends <= corners
    assert (axes.get_title(loc="left"), axes.get_ylabel()) == ("d", "accuracy, %")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["m, linear probe", "guessing (25%)"]
