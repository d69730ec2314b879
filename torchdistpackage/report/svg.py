"""Parts of an SVG picture: text, boxes, and colours for kinds and amounts."""

import colorsys
from collections.abc import Iterable, Sequence
from html import escape as html_escape

from torchdistpackage.bounded import printable

_GOLDEN = 0.618034
"""Step between hues: multiples of the golden angle stay distinct, however many are used."""
_SCALE = ((165, 15, 21), (252, 174, 97), (255, 255, 191), (116, 173, 209), (49, 54, 149))
"""Colours from least to most that people who cannot see red and green can tell apart."""


def escape(words: str) -> str:
    """Return text for a page or picture, with markup and invisible characters escaped."""
    return html_escape(printable(words))


def document(width: float, height: float, parts: Iterable[str]) -> str:
    """Return a picture on a white background."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">'
        '<rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, *, anchor: str = "start", fill: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'


def box(
    x: float, y: float, size: tuple[float, float], fill: str, tooltip: str, **data: object
) -> str:
    """Return a filled rectangle. tooltip: shown under the pointer. data: data-* attributes."""
    more = "".join(f' data-{key}="{escape(str(value))}"' for key, value in data.items())
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{size[0]:g}" height="{size[1]:g}" fill="{fill}" '
        f'stroke="white"{more}><title>{escape(tooltip)}</title></rect>'
    )


def colour_of(index: int) -> str:
    """Return a light colour on which black text is readable; small numbers get different
    colours.
    """
    return _hex([round(255 * x) for x in colorsys.hls_to_rgb(index * _GOLDEN % 1, 0.75, 0.6)])


def colour_between(value: float, least: float, most: float) -> str:
    """Return the colour of an amount on a scale from red, the least, over white to blue."""
    share = 1.0 if most <= least else min(max((value - least) / (most - least), 0.0), 1.0)
    at = share * (len(_SCALE) - 1)
    low = min(int(at), len(_SCALE) - 2)
    ends = zip(_SCALE[low], _SCALE[low + 1], strict=True)
    return _hex([round(a + (b - a) * (at - low)) for a, b in ends])


def ink_on(fill: str) -> str:
    """Return black or white, whichever is readable on a colour."""
    red, green, blue = (int(fill[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "white"


def _hex(parts: Sequence[int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in parts)
