"""An image processor's configuration in our words; no library needed to read it."""

from __future__ import annotations

from typing import Any

from stockpot.adapters.inputs import ImageInput

# PIL's numbers for resampling filters, which is how processors write them.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def image_input(content: dict[str, Any], channels: int | None) -> ImageInput:
    size, resize = _geometry(content)
    mean, std = (0.0,), (1.0,)
    if content.get("do_normalize", True) and content.get("image_mean") is not None:
        mean, std = tuple(content["image_mean"]), tuple(content["image_std"])
    factor = content.get("rescale_factor", 1 / 255) if content.get("do_rescale", True) else 1.0
    # Ours: (pixel / 255 - mean) / std. Another factor f means (255 f pixel / 255 - mean) / std.
    scale = 255 * float(factor)
    return ImageInput(
        size=size,
        resize=resize,
        mean=tuple(m / scale for m in mean),
        std=tuple(s / scale for s in std),
        interpolation=_FILTERS.get(content.get("resample", 2), "bilinear"),
        channels=channels if channels in (1, 3) else None,
    )


def _geometry(content: dict[str, Any]) -> tuple[tuple[int, int] | None, int | None]:
    size = _exact(content.get("size")) if content.get("do_resize", True) else None
    crop = _exact(content.get("crop_size")) if content.get("do_center_crop", False) else None
    given = content.get("size")
    edge = given.get("shortest_edge") if isinstance(given, dict) and content.get("do_resize", True) else None
    if edge is None:
        if crop is not None and size is not None and size[0] == size[1]:
            return crop, size[0]
        return crop or size, None
    portion = content.get("crop_pct")
    if portion is not None:  # ConvNeXt: small images are cropped, large ones squeezed
        return (edge, edge), int(edge / portion) if edge < 384 else None
    return crop or (edge, edge), edge


def _exact(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return int(size[0]), int(size[1])
    if isinstance(size, dict) and "height" in size and "width" in size:
        return int(size["height"]), int(size["width"])
    return None
