"""How much host memory data may take."""

from __future__ import annotations

from dataclasses import dataclass

from stockpot.errors import DataError, describe


@dataclass(frozen=True)
class Budget:
    """How much memory data may take, and whose data it is."""

    name: str
    limit: int
    used: int = 0

    def check(self, nbytes: float, *, estimated: bool = False, slack: float = 1.0) -> None:
        """Refuse more than the limit; an uncertain estimate must be out by more than the factor `slack`."""
        if nbytes + self.used > self.limit * slack:
            others = f" ({_size(self.used)} of it in use by other data)" if self.used else ""
            raise DataError(
                describe(
                    self.name,
                    expected=f"at most {_size(self.limit)} in memory{others}",
                    found=f"{'about ' if estimated else ''}{_size(nbytes)}",
                    fix="raise memory_limit (bytes), give fewer samples, or keep images as uint8 "
                    "and convert inside the model",
                )
            )


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
