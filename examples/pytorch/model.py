"""The model: any function that returns an nn.Module will do."""

from torch import Tensor, nn


class Listener(nn.Module):
    """A small convolutional network with BatchNorm on signals (n, 64)."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 24, 7, stride=2, padding=3),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Conv1d(24, 48, 7, stride=2, padding=3),
            nn.BatchNorm1d(48),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * 48, classes)

    def forward(self, signal: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(signal.unsqueeze(1)))
        return logits


def build(classes: int = 5) -> nn.Module:
    return Listener(classes)
