"""Elements of an inline SVG picture, escaped as they are built."""

from collections.abc import Iterable

from markupsafe import Markup, escape


def element(name: str, *children: str, **attributes: object) -> Markup:
    """One element; `class_` and `stroke_width` become `class` and `stroke-width`.

    Children that are not markup already are escaped, and so is every attribute.
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(Markup(key.rstrip("_").replace("_", "-")), _text(value))
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(escape(child) for child in children)
    if not children:
        return Markup("<{}{}/>").format(Markup(name), written)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, inside)


def group(children: Iterable[str], **attributes: object) -> Markup:
    """Elements that share attributes; nothing for none."""
    made = list(children)
    return element("g", *made, **attributes) if made else Markup("")


def polyline(points: Iterable[tuple[float, float]], **attributes: object) -> Markup:
    """A line through points."""
    text = " ".join(f"{_text(x)},{_text(y)}" for x, y in points)
    return element("polyline", points=text, fill="none", **attributes)


def _text(value: object) -> str:
    # A tenth of a pixel is as fine as a screen shows; it keeps the page small and stable.
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
