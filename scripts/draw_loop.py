"""Draw docs/images/loop.svg, the loop on one picture: python scripts/draw_loop.py. A test compares."""

from html import escape
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "docs" / "images" / "loop.svg"
WIDTH, HEIGHT, BOX, TALL = 960, 250, 150, 74
LEFT, STEP, TOP, LOW = 24, 191, 28, 152
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
# Title and what it is, along the top from left to right, then along the bottom from right to left.
UPPER = (
    ("prompts", "text, images, videos"),
    ("rollouts", "vLLM or diffusers"),
    ("rewards", "functions, servers"),
    ("experience", "log-probs, advantages"),
    ("replay buffer", "padded or packed"),
)
LOWER = (("updates", "DeepSpeed ZeRO"), ("weight sync", "then compared"))
COLORS = ("#4269d0", "#e0711c", "#3ca951", "#8a56e2", "#2a9d9d", "#c2407a", "#b8860b")


def box(x: int, y: int, color: str, title: str, about: str) -> str:
    """A box with two lines of text."""
    middle = x + BOX / 2
    return (
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{TALL}" rx="9" fill="#fff" stroke="{color}" stroke-width="2"/>\n'
        f'<text x="{middle:g}" y="{y + 31}" font-size="16" font-weight="600" fill="{color}">{escape(title)}</text>\n'
        f'<text x="{middle:g}" y="{y + 53}" font-size="11.5" fill="#4a4744">{escape(about)}</text>\n'
    )


def arrow(path: str) -> str:
    """A line with a head at its end."""
    return f'<path d="{path}" fill="none" stroke="#8d8883" stroke-width="2" marker-end="url(#head)"/>\n'


def svg() -> str:
    """The picture."""
    places = [LEFT + STEP * index for index in range(len(UPPER))]
    lower = [places[4], places[1]]
    parts = [box(x, TOP, color, *each) for x, color, each in zip(places, COLORS, UPPER)]
    parts += [box(x, LOW, color, *each) for x, color, each in zip(lower, COLORS[5:], LOWER)]
    middle = TOP + TALL // 2
    parts += [arrow(f"M{x + BOX + 3} {middle}H{x + STEP - 6}") for x in places[:-1]]
    down, up = places[4] + BOX // 2, places[1] + BOX // 2
    parts.append(arrow(f"M{down} {TOP + TALL + 3}V{LOW - 6}"))
    parts.append(arrow(f"M{lower[0] - 3} {LOW + TALL // 2}H{lower[1] + BOX + 6}"))
    parts.append(arrow(f"M{up} {LOW - 3}V{TOP + TALL + 6}"))
    label = (lower[0] + lower[1] + BOX) // 2
    parts.append(f'<text x="{label}" y="{LOW + TALL // 2 - 9}" font-size="12" fill="#4a4744">new policy</text>\n')
    head = '<marker id="head" markerWidth="9" markerHeight="9" refX="5" refY="4" orient="auto"><path d="M0 0L7 4L0 8z" fill="#8d8883"/></marker>'  # noqa: E501
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="{FONT}" '
        f'text-anchor="middle">\n<title>The loop: prompts, rollouts, rewards, experience, replay buffer, updates, '
        f'weight sync</title>\n<defs>{head}</defs>\n<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#faf8f5"/>\n'
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    FILE.write_text(svg())
    print(FILE)
