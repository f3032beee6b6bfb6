"""Samples for the replay tests: hand-made ones, and hypothesis strategies for any mix."""

import torch
from hypothesis import strategies as st
from PIL import Image

from lightrft_visual.experience.items import BufferItem, BufferItemDiffusion, BufferItemVL

PATCH_DIM = 3


def text_item(length: int = 5, actions: int = 2, **fields) -> BufferItem:
    """A text sample without padding, with distinct numbers in each field."""
    shifts = {"action_log_probs": -1.5, "base_action_log_probs": -2.5, "values": 0.25, "returns": 0.5,
              "advantages": 0.75}  # fmt: skip
    values = {name: torch.arange(actions, dtype=torch.float32) + shift for name, shift in shifts.items()} | {
        "sequences": torch.arange(1, length + 1),
        "attention_mask": torch.ones(length, dtype=torch.long),
        "action_mask": torch.ones(actions, dtype=torch.bool),
        "info": {"reward": 0.1 * length},
    }
    return BufferItem(**values | fields)


def vision_item(images: int = 1, videos: int = 0, length: int = 5, actions: int = 2, **fields) -> BufferItemVL:
    """A vision-language sample; its n-th image has 2 * (n + 1) patches that name their sample by `length`."""
    inputs = vars(text_item(length, actions))
    kinds = (images, "pixel_values", "image_grid_thws"), (videos, "pixel_values_videos", "video_grid_thws")
    for count, pixels, grids in kinds:
        if count:
            inputs[grids] = torch.tensor([[1, 2, index + 1] for index in range(count)])
            patches = int(inputs[grids].prod(-1).sum())
            inputs[pixels] = torch.arange(patches * PATCH_DIM).reshape(patches, PATCH_DIM) + 1000.0 * length
    return BufferItemVL(**inputs | fields)


def diffusion_item(steps: int = 3, seed: int = 0, **fields) -> BufferItemDiffusion:
    draw = torch.Generator().manual_seed(seed)
    drawn = {"latents": (steps + 1, 2, 4, 4), "log_probs": (steps,), "advantages": ()}
    values = {name: torch.randn(shape, generator=draw) for name, shape in drawn.items()} | {
        "timesteps": torch.linspace(1000, 0, steps),
        "prompt_embeds": {"text": torch.randn(6, 8, generator=draw), "pooled": torch.randn(8, generator=draw)},
        "info": {"reward": float(seed)},
    }
    return BufferItemDiffusion(**values | fields)


def _floats(size: int) -> st.SearchStrategy[torch.Tensor]:
    number = st.floats(width=32, allow_nan=True, allow_infinity=True)
    return st.lists(number, min_size=size, max_size=size).map(lambda xs: torch.tensor(xs, dtype=torch.float32))


def _tensors(least: int, most: int, size: int | None = None) -> st.SearchStrategy[torch.Tensor]:
    """Whole numbers: one, or `size` of them."""
    number = st.integers(least, most)
    return (number if size is None else st.lists(number, min_size=size, max_size=size)).map(torch.tensor)


def _optional(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


_scalars = st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.none()
_leaves = _scalars | st.lists(_scalars, max_size=3) | _floats(1) | _floats(2) | st.floats(width=32).map(torch.tensor)
infos = _optional(
    st.dictionaries(
        st.sampled_from(["reward", "kind", "tokens", "metrics"]),
        _leaves | st.dictionaries(st.sampled_from(["a", "b"]), _leaves, max_size=2),
        max_size=3,
    )
)


@st.composite
def _text_fields(draw) -> dict:
    actions = draw(st.integers(1, 4))
    length = actions + draw(st.integers(0, 4))
    numbers, per_action = _optional(_floats(actions) | _floats(1)), _optional(_floats(actions))
    names = ("action_log_probs", "base_action_log_probs", "action_entropy", "rollout_log_probs", "kl")
    fields = {name: draw(per_action) for name in names}
    if all(value is None for value in fields.values()):
        fields["action_log_probs"] = draw(_floats(actions))
    fields |= {name: draw(numbers) for name in ("values", "returns", "advantages")}
    fields |= {name: draw(_optional(_tensors(0, 5))) for name in ("group_id", "sample_id", "policy_version")}
    masks = {"valid": None, "attention_mask": length, "action_mask": actions}
    fields |= {name: draw(_optional(_tensors(0, 1, size))) for name, size in masks.items()}
    for name in ("valid", "action_mask"):
        fields[name] = fields[name] if fields[name] is None else fields[name].bool()
    return fields | {"sequences": draw(_tensors(0, 9, length)), "info": draw(infos)}


@st.composite
def _vision_inputs(draw, pixels: str, grids: str, counts: str) -> dict:
    edges = draw(st.lists(st.tuples(*[st.integers(1, 2)] * 3), max_size=3))
    if not edges and draw(st.booleans()):
        return {}
    grid = torch.tensor(edges, dtype=torch.long).reshape(-1, 3)
    patches = int(grid.prod(-1).sum()) if edges else 0
    rows = torch.arange(patches * PATCH_DIM, dtype=torch.float32).reshape(-1, PATCH_DIM) + draw(st.integers(0, 99))
    fields = {pixels: rows, grids: grid}
    if draw(st.booleans()):
        fields[counts] = torch.tensor(len(edges))
    return fields


@st.composite
def text_items(draw) -> BufferItem:
    return BufferItem(**draw(_text_fields()))


@st.composite
def vision_items(draw) -> BufferItemVL:
    fields = draw(_text_fields())
    fields |= draw(_vision_inputs("pixel_values", "image_grid_thws", "image_counts"))
    fields |= draw(_vision_inputs("pixel_values_videos", "video_grid_thws", "video_counts"))
    if "video_grid_thws" in fields and draw(st.booleans()):
        fields["video_seconds_per_grid"] = draw(_floats(len(fields["video_grid_thws"])))
    images = st.integers(0, 255).map(lambda shade: Image.new("RGB", (2, 2), (shade, 0, 0)))
    grids = fields.get("image_grid_thws")
    sizes = {"max_size": 2} if grids is None else {"min_size": len(grids), "max_size": len(grids)}
    fields["raw_images"] = draw(_optional(st.lists(images, **sizes)))
    return BufferItemVL(**fields)


@st.composite
def diffusion_items(draw) -> BufferItemDiffusion:
    seed = draw(st.integers(0, 99))
    extras = {"sigmas": _floats(4), "advantages": _floats(3), "group_id": st.integers(0, 9).map(torch.tensor)}
    fields = {name: draw(_optional(values)) for name, values in extras.items()}
    return diffusion_item(seed=seed, **fields, info=draw(infos))


mixed_items = st.lists(text_items() | vision_items(), min_size=1, max_size=5)
