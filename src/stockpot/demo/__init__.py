"""A real pool of models in half a minute: embedded data, a small vision transformer, and its fine-tunes."""

from stockpot.demo.vit import DigitViT
from stockpot.demo.zoo import Zoo, make_zoo

__all__ = ["DigitViT", "Zoo", "make_zoo"]
