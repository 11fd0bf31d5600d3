"""A stand-alone SVG file becomes a part of a page: no namespaces, no ids that clash, the page's fonts and colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping

CRISP = "crisp"  # the id of shapes whose edges must not be smoothed


def inline(text: str, slug: str, alt: str, colours: Mapping[str, str]) -> str:
    """`colours` says what each placeholder becomes. Works on the parsed tree, so names in the text stay as they are."""
    root = ET.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):  # its style element would rule the whole page
                parent.remove(child)
    used = {
        name
        for element in root.iter()
        for key, value in element.attrib.items()
        if _local(key) != "id"
        for name in re.findall(r"#([\w.-]+)", value)
    }
    pattern = re.compile("|".join(map(re.escape, colours)))
    for element in root.iter():
        element.tag = _local(element.tag)
        if element.tag != "text":
            element.text = None
        element.tail = None
        element.attrib = dict(
            pair
            for key, value in element.attrib.items()
            if (pair := _attribute(_local(key), value, slug, used)) is not None
        )
        if "style" in element.attrib:
            element.attrib["style"] = pattern.sub(lambda m: colours[m[0]], element.attrib["style"])
    _prune(root)
    box = root.attrib["viewBox"]
    _, _, width, height = box.split()
    root.attrib = {"viewBox": box, "width": width, "height": height, "role": "img", "aria-label": alt}
    return ET.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, slug: str, used: set[str]) -> tuple[str, str] | None:
    if key == "id":
        if value == CRISP:
            return "shape-rendering", "crispEdges"
        return ("id", f"{slug}-{value}") if value in used else None
    if key == "transform" and re.match(r"rotate\(-?0 ", value):
        return None
    if key == "href":
        return key, f"#{slug}-{value[1:]}"
    if key == "clip-path":
        return key, value.replace("url(#", f"url(#{slug}-")
    if key == "style":
        return key, re.sub(r"font-family: [^;]+;?\s*", "", value)
    if key in ("d", "x", "y", "width", "height", "transform"):
        return key, _shorter(value)
    return key, value


def _prune(element: ET.Element) -> None:
    for child in list(element):
        _prune(child)
        if child.tag in ("g", "defs") and not len(child):
            element.remove(child)


def _shorter(numbers: str) -> str:
    """Hundredths of a pixel are enough."""
    rounded = re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), numbers)
    return " ".join(rounded.split())


def _local(name: str) -> str:
    return name.rpartition("}")[2]
