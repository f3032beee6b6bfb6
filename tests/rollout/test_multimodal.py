"""Multimodal batches: every prompt keeps its own media, ids equal the processor's, nothing is repaired."""

import numpy as np
import pytest
import torch
from stock_families import PLAIN, STOCK
from tiny_models import BOS, IMAGE, VIDEO, begin_with_bos, clip, picture, turn

from lightrft_visual.data.media import Video
from lightrft_visual.errors import ConfigError, DataError
from lightrft_visual.experience.rollouts import PromptBatch
from lightrft_visual.models.tiny.vlm import build_processor, build_tokenizer
from lightrft_visual.rollout import multimodal
from lightrft_visual.rollout.multimodal import MultimodalDataProcessor

KEYS = {
    "all_prompt_token_ids", "all_prompts", "all_images", "all_videos", "all_images_num", "all_videos_num",
    "all_images_pixel_values", "all_videos_pixel_values", "all_images_grid_thw", "all_videos_grid_thw",
    "all_references",
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def data(request, tokenizer):
    return MultimodalDataProcessor(tokenizer, build_processor(request.param, tokenizer), 512)


TEXT = [{"type": "text", "text": "which shape is it?"}]
MIXED = [
    (turn("what is 1 plus 2?"), None),
    (turn(IMAGE + "what colour is it?"), [picture(0)]),
    (turn(f"first {IMAGE} second {IMAGE} which one?"), [picture(1, 90, 70), picture(2, 60, 120)]),
    (turn("where?"), None),
    (turn("which shape is it?" + IMAGE), [picture(3, 120, 64)]),
]


def test_every_prompt_keeps_its_own_media_and_equals_processing_alone(data):
    prompts, images = [prompt for prompt, _ in MIXED], [images for _, images in MIXED]
    got = data.process_multimodal_batch(prompts, images, list("abcde"), [0, 1, 2, 0, 1], 3, None, None)
    assert KEYS <= set(got)
    assert all(len(got[key]) == 15 for key in got)
    for index, (prompt, own) in enumerate(MIXED):
        alone = data.processor(text=[prompt], images=own)
        for place in range(3 * index, 3 * index + 3):
            assert got.all_prompts[place] == prompt
            assert got.all_references[place] == "abcde"[index]
            assert got.all_prompt_token_ids[place] == alone["input_ids"][0]
            assert got.all_images_num[place] == len(own or [])
            assert got.all_videos[place] is got.all_videos_pixel_values[place] is None
            if own is None:
                assert got.all_images[place] is got.all_images_pixel_values[place] is None
                assert got.all_images_grid_thw[place] is None
                continue
            assert [image.tobytes() for image in got.all_images[place]] == [image.tobytes() for image in own]
            assert torch.equal(got.all_images_grid_thw[place], torch.as_tensor(alone["image_grid_thw"]))
            pixels, first = got.all_images_pixel_values, 3 * index
            torch.testing.assert_close(pixels[place], alone["pixel_values"], rtol=0, atol=1e-6)
            assert pixels[place] is pixels[first] and got.all_images[place] is got.all_images[first]
            assert pixels[place].untyped_storage().nbytes() == pixels[place].nbytes  # prompts share no storage


@pytest.mark.parametrize("in_template", [True, False])
@pytest.mark.parametrize("name", [*STOCK, *PLAIN])
def test_ids_of_rendered_prompts_are_those_of_the_processors_own_chat_template(name, in_template):
    processor = (STOCK | PLAIN)[name]()[1]
    begin_with_bos(processor, in_template)
    pictures = [[], [picture(0, 90, 60)], [picture(1, 40, 130), picture(2, 64, 64)]]
    if name == "llava_onevision":
        pictures.pop()  # its own call gives several images of a prompt fewer tokens each
    chats = [
        [{"role": "user", "content": [*({"type": "image", "image": each} for each in own), *TEXT]}] for own in pictures
    ]
    texts = [processor.apply_chat_template(each, add_generation_prompt=True) for each in chats]
    found = MultimodalDataProcessor(processor.tokenizer, processor, 2048).process_multimodal_batch(texts, pictures)
    for ids, chat in zip(found.all_prompt_token_ids, chats, strict=True):
        own = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert ids == own["input_ids"][0].tolist() and {*map(type, ids)} == {int}
        assert ids.count(processor.tokenizer.bos_token_id) == 1 or not in_template


@pytest.mark.parametrize("sees", [True, False])
def test_only_a_text_that_begins_with_the_first_token_is_not_given_another(sees):
    tokenizer = build_tokenizer()
    processor = build_processor("qwen2_5_vl", tokenizer) if sees else None
    begin_with_bos(tokenizer)
    texts = [BOS + turn("where?"), turn("where?"), turn("what is it?")]
    first, *others = MultimodalDataProcessor(tokenizer, processor, 512).process_multimodal_batch(texts)[
        "all_prompt_token_ids"
    ]
    assert first == others[0] == tokenizer(texts[0], add_special_tokens=False)["input_ids"]
    assert others[1] == tokenizer(texts[2])["input_ids"]


@pytest.mark.parametrize("in_template", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_a_text_that_a_tokenizers_template_rendered_gets_no_special_token_besides(named, in_template):
    tokenizer = build_tokenizer()
    begin_with_bos(tokenizer, in_template)
    if not named:
        tokenizer.bos_token = None
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", BOS)
    messages = [{"role": "user", "content": "where?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    data = MultimodalDataProcessor(tokenizer, None, 512)
    (rendered,) = data.features(PromptBatch.of([text], messages=[messages]))
    assert (
        rendered.token_ids
        == data.unexpanded(rendered)
        == data.difference(text, [], [], "reset", whole=True).token_ids
        == own
    )
    (raw,) = data.features(PromptBatch.of(["where?"], messages=[None]))
    assert raw.token_ids == tokenizer("where?")["input_ids"]


def test_many_media_go_through_the_processor_in_parts_and_come_out_the_same(data, monkeypatch):
    prompts, images = [p for p, _ in MIXED], [i for _, i in MIXED]
    videos = [None, None, None, None, clip(5)]
    prompts[4], images[4] = turn("which?" + VIDEO), None
    whole = data.process_multimodal_batch(prompts, images, all_videos=videos, n_samples_per_prompt=2)
    calls = []
    original = data.processor.__class__.__call__

    def counted(self, *args, **kwargs):
        calls.append(len(kwargs["text"]))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(data.processor.__class__, "__call__", counted)
    monkeypatch.setattr(multimodal, "_PIXELS_AT_ONCE", 90 * 70 + 60 * 120)  # what the largest prompt has
    parts = data.process_multimodal_batch(prompts, images, all_videos=videos, n_samples_per_prompt=2)
    assert calls == [2, 2, 1]  # once for all samples of a prompt
    assert parts.all_prompt_token_ids == whole.all_prompt_token_ids
    for name in KEYS:
        if "pixel_values" in name or "grid_thw" in name:
            for mine, other in zip(parts[name], whole[name], strict=True):
                assert (mine is None and other is None) or torch.equal(mine, other)


def test_videos_mix_with_images_and_text(data):
    prompts = [turn("where?"), turn(VIDEO + "how many?"), turn(IMAGE + VIDEO), turn(VIDEO + VIDEO)]
    videos = [None, clip(0), [clip(10, 6)], [clip(20), clip(30, 3)]]
    got = data.process_multimodal_batch(prompts, [None, None, picture(1), None], None, None, 2, videos, [0, 1, 1, 2])
    assert got.all_videos_num[::2] == [0, 1, 1, 2]
    assert got.all_videos[0] is got.all_videos_pixel_values[0] is got.all_videos_grid_thw[0] is None
    assert [grid[:, 0].tolist() for grid in got.all_videos_grid_thw[2::2]] == [[2], [3], [2, 2]]
    for place in (2, 4, 6):
        patches = got.all_videos_grid_thw[place].prod(dim=1).sum()
        assert got.all_videos_pixel_values[place].shape[0] == patches
        pads = got.all_prompt_token_ids[place].count(data.processor.video_token_id)
        assert pads == patches // 4
        assert all(isinstance(video, Video) for video in got.all_videos[place])
    assert got.all_images_num[::2] == [0, 0, 1, 0]


@pytest.mark.parametrize(("family", "seconds"), [("qwen2_5_vl", [1.0]), ("qwen2_vl", None)])
def test_only_models_that_place_frames_in_time_get_seconds(tokenizer, family, seconds):
    data = MultimodalDataProcessor(tokenizer, build_processor(family, tokenizer), 512)
    (found,) = data.process_multimodal_batch([turn(VIDEO)], all_videos=[clip(0)]).all_videos_second_per_grid_ts
    assert (None if found is None else found.tolist()) == seconds


@pytest.mark.parametrize(
    ("prompts", "images", "counts", "message"),
    [
        ([turn("x"), turn("y")], [None, picture(0)], None, "prompt 1: .* 0 image placeholder.* but 1 image"),
        ([turn(IMAGE * 2)], [[picture(0)]], None, "prompt 0: .* 2 image placeholder.* but 1 image"),
        ([turn(VIDEO)], None, None, "prompt 0: .* 1 video placeholder.* but 0 video"),
        ([turn(IMAGE)], [picture(0)], [2], "prompt 0: 1 image.* images_num says 2"),
        ([turn(IMAGE)], [picture(0), None], None, "all_images has 2 entries for 1 prompts"),
        ([turn("x"), turn(IMAGE)], [None, "/no/such.png"], None, "prompt 1: file not found: /no/such.png"),
        ([turn("x"), turn(IMAGE)], [None, picture(0, 1000, 2)], None, "prompt 1: image .*1000x2 pixels: one side"),
        ([turn("x"), turn("where? " * 600)], None, None, "prompt 1 has .* above prompt_max_len = 512"),
        ([turn(IMAGE)], [[None]], None, "prompt 0: image 0 of 1 is empty"),
        ([turn(IMAGE)], ["http://localhost/a.png"], None, "prompt 0: .*allow_remote"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_prompt(data, prompts, images, counts, message):
    with pytest.raises(DataError, match=message):
        data.process_multimodal_batch(prompts, images, images_num=counts)


def test_an_image_that_the_processor_refuses_is_named_by_its_prompt(tokenizer, monkeypatch):
    processor = build_processor("qwen2_5_vl", tokenizer)
    call = type(processor).__call__

    def refusing(self, **arguments):
        if any(image.width == 84 for image in arguments.get("images", [])):
            raise ValueError("no such width")
        return call(self, **arguments)

    monkeypatch.setattr(type(processor), "__call__", refusing)
    data = MultimodalDataProcessor(tokenizer, processor, 512)
    with pytest.raises(DataError, match="prompt 1: the processor refuses it .*84x56.*no such width"):
        data.process_multimodal_batch([turn(IMAGE)] * 3, [picture(0), picture(1, 84), picture(2)])


def test_the_length_limit_counts_expanded_images(tokenizer):
    data = MultimodalDataProcessor(tokenizer, build_processor("qwen2_5_vl", tokenizer), 512)
    prompt, image = turn(IMAGE), picture(0, 140, 140)
    length = len(data.process_multimodal_batch([prompt], [image]).all_prompt_token_ids[0])
    assert length == len(tokenizer(prompt)["input_ids"]) + 24
    data.prompt_max_len = length
    data.process_multimodal_batch([prompt], [image])
    data.prompt_max_len = length - 1
    with pytest.raises(DataError, match=f"prompt 0 has {length} tokens"):
        data.process_multimodal_batch([prompt], [image])


def test_text_only_models_need_no_processor(tokenizer):
    data = MultimodalDataProcessor(tokenizer, None, 64)
    got = data.process_multimodal_batch([turn("where?"), turn("how many?")], n_samples_per_prompt=2)
    assert got.all_prompt_token_ids[2] == tokenizer(turn("how many?"))["input_ids"]
    assert got.all_images == got.all_images_pixel_values == got.all_references == [None] * 4
    with pytest.raises(DataError, match="prompt 0: 1 image.*takes no images"):
        data.process_multimodal_batch([turn("where?")], [picture(0)])


def test_processors_with_inputs_that_are_not_carried_are_refused(tokenizer, monkeypatch):
    data = MultimodalDataProcessor(tokenizer, build_processor("qwen2_vl", tokenizer), 512)
    original = type(data.processor).__call__

    def with_extra(self, *args, **kwargs):
        return {**original(self, *args, **kwargs), "image_sizes": [[1, 1]]}

    monkeypatch.setattr(type(data.processor), "__call__", with_extra)
    with pytest.raises(ConfigError, match="image_sizes"):
        data.process_multimodal_batch([turn(IMAGE)], [picture(0)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"all_prompts": ["hi", None]}, "prompts are given as a list of texts"),
        ({"all_prompts": ["hi", ""]}, "prompt 1 is empty"),
        ({"all_prompts": ["hi"], "all_images": picture(1)}, "all_images is a Image: give a list with one entry"),
        ({"all_prompts": ["hi"], "all_references": {"hi": 1}}, "all_references is a dict: give a list with one entry"),
        ({"all_prompts": ["hi"], "n_samples_per_prompt": 0}, "n_samples_per_prompt is 0, it must be at least 1"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused(tokenizer, arguments, message):
    with pytest.raises(DataError, match=message):
        MultimodalDataProcessor(tokenizer, None, 64).process_multimodal_batch(**arguments)


def test_columns_of_a_batch_have_an_entry_for_each_prompt():
    with pytest.raises(DataError, match="prompts are given as a list of texts"):
        PromptBatch.of("hi")  # each letter would be a prompt
    for name, column in (("references", "cd"), ("labels", {"a": 1, "b": 2}), ("images", picture(1))):
        with pytest.raises(DataError, match=f"{name} is a .*: give a list with one entry for each prompt"):
            PromptBatch.of(["a", "b"], **{name: column})
    stacked = np.zeros((2, 8, 8, 3), np.uint8)
    assert [each[0].shape for each in PromptBatch.of(["a", "b"], images=stacked).images] == [(8, 8, 3)] * 2


def test_cells_of_a_batch_hold_what_the_processor_reads_in_them(data):
    several = np.empty(2, dtype=object)
    several[:] = [picture(1), picture(2)]
    cells, prompts = ["", None, several, picture(3)], [turn(f"{IMAGE * n}what?") for n in (0, 0, 2, 1)]
    read = data.process_multimodal_batch(prompts, cells, None, None, 1)
    batch = PromptBatch.of(prompts, images=cells)
    assert read.all_images_num == [len(own) for own in batch.images] == [0, 0, 2, 1]
    assert [len(own.images) for own in data.features(batch)] == read.all_images_num


def test_no_prompts_give_empty_columns_and_references_come_back_as_they_are(data):
    made = data.process_multimodal_batch([], [], [], None, 2, None, None)
    assert KEYS <= set(made) and all(column == [] for column in made.values())
    made = data.process_multimodal_batch(["one", "two"], None, [{1: "a"}, {"b": 2}], None, 2)
    assert made.all_references == [{1: "a"}] * 2 + [{"b": 2}] * 2
    assert all(type(reference) is dict for reference in made["all_references"])
    video = clip(0)
    assert PromptBatch.of([turn(VIDEO)], videos=[video]).videos == [[video]]
