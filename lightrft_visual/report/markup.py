"""HTML that escapes by default: text becomes markup only through `tag`, so no prompt or response can inject any."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

VOID = {"br", "img", "meta", "hr", "line", "rect", "circle", "polyline", "polygon", "path"}


class Markup(str):
    """Text that is already HTML. Only this module and constants of the package make it."""


Child: TypeAlias = "str | int | float | None | Iterable[Child]"


def render(child: Child) -> str:
    """HTML of a child: Markup as it is, other text escaped, None nothing, lists one after the other."""
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str | int | float):
        return html.escape(printable(str(child)))
    return "".join(render(item) for item in child)


def printable(text: str) -> str:
    """Control characters and lone surrogates, which HTML forbids or UTF-8 cannot carry, become U+FFFD."""
    return "".join(
        c if (c >= " " or c in "\n\t") and not "\ud800" <= c <= "\udfff" and c != "\x7f" else "�" for c in text
    )


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """An element. `class_` and `data_x` become class and data-x; None and False attributes are left out."""
    parts = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        parts.append(key if value is True else f'{key}="{html.escape(printable(str(value)), quote=True)}"')
    opening = f"<{' '.join(parts)}>"
    if name in VOID and not children:
        return Markup(opening if name in ("br", "img", "meta", "hr") else opening[:-1] + "/>")
    return Markup(f"{opening}{render(children)}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    return Markup(render(list(children)))


def table(header: Iterable[Child], rows: Iterable[Iterable[Child]], class_: str = "") -> Markup:
    """A table that scrolls sideways inside its own box where it is too wide."""
    head = tag("tr", [cell if is_cell(cell) else tag("th", cell) for cell in header])
    body = [tag("tr", [cell if is_cell(cell) else tag("td", cell) for cell in row]) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", body), class_=class_ or None), class_="scroll")


def is_cell(cell: Child) -> bool:
    return isinstance(cell, Markup) and cell.startswith(("<td", "<th"))
