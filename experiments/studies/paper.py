"""The paper's own figures (Li et al., ECCV 2024): tables 1 to 3, appendices C and D."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """As printed; None where the paper has a dash or ran out of memory."""

    accuracy: float | None
    per_epoch: int | None = None  # seconds
    epochs: int | None = None
    seconds: int | None = None
    memory: str | None = None

    def text(self) -> str:
        if self.accuracy is None:
            return f"n/a ({self.memory})"
        if self.seconds is None:
            return f"{self.accuracy:.2f}"
        return f"{self.accuracy:.2f} ({self.per_epoch} s x {self.epochs}, {self.seconds} s, {self.memory})"


@dataclass(frozen=True)
class Table:
    title: str
    rows: dict[str, Row]


VIT_B32 = Table(
    "Table 1: CLIP ViT-B/32, ImageNet, K = 72",
    {
        "best": Row(80.38),
        "uniform": Row(79.97),
        "greedy": Row(81.03, 24, 143, 3501, "3 GB"),
        "learned": Row(80.88, 1503, 5, 7514, "249 GB"),
        "hl": Row(81.14, 496, 5, 2479, "43 GB"),
        "mehl": Row(81.20, 39, 20, 776, "18 GB"),
        "learned+": Row(81.39, 1540, 5, 7701, "253 GB"),
        "hl+": Row(81.45, 581, 5, 2903, "44 GB"),
        "mehl+": Row(81.62, 40, 20, 808, "19 GB"),
        "ensemble": Row(81.19),
    },
)
VIT_L14_CIFAR10 = Table(
    "Table 2: CLIP ViT-L/14, CIFAR-10, K = 32",
    {
        "best": Row(98.93),
        "uniform": Row(99.23),
        "greedy": Row(99.15, 80, 63, 5046, "6 GB"),
        "learned": Row(None, memory="over 256 GB"),
        "hl": Row(99.25, 1203, 5, 6015, "49 GB"),
        "mehl": Row(99.26, 199, 20, 3976, "23 GB"),
        "learned+": Row(None, memory="over 256 GB"),
        "hl+": Row(99.24, 1241, 5, 6205, "49 GB"),
        "mehl+": Row(99.27, 199, 20, 3988, "23 GB"),
        "ensemble": Row(99.14),
    },
)
VIT_L14_CIFAR100 = Table(
    "Table 2: CLIP ViT-L/14, CIFAR-100, K = 32",
    {
        "best": Row(92.49),
        "uniform": Row(93.05),
        "greedy": Row(93.32, 81, 63, 5084, "6 GB"),
        "learned": Row(None, memory="over 256 GB"),
        "hl": Row(93.41, 1251, 5, 6255, "50 GB"),
        "mehl": Row(93.52, 200, 20, 4002, "23 GB"),
        "learned+": Row(None, memory="over 256 GB"),
        "hl+": Row(93.59, 1255, 5, 6275, "50 GB"),
        "mehl+": Row(93.70, 205, 20, 4100, "23 GB"),
        "ensemble": Row(93.65),
    },
)
RESNET_101 = Table(
    "Appendix C: ResNet-101, CIFAR-100, K = 32",
    {
        "best": Row(87.10),
        "uniform": Row(86.47),
        "greedy": Row(88.62, 5, 63, 328, "4 GB"),
        "learned": Row(88.50, 913, 5, 4566, "68 GB"),
        "hl": Row(88.82, 47, 5, 238, "17 GB"),
        "mehl": Row(89.03, 10, 20, 207, "13 GB"),
        "learned+": Row(88.83, 915, 5, 4576, "68 GB"),
        "hl+": Row(89.12, 48, 5, 244, "17 GB"),
        "mehl+": Row(89.32, 10, 20, 209, "13 GB"),
        "ensemble": Row(89.61),
    },
)
# The paper's tables whose rows stand beside a zoo's: as many models, and the nearest kind of network. The paper has
# images only, so reviews stand beside those with as many models.
BESIDE = {
    "fashion-vit": (VIT_B32,),
    "cifar10-efficientnet": (VIT_L14_CIFAR10, RESNET_101),
    "imdb-minilm": (VIT_L14_CIFAR100,),
}
# Table 3: test accuracy after leaving out the best 0, 2, 22 and 42 of 72.
REMOVED = {0: (81.03, 81.62), 2: (80.78, 81.58), 22: (80.08, 81.44), 42: (79.70, 81.01)}  # greedy, mehl+
DECENTRALISED, FREE = 81.62, 81.02  # appendix D
