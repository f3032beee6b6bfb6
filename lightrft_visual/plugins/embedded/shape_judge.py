"""The gold judge of the embedded drawing task: a small classifier of colour and shape, trained on drawings.

It shares nothing with the reward `shape_match` but the names of colours and shapes: no foreground is cut out, no
template is fitted. Half of what it is trained on is no drawing of the task at all (even images, noise, stripes, blobs,
several shapes, other colours), which it learns to call neither: an image that only pleases a reward is no drawing.
"""

import json
import logging
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from ...runtime.files import cache_folder
from .cached import built_once, key_of
from .drawn_shapes import BACKGROUND, COLOURS, PLACES, SHAPES, parse_caption, random_images, shape_masks
from .shape_match import ShapeMatch

logger = logging.getLogger(__name__)
T = torch.Tensor
NEITHER = 1  # one class beside the colours, and one beside the shapes
MEASURED = 1024  # fresh images of each kind that a trained judge is held against


@dataclass(frozen=True)
class JudgeSettings:
    """Everything that decides the judge's weights; the hash of all fields names the cache file."""

    side: int = 32  # pixels; other images are scaled to it
    channels: tuple[int, ...] = (16, 32, 48)
    steps: int = 400
    batch_size: int = 48  # drawings of the task; as many images that are none go with them
    rate: float = 4e-3
    seed: int = 20_011
    revision: int = 1  # raised when the code below changes what it learns
    placed: bool = False  # drawings are at one of the named places or in the middle, and the judge tells where


class ShapeJudge(nn.Module):
    """Images (B, 3, H, W) in 0..1 to log-probs of colours (B, 7), of shapes (B, 5) and, of a judge that knows places,
    of these (B, 5); the last is 'neither'."""

    def __init__(self, settings: JudgeSettings):
        super().__init__()
        self.side, layers, width = settings.side, [], 3
        for channels in settings.channels:
            layers += [nn.Conv2d(width, channels, 3, padding=1, stride=2), nn.BatchNorm2d(channels), nn.ReLU()]
            width = channels
        cells = (settings.side // 2 ** len(settings.channels)) ** 2
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * cells, 96), nn.ReLU())
        self.colour = nn.Linear(96, len(COLOURS) + NEITHER)
        self.shape = nn.Linear(96, len(SHAPES) + NEITHER)
        self.heads = [self.colour, self.shape]
        if settings.placed:
            self.place = nn.Linear(96, len(PLACES) + NEITHER)
            self.heads.append(self.place)

    def forward(self, images: T) -> tuple[T, ...]:
        """Log-probs of images of any size; see the class."""
        if images.shape[-2:] != (self.side, self.side):
            images = F.interpolate(images, (self.side, self.side), mode="bilinear", antialias=True)
        features = self.body(images * 2 - 1)
        return tuple(head(features).log_softmax(-1) for head in self.heads)


def examples(settings: JudgeSettings, generator: torch.Generator) -> tuple[T, list[T]]:
    """A batch: images (2 N, 3, side, side) in 0..1, drawings and then images that are none, and their colours, shapes
    and, for a judge that knows them, places (2 N) each."""
    count, side = settings.batch_size, settings.side
    drawn, labels = _drawings(settings, count, generator)
    drawn = worn(drawn, generator)
    others, *other_labels = no_drawings(count, side, generator)
    others = worn(others, generator)
    other_labels.append(torch.full((count,), len(PLACES)))
    return torch.cat([drawn, others]), [torch.cat(each) for each in zip(labels, other_labels)]


def _drawings(settings: JudgeSettings, count: int, generator: torch.Generator) -> tuple[T, list[T]]:
    """Images (count, 3, side, side) of the task with their colours, shapes and, where they are told, places (count)."""
    colours = torch.randint(len(COLOURS), (count,), generator=generator)
    shapes = torch.randint(len(SHAPES), (count,), generator=generator)
    labels, places = [colours, shapes], None
    if settings.placed:
        told = torch.randint(len(PLACES) + NEITHER, (count,), generator=generator)
        labels.append(told)
        places = torch.where(told < len(PLACES), told, -1)
    return random_images(colours, shapes, settings.side, generator, places=places), labels


def worn(images: T, generator: torch.Generator) -> T:
    """As a model may draw them: softened, a little noisy, in slightly other colours."""
    count = images.shape[0]
    chance = torch.rand(4, count, 1, 1, 1, generator=generator)
    soft = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    images = torch.lerp(images, soft, chance[0])
    images = images + 0.06 * chance[1] * torch.randn(images.shape, generator=generator)
    return (images + 0.05 * torch.randn(count, 3, 1, 1, generator=generator) * chance[2]).clamp(0, 1)


