"""Makes what the example needs: pictures of shapes, and a small ViT trained on a few clearer ones."""

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import ViTConfig, ViTForImageClassification

HERE = Path(__file__).parent
SHAPES = ("circle", "cross", "diamond", "square", "triangle")
SIZE = 16


def picture(shape: str, noise: float, chance: random.Random) -> Image.Image:
    ground, ink = (tuple(chance.randrange(low, low + 120) for _ in range(3)) for low in (0, 135))
    image = Image.new("RGB", (SIZE, SIZE), ground)
    draw = ImageDraw.Draw(image)
    r = chance.randint(4, 6)
    x, y = chance.randint(r, SIZE - 1 - r), chance.randint(r, SIZE - 1 - r)
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=ink)
    elif shape == "cross":
        draw.line((x - r, y - r, x + r, y + r), fill=ink, width=2)
        draw.line((x - r, y + r, x + r, y - r), fill=ink, width=2)
    elif shape == "diamond":
        draw.polygon(((x, y - r), (x + r, y), (x, y + r), (x - r, y)), fill=ink)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=ink)
    else:
        draw.polygon(((x, y - r), (x + r, y + r), (x - r, y + r)), fill=ink)
    grain = np.random.default_rng(chance.randrange(2**31)).normal(0, noise, (SIZE, SIZE, 3))
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))


def main() -> None:
    chance = random.Random(0)
    for shape in SHAPES:
        folder = HERE / "pictures" / shape
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(440):
            picture(shape, 40, chance).save(folder / f"{number:03d}.png")
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=SIZE,
        patch_size=4,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=96,
        id2label=dict(enumerate(SHAPES)),
        label2id={shape: number for number, shape in enumerate(SHAPES)},
    )
    model = ViTForImageClassification(config)
    y = torch.arange(2000) % len(SHAPES)
    pixels = np.stack([np.asarray(picture(SHAPES[k], 10, chance)) for k in y])
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(12):
        for rows in torch.randperm(len(y)).split(100):
            optimizer.zero_grad()
            model(x[rows], labels=y[rows]).loss.backward()
            optimizer.step()
    model.save_pretrained(HERE / "base")
    print("wrote pictures/ and base/")


if __name__ == "__main__":
    main()
