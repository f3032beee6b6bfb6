"""GenEval's rules on their own cases and on scenes of a stub detector; the real detector tiny."""

import numpy as np
import pytest
import torch
from PIL import Image

from lightrft_visual.rewards.functions.geneval import (
    COLOURS,
    RENAMED,
    GenEval,
    cut_out,
    kept,
    overlap,
    relations,
    verdict,
)
from lightrft_visual.rewards.functions.mask_detector import Found, MaskDetector
from lightrft_visual.runtime.offload import on_device


def at(x, y, name="cat", score=0.95, size=20.0):
    """A square object about a centre."""
    return Found(name, (x - size / 2, y - size / 2, x + size / 2, y + size / 2), score)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (0, 0, set()),
        (-3, 0, set()),  # within a tenth of both sizes: 4
        (-60, 0, {"left of"}),
        (0, -60, {"above"}),
        (50, 50, {"right of", "below"}),  # (50 - 4) / 70.7 on each axis
        (-60, 36, {"left of"}),  # 32 / 70 of the distance is less than half
    ],
)
def test_positions_by_hand(x, y, expected):
    assert relations(at(x, y), at(0, 0)) == expected


def test_pascals_names_of_published_checkpoints_are_those_that_prompts_ask_for():
    """As coco-detection-mmdet-id2label.json has them."""
    pascal = ("motorbike", "aeroplane", "sofa", "pottedplant", "diningtable", "tvmonitor")
    asked = ["motorcycle", "airplane", "couch", "potted plant", "dining table", "tv"]
    assert [RENAMED[name] for name in pascal] == asked


def test_overlap_counts_the_last_pixels():
    one, other = Found("a", (0, 0, 9, 9), 1.0), Found("a", (5, 0, 14, 9), 1.0)
    assert overlap(one, other) == pytest.approx(50 / 150) and overlap(one, one) == 1


def test_thresholds_and_the_order_of_objects():
    found = [at(0, 0, score=0.5), at(90, 0, score=0.9), at(91, 0, score=0.8), at(0, 90, "dog", score=0.3)]
    assert [each.score for each in kept(found, 0.3)["cat"]] == [0.9, 0.8, 0.5] and "dog" not in kept(found, 0.3)
    assert [each.score for each in kept(found, 0.3, most=1)["cat"]] == [0.9]
    assert [each.score for each in kept(found, 0.3, most_overlap=0.5)["cat"]] == [0.9, 0.5]
    assert kept(found, 0.9) == {}  # above, not at it


def cats(count, **more):
    return {"class": "cat", "count": count, **more}


BELOW = {"class": "dog", "count": 1, "position": ["below", 0]}
INCLUDED = [
    ([cats(2)], True),
    ([cats(1, color="red")], True),
    ([cats(1, color="blue")], False),  # the surest one alone is looked at
    ([cats(1), BELOW], True),
    ([cats(2), BELOW], False),
    ([{"class": "cow", "count": 1}, BELOW], False),
]


@pytest.mark.parametrize(
    ("row", "right"),
    [
        *(({"include": included}, right) for included, right in INCLUDED),
        ({"include": [cats(2)], "exclude": [cats(3)]}, True),
        ({"include": [cats(1)], "exclude": [cats(2)]}, False),
        ({"exclude": [{"class": "cow", "count": 1}]}, True),
    ],
)
def test_rules_by_hand(row, right):
    """A red cat above a dog, and a less sure blue cat far to its left."""
    objects = kept([at(0, 0, score=0.9), at(-300, 60, score=0.8), at(0, 60, "dog")], 0.3)
    tell = {0.9: "red", 0.8: "blue", 0.95: "brown"}
    assert verdict(None, objects, row, lambda image, own: [tell[each.score] for each in own]) == right


# -- scenes ----------------------------------------------------------------------------------------------------------