def no_drawings(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    """Images (count, 3, side, side) that miss colour, shape or both, with their labels (count) and (count).

    In equal parts: even ones and slopes; noise of every grain; stripes; patches of a known colour; rounded outlines of
    no shape; two shapes at once; a shape in a colour of no name; a known colour all over the image.

    Args:
        count: of images, those of a part together.
        side: of each, in pixels.
        generator: of all that is drawn.
    """
    kinds = (_even, _noise, _stripes, _patches, _lumps, _two_shapes, _other_ink, _flood)
    parts = [kind(len(part), side, generator) for kind, part in zip(kinds, torch.arange(count).chunk(len(kinds)))]
    return tuple(torch.cat(each) for each in zip(*parts))


def _neither(count: int) -> tuple[T, T]:
    return torch.full((count,), len(COLOURS)), torch.full((count,), len(SHAPES))


def _even(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    corners = torch.rand(count, 3, 2, 2, generator=generator)
    flat = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    corners = torch.where(flat, corners.mean(dim=(2, 3), keepdim=True), corners)
    return F.interpolate(corners, (side, side), mode="bilinear", align_corners=True), *_neither(count)


def _noise(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    grains = (2, 4, 8, 16, side)
    parts = [
        F.interpolate(torch.rand(len(part), 3, grain, grain, generator=generator), (side, side), mode="bilinear")
        for grain, part in zip(grains, torch.arange(count).chunk(len(grains)))
    ]
    return torch.cat(parts), *_neither(count)


def _stripes(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    angle, phase, width = (torch.rand(3, count, 1, 1, generator=generator) * 2 * math.pi).unbind(0)
    grid = torch.arange(side, dtype=torch.float32)
    along = grid * angle.cos() + grid[:, None] * angle.sin()
    share = (0.5 + 0.5 * torch.sin(along * (0.3 + width / 4) + phase))[:, None].round()
    one, two = torch.rand(2, count, 3, 1, 1, generator=generator)
    return share * one + (1 - share) * two, *_neither(count)


def _some_ink(count: int, generator: torch.Generator) -> tuple[T, T]:
    colours = torch.randint(len(COLOURS), (count,), generator=generator)
    return colours, torch.tensor(list(COLOURS.values()))[colours].view(-1, 3, 1, 1)


def _patches(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    """Patches of a known colour without a shape: noise of coarse grain above a level."""
    colours, ink = _some_ink(count, generator)
    noise = F.interpolate(torch.rand(count, 1, 5, 5, generator=generator), (side, side), mode="bicubic")
    return _on_paper(((noise - 0.55) * 12).clamp(0, 1), ink), colours, _neither(count)[1]


def _on_paper(mask: T, ink: T) -> T:
    """Images (B, 3, side, side): ink (B, 3, 1, 1) where mask (B, 1, side, side) in 0..1 is, the ground elsewhere."""
    return mask * ink + (1 - mask) * BACKGROUND


def _places(count: int, generator: torch.Generator) -> tuple[T, T, T]:
    """Areas and centres (count) as drawings have them."""
    uniform = torch.rand(3, count, generator=generator)
    return 0.12 + 0.16 * uniform[0], 0.42 + 0.16 * uniform[1], 0.42 + 0.16 * uniform[2]


def _lumps(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    """An outline whose radius wavers by half, two to five times a turn."""
    colours, ink = _some_ink(count, generator)
    area, x, y = (each.view(-1, 1, 1) for each in _places(count, generator))
    grid = (torch.arange(side) + 0.5) / side
    dx, dy = torch.broadcast_tensors(grid - x, grid[:, None] - y)
    turn, angle = torch.rand(2, count, 4, 1, 1, generator=generator), torch.atan2(dy, dx)[:, None]
    waves = torch.sin(torch.arange(2, 6).view(1, 4, 1, 1) * angle + 2 * math.pi * turn[1]) * turn[0]
    weight = waves.sum(dim=1) / turn[0].square().sum(dim=1).sqrt()
    radius = (area / math.pi).sqrt() * (1 + 0.5 * weight)
    mask = (0.5 + (radius - (dx.square() + dy.square()).sqrt()) * side).clamp(0, 1)[:, None]
    return _on_paper(mask, ink), colours, _neither(count)[1]


def _two_shapes(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    """Two small shapes of different kinds far apart, or the outlines of two kinds laid over each other."""
    colours, ink = _some_ink(count, generator)
    first = torch.randint(len(SHAPES), (count,), generator=generator)
    second = (first + torch.randint(1, len(SHAPES), (count,), generator=generator)) % len(SHAPES)
    apart = 0.24 * (torch.rand(count, generator=generator) < 0.7)
    area = torch.where(apart > 0, 0.07, 0.2)
    masks = [
        shape_masks(area, 0.5 + sign * apart, 0.5 + sign * apart, side)[torch.arange(count), chosen]
        for sign, chosen in ((-1, first), (1, second))
    ]
    return _on_paper((masks[0] - masks[1]).abs()[:, None], ink), colours, _neither(count)[1]


def _other_ink(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    """Shapes in a colour far from every named one."""
    table = torch.tensor(list(COLOURS.values()))
    tries = torch.rand(count, 32, 3, generator=generator)
    near = (tries[:, :, None] - torch.cat([table, torch.full((1, 3), BACKGROUND)])).norm(dim=-1).amin(-1)
    ink = tries[torch.arange(count), near.argmax(1)].view(-1, 3, 1, 1)
    shapes = torch.randint(len(SHAPES), (count,), generator=generator)
    mask = shape_masks(*_places(count, generator), side)[torch.arange(count), shapes][:, None]
    return _on_paper(mask, ink), _neither(count)[0], shapes


def _flood(count: int, side: int, generator: torch.Generator) -> tuple[T, T, T]:
    """A known colour over nearly the whole image: there is a colour, and no shape."""
    colours, ink = _some_ink(count, generator)
    margin = torch.randint(0, side // 8, (count,), generator=generator).view(-1, 1, 1, 1)
    grid = torch.arange(side)
    inside = ((grid >= margin) & (grid < side - margin)).float()
    return _on_paper(inside * inside.transpose(2, 3), ink), colours, _neither(count)[1]


def train_judge(settings: JudgeSettings) -> ShapeJudge:
    """A judge trained from scratch (seconds on two cores); the caller's random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        judge = ShapeJudge(settings)
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=settings.rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=settings.steps)
    with torch.enable_grad():
        for _ in range(settings.steps):
            images, labels = examples(settings, generator)
            loss = sum(F.nll_loss(logs, label) for logs, label in zip(judge(images), labels))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
    return judge.eval().requires_grad_(False)


def _accuracy(judge: ShapeJudge, settings: JudgeSettings) -> dict[str, float]:
    """Shares of fresh images, drawn from another seed than the training's, that the judge names rightly: of drawings
    all that it tells; of others, which are none, the colour, the shape, or neither."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    others, *other_labels = no_drawings(MEASURED, settings.side, generator)
    fresh = {"drawings": _drawings(settings, MEASURED, generator), "others": (others, other_labels)}
    shares = {}
    for name, (images, labels) in fresh.items():
        right = [logs.argmax(-1) == label for logs, label in zip(judge(images), labels)]
        shares[name] = torch.stack(right).all(dim=0).float().mean().item()
    return shares


def kinds_of(judge: ShapeJudge, images: T) -> T:
    """(B): what images (B, 3, H, W) in 0..1 show, as one number for each pair of a colour and a shape, 'neither'
    included."""
    colours, shapes = (each.argmax(-1) for each in judge(images)[:2])
    return colours * (len(SHAPES) + NEITHER) + shapes


def judge_file(settings: JudgeSettings | None = None) -> Path:
    """The judge's weights, beside the embedded models; trained at the first call, its own accuracy said and kept."""
    settings = settings or JudgeSettings()

    def build(path: Path) -> None:
        judge = train_judge(settings)
        accuracy = _accuracy(judge, settings)
        logger.info("  it names %.1f %% of fresh drawings rightly", 100 * accuracy["drawings"])
        save_file(judge.state_dict(), path, {"accuracy": json.dumps(accuracy)})

    told = "training the judge of the embedded drawings once: a quarter of a minute of one core"
    return built_once(cache_folder() / "models" / f"shape-judge-{key_of(asdict(settings))}.safetensors", build, told)


@cache
def embedded_judge(placed: bool = False) -> ShapeJudge:
    """The judge of this process, on the host; placed: the one that knows places too."""
    settings = JudgeSettings(placed=placed)
    judge = ShapeJudge(settings)
    judge.load_state_dict(load_file(judge_file(settings)))
    return judge.eval().requires_grad_(False)


def judge_images(images: T, captions: list[str]) -> dict[str, T]:
    """How sure the judge is that images (B, 3, H, W) in 0..1 show what B captions name.

    Returns float tensors (B) in 0..1: `colour`, `shape`, `both` of them, `place` (1 where the caption names none), and
    `score`, all of it; NaN for a caption that names no known colour and shape. Captions with a place have a judge of
    their own, which knows places too.
    """
    wanted = [parse_caption(caption) for caption in captions]
    named = [(-1, -1, -1) if each is None else (each.colour, each.shape, each.place) for each in wanted]
    found = torch.full((3, len(wanted)), float("nan"))
    for placed in (False, True):
        indices = [at for at, each in enumerate(wanted) if each and (each.place is not None) == placed]
        if indices:
            labels = torch.tensor([named[at][: 3 if placed else 2] for at in indices])
            logs = embedded_judge(placed)(images[indices].float().clamp(0, 1))
            sure = [log.gather(1, label[:, None])[:, 0].exp() for log, label in zip(logs, labels.unbind(1))]
            found[:, indices] = torch.stack([*sure, torch.ones(len(indices))][:3])
    colour, shape, place = found
    return {"score": colour * shape * place, "both": colour * shape, "colour": colour, "shape": shape, "place": place}


class ShapeJudgeScorer(ShapeMatch):
    """The scorer `shape_judge`: all that the caption names unless `part` says otherwise; see `ShapeMatch`.

    For measuring, not for training: a run that is rewarded by its own judge has no independent one left.
    """

    name, parts = "shape_judge", ("score", "both", "colour", "shape", "place")
    measure = staticmethod(judge_images)
