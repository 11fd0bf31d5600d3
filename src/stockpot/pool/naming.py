"""From the names in a file to the names in the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from stockpot.errors import CheckpointError, PoolError, describe
from stockpot.pool.files import listed

Rename = Mapping[str, str] | Callable[[str], str]

WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel and torch.compile


def wrapper_prefix(names: Iterable[str]) -> str:
    """What wrappers put before every single name; empty when only some names have it."""
    rest = list(names)
    prefix = ""
    while rest:
        for wrapper in WRAPPERS:
            if all(name.startswith(wrapper) and len(name) > len(wrapper) for name in rest):
                prefix += wrapper
                rest = [name[len(wrapper) :] for name in rest]
                break
        else:
            break
    return prefix


def check_rename(rename: Rename | None) -> None:
    if rename is None or callable(rename):
        return
    if not isinstance(rename, Mapping) or not all(
        isinstance(old, str) and isinstance(new, str) for old, new in rename.items()
    ):
        raise PoolError(
            describe(
                "rename",
                expected="a map of prefixes or a function",
                found=repr(rename)[:80],
                fix='give for example rename={"model.": ""}',
            )
        )


def new_names(names: Iterable[str], rename: Rename | None, subject: str) -> dict[str, str]:
    """Pool name -> name in the file."""
    names = list(names)
    prefix = wrapper_prefix(names)
    result: dict[str, str] = {}
    clashes: list[str] = []
    for stored in names:
        name = _renamed(stored[len(prefix) :], rename, subject)
        if not _is_text(name):
            raise CheckpointError(
                describe(
                    subject,
                    expected="names of tensors that are valid text",
                    found=repr(name)[:120],
                    fix="rename the tensor where the file was made, or leave this file out of the pool",
                )
            )
        if name in result:
            clashes.append(f"{result[name]!r} and {stored!r} both become {name!r}")
        result[name] = stored
    if clashes:
        raise CheckpointError(
            describe(
                subject,
                expected="different names after renaming",
                found=listed(clashes, 3),
                fix="make rename more specific",
            )
        )
    return result


def _is_text(name: str) -> bool:
    """Half of a surrogate pair is no text: no file could be written with such a name."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _renamed(name: str, rename: Rename | None, subject: str) -> str:
    if rename is None:
        return name
    if isinstance(rename, Mapping):
        matching = [old for old in rename if name.startswith(old)]
        if not matching:
            return name
        old = max(matching, key=len)
        new: object = rename[old] + name[len(old) :]
    else:
        new = rename(name)
    if not isinstance(new, str) or not new:
        raise CheckpointError(
            describe(
                subject,
                expected=f"a name for the tensor {name!r} from rename",
                found=repr(new),
                fix="let rename return a text that is not empty",
            )
        )
    return new