SURE = [("cat", "red", 5 + 45 * number, 60, 0.95) for number in range(3)]
UNSURE = ("cat", "blue", 5, 180, 0.85)  # too unsure where objects are counted
LEFT, RIGHT = ("cat", "red", 20, 100, 0.6), ("dog", "green", 160, 100, 0.6)
DOG = {"class": "dog", "count": 1}
SCENES = [  # tag, row, objects, verdict
    ("single_object", {"include": [cats(1)]}, [LEFT], 1.0),
    ("single_object", {"include": [cats(1)]}, [RIGHT], 0.0),
    ("two_object", {"include": [cats(1), DOG]}, [LEFT, (*RIGHT[:4], 0.2)], 0.0),
    ("counting", {"include": [cats(3)], "exclude": [cats(4)]}, [*SURE, UNSURE], 1.0),
    ("counting", {"include": [cats(4)], "exclude": [cats(5)]}, [*SURE, UNSURE], 0.0),
    ("colors", {"include": [cats(1, color="red")]}, [LEFT, (*UNSURE[:4], 0.5)], 1.0),
    ("color_attr", {"include": [cats(1, color="green"), DOG | {"color": "red"}]}, [LEFT, RIGHT], 0.0),
    ("color_attr", {"include": [cats(1, color="red"), DOG | {"color": "green"}]}, [LEFT, RIGHT], 1.0),
    ("position", {"include": [cats(1), DOG | {"position": ["right of", 0]}]}, [LEFT, RIGHT], 1.0),
    ("position", {"include": [cats(1), DOG | {"position": ["left of", 0]}]}, [LEFT, RIGHT], 0.0),
]


def test_scenes_of_each_kind_have_the_published_verdicts():
    """A stub detector and stub colours, which know each scene by the shade of its image."""
    scorer = GenEval.__new__(GenEval)
    scorer.threshold, scorer.counting_threshold, scorer.position_threshold = 0.3, 0.9, 0.1
    scorer.max_objects, scorer.max_overlap, scorer._models = 16, 1.0, ()
    images = [[Image.new("RGB", (240, 240), (shade, 0, 0))] for shade in range(len(SCENES))]

    def objects_of(image):
        for name, colour, x, y, score in SCENES[image.getpixel((0, 0))[0]][2]:
            yield colour, Found(name, (x, y, x + 40.0, y + 40.0), score)

    scorer.names = ("cat", "dog")
    scorer.detector = lambda image, device: [found for _, found in objects_of(image)]
    scorer.colours = lambda image, asked, device: [
        c for each in asked for c, found in objects_of(image) if found == each
    ]
    rows = [row | {"tag": tag} for tag, row, _, _ in SCENES]
    wanted = [verdict for *_, verdict in SCENES]
    assert scorer(images, rows, "cpu") == wanted
    parquet = [  # whose rows have all columns
        {"exclude": None, **row, "include": [{"color": None, "position": None, **each} for each in row["include"]]}
        for row in rows
    ]
    assert scorer(images, parquet, "cpu") == wanted
    both = [images[0][0], images[1][0]]
    assert scorer([both, [], both], [rows[0], rows[0], {"tag": "x"}], "cpu")[1:] == [None, None]


# -- the models ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory):
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessor,
        SwinConfig,
    )

    folder = tmp_path_factory.mktemp("detector")
    stages = ["stage1", "stage2", "stage3", "stage4"]
    backbone = SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1] * 4, num_heads=[1] * 4, window_size=4, out_features=stages
    )
    size = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16}
    layers = {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 16}
    torch.manual_seed(0)
    config = Mask2FormerConfig(
        backbone_config=backbone, num_queries=6, id2label={0: "cat", 1: "mouse", 2: "dog"}, **size, **layers
    )
    Mask2FormerForUniversalSegmentation(config).eval().save_pretrained(folder)
    Mask2FormerImageProcessor(size={"height": 64, "width": 64}).save_pretrained(folder)
    return str(folder)


