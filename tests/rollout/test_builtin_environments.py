"""The environments by name: zoom, python, click."""

import pytest
from PIL import Image, ImageDraw

from lightrft_visual.config.environment import EpisodeConfig
from lightrft_visual.rollout.builtin.calculator import evaluate
from lightrft_visual.rollout.builtin.click import INK, Click
from lightrft_visual.rollout.builtin.zoom import LEAST_SIDE, Zoom, pixel_box
from lightrft_visual.rollout.environments import Action, ToolCall, environment_factory


def quarters() -> Image.Image:
    """100x60 pixels: red, green over blue, white."""
    image = Image.new("RGB", (100, 60), "red")
    draw = ImageDraw.Draw(image)
    for box, colour in (((50, 0, 99, 29), "lime"), ((0, 30, 49, 59), "blue"), ((50, 30, 99, 59), "white")):
        draw.rectangle(box, fill=colour)
    return image


def answer_of(name: str, row: dict, tool: str, **arguments):
    environment = environment_factory(EpisodeConfig(environment=name))()
    environment.reset(row)
    return environment.step(Action("", [], [ToolCall(tool, arguments)]))


# --- zoom ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "colour"),
    [
        ([0, 0, 0.5, 0.5], (255, 0, 0)), ([0.5, 0, 1, 0.5], (0, 255, 0)), ([0, 30, 50, 60], (0, 0, 255)),
        ([50, 30, 500, 600], (255, 255, 255)), ([-20, -20, 50, 30], (255, 0, 0)),
    ],
)  # fmt: skip
def test_zoom_on_a_box_in_pixels_or_shares_returns_that_region_enlarged(box, colour):
    messages, _, done, _ = answer_of("zoom", {"images": [quarters()]}, "zoom", box=box)
    (part,) = messages[0]["content"]
    assert part["image"].size == (100, 60) and not done
    assert part["image"].getpixel((50, 30)) == colour and len(part["image"].getcolors()) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"box": [9, 9, 9, 20]}, "no inside"), ({"box": [200, 200, 300, 300]}, "no inside"),
        ({"box": [0.6, 0, 0.4, 1]}, "no inside"), ({"box": [0, 0, 9]}, "four numbers, not 3"),
        ({"box": [0, 0, float("nan"), 9]}, "finite"), ({"box": ["a", 0, 9, 9]}, "valid number"),
        ({"box": [0, 0, 9, 9], "image": 2}, "there is no image 2"), ({}, "Missing required argument"),
    ],
)  # fmt: skip
def test_zoom_on_a_bad_box_is_answered_by_an_error_text(arguments, told):
    messages, _, done, info = answer_of("zoom", {"images": [quarters()]}, "zoom", **arguments)
    assert messages[0]["content"].startswith("error: ") and told in messages[0]["content"]
    assert info["tool_errors"] == 1 and not done


def test_region_of_a_tiny_image_has_at_least_the_side_that_models_take_and_a_sliver_is_refused():
    for image, box, side, size in (
        (Image.new("RGB", (4, 2)), [0, 0, 1, 1], None, (2 * LEAST_SIDE, LEAST_SIDE)),
        (quarters(), [0, 0, 50, 25], 112, (112, 56)),
    ):
        zoom = Zoom(side)
        zoom.reset({"images": [image]})
        assert zoom.zoom(box).size == size
    with pytest.raises(ValueError, match="times as long as wide"):
        pixel_box([0, 0, 500, 1], (500, 500))


# --- python ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"), ("(1 - 9) // 3", "-3"), ("2 ** 10 % 7", "2"), ("sqrt(2) < 1.5", "True"), ("1/4", "0.25"),
        ("sum([1, 2, 3])", "6"), ("max(1, 7, 3)", "7"), ("round(2 * pi, 3)", "6.283"), ("comb(5, 2)", "10"),
        ("0 < 1 < 2", "True"), ("round(1234.5)", "1234"),
    ],
)  # fmt: skip
def test_arithmetic_is_evaluated(expression, value):
    assert evaluate(expression) == (value, "")


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')", "().__class__", "open('x')", "x", "lambda: 1", "[i for i in (1,)]", "'a' * 9", "9**9**9",
        "1 << 9999999", "factorial(10**6)", "comb(10**9, 5*10**8)", "1/0", "", "a = 1", "print(1)", "f'{1}'", "b'1'",
        "(-1) ** 0.5", "[1] * 10**9", "sum([1, 2], start=3)", "(" * 500 + "1" + ")" * 500, "1+" * 1500 + "1",
        "0 in [0]", "pow(10, 10**9)", "None", "2j", "1 if 1 else 2", "-" * 1999 + "1", "round(5, -10**6)",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large_is_an_error(expression):
    value, error = evaluate(expression)
    assert value == "" and error
    assert evaluate("round(5, 401)")[1].endswith("round takes digits up to 400")


def test_python_environment_answers_with_values_and_errors():
    messages, _, _, _ = answer_of("python", {}, "python", expression="6 * 7")
    assert messages[0]["content"] == "42"
    messages, _, _, info = answer_of("python", {}, "python", expression="exit()")
    assert "this is a calculator" in messages[0]["content"] and info["tool_errors"] == 1


# --- click -----------------------------------------------------------------------------------------------------------

SCREEN = {"images": [Image.new("RGB", (100, 60))], "target": [50, 30, 70, 40]}


def clicked(text: str = "", calls=(), row=SCREEN):
    environment = Click()
    environment.reset(row)
    return environment.step(Action(text, [], list(calls)))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("it is at (60, 35).", []), ("<think>At (1, 2)?</think>(60, 35)", []), ("[0.6, .6]", []),
        ("", [ToolCall("click", {"x": 50, "y": 40})]), ("", [ToolCall("click", {"x": 0.7, "y": 0.5})]),
    ],
)  # fmt: skip
def test_click_inside_the_target_is_rewarded_and_ends_the_episode_as_a_response_without_a_point_does(text, calls):
    assert clicked(text, calls)[:3] == (None, 1.0, True)
    assert clicked("I do not know")[:3] == (None, 0.0, True)


def test_first_click_of_a_response_counts_and_is_shown_with_a_cross_where_it_is_outside():
    messages, reward, done, _ = clicked("(10, 20)")
    (part,) = messages[0]["content"]
    assert (reward, done) == (0.0, False)
    assert part["image"].getpixel((10, 20)) == INK and part["image"].getpixel((60, 35)) == (0, 0, 0)
    assert SCREEN["images"][0].getpixel((10, 20)) == (0, 0, 0), "the row's own image is as it was"
    calls = [ToolCall("click", {"x": 1, "y": 20}), ToolCall("click", {"x": 60, "y": 35})]
    assert clicked("", calls)[1:3] == (0.0, False)


@pytest.mark.parametrize("target", ["(50, 30, 70, 40)", ".5, .5, .7, .667", [0.5, 0.5, 0.7, 0.667], (50, 30, 70, 40)])
def test_target_may_be_text_or_shares_and_stand_in_the_reference(target):
    row = {"images": SCREEN["images"], "reference": target}
    assert clicked("(60, 35)", row=row)[1] == 1.0
    for bad in (SCREEN | {"target": "there"}, {"images": SCREEN["images"]}, {"target": target}):
        with pytest.raises(ValueError):
            Click().reset(bad)