def test_the_detector_scores_a_class_times_its_mask(detector_folder):
    image = Image.effect_noise((90, 70), 80).convert("RGB")
    detector = MaskDetector(detector_folder, "geneval", {"mouse": "computer mouse"})
    found = detector(image, "cpu")
    with torch.no_grad():
        output = detector.model(**detector._processor(images=image, return_tensors="pt"))
    chances = output.class_queries_logits[0].softmax(-1)
    masks = torch.nn.functional.interpolate(output.masks_queries_logits, (70, 90), mode="bilinear")[0]
    expected = []
    for query, mask in enumerate(masks):
        for label, name in enumerate(("cat", "computer mouse", "dog")):
            if (mask > 0).any():
                where = np.argwhere((mask > 0).numpy())
                (top, left), (bottom, right) = where.min(axis=0), where.max(axis=0) + 1
                sure = mask.sigmoid()[mask > 0].mean()
                expected.append((name, (left, top, right, bottom), float(chances[query, label] * sure)))
    assert len(found) == len(expected) > 3
    for one, other in zip(sorted(found, key=lambda e: e.score), sorted(expected, key=lambda e: e[2])):
        assert one.name == other[0] and one.box == other[1] and one.score == pytest.approx(other[2], abs=1e-5)
        assert one.mask.shape == (70, 90)


def test_colours_are_those_of_the_nearest_mean_sentence(detector_folder, clip_folder):
    from lightrft_visual.rewards.functions.geneval import TEMPLATES

    scorer, image = GenEval(detector_folder, clip_folder), Image.new("RGB", (80, 60), "red")
    mask = np.zeros((60, 80), dtype=bool)
    mask[10:30, 10:40] = True
    found = Found("cat", (10.0, 10.0, 40.0, 30.0), 0.9, mask)
    assert scorer.colours(image, [], "cpu") == []
    means = []
    for colour in COLOURS:
        texts = [each.format(colour=colour, name="cat") for each in TEMPLATES]
        seen, said = scorer._clip.embed([cut_out(image, found)] * 3, texts, "cpu")
        means.append(float(torch.nn.functional.normalize(said.mean(0), dim=-1) @ seen[0]))
    assert scorer.colours(image, [found, found], "cpu") == [COLOURS[int(np.argmax(means))]] * 2


def test_models_take_one_turn_on_the_device_for_all_images(monkeypatch, detector_folder, clip_folder):
    scorer, turns = GenEval(detector_folder, clip_folder, threshold=0.0), []

    def noted(module, device, offload):
        turns.extend([type(module).__name__] if offload else [])
        return on_device(module, device, offload)

    for name in ("geneval", "clip", "mask_detector"):
        monkeypatch.setattr(f"lightrft_visual.rewards.functions.{name}.on_device", noted, raising=False)
    images = [[Image.effect_noise((90, 70), 80).convert("RGB")] for _ in range(3)]
    scorer(images, [{"include": [{"class": "cat", "count": 1, "color": "red"}]}] * 3, "cpu")
    assert sorted(turns) == ["CLIPModel", "Mask2FormerForUniversalSegmentation"]


def test_an_object_or_colour_that_no_model_names_is_a_failure_and_not_a_0(detector_folder, clip_folder):
    scorer, image = GenEval(detector_folder, clip_folder), Image.new("RGB", (80, 60), "red")
    cat, hot_dog = {"class": "cat", "count": 1}, {"class": "hot dog", "count": 1}
    rows = [{"include": [cat]}, {"include": [cat, hot_dog]}, {"include": [cat], "exclude": [hot_dog]}]
    found = scorer([[image]] * 4, [*rows, {"include": [cat | {"color": "grey"}]}], "cpu")
    assert found[0] == 0 and [str(each.reason) for each in found[1:]] == [
        *["geneval: the detector finds no hot dog"] * 2,
        "geneval: no colour that it tells apart is grey",
    ]


def test_what_lies_around_an_object_is_grey():
    image, mask = Image.new("RGB", (20, 20), "red"), np.zeros((20, 20), dtype=bool)
    mask[5:10, 5:10] = True
    cut = cut_out(image, Found("cat", (3.0, 3.0, 12.0, 12.0), 1.0, mask))
    assert cut.size == (9, 9) and cut.getpixel((0, 0)) == (153, 153, 153) and cut.getpixel((4, 4)) == (255, 0, 0)
    assert cut_out(image, Found("cat", (0, 0, 4, 4), 1.0)).getpixel((0, 0)) == (255, 0, 0)
