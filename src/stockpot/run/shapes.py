"""The JSON files of a run: what each may hold, and the one reader that believes none of it before it has looked.

A run directory may come from anybody. A file is read if it is an ordinary one of bearable size with a
bearable number of values, and believed if every value has the declared shape: a type, `[shape]` for lists,
`[shape, shape]` for those of two, `{"name": shape}` for objects with exactly these names (one with a `?` behind it may
be missing), `{"*": shape}` for objects with any names, a tuple for alternatives, and ANY for whatever JSON holds.
Numbers are finite: JSON has no others, although Python's reader takes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stockpot import files
from stockpot.errors import RunError, StockpotError

LIMIT = 64 * 2**20  # bytes; a pool of a thousand ingredients takes half of that for its distances
CONTAINERS, VALUES = 10**6, 8 * 10**6  # objects and lists, and values, in one file
DEEP = 6  # levels of what `flat` tells apart; what lies deeper in a file of others is compared as text
ANY = object()
NUMBER, TEXT, COUNT = float, str, int
MAYBE = (None, NUMBER)

_SCORED = {"value": MAYBE, "low": MAYBE, "high": MAYBE, "n": COUNT, "loss": MAYBE}
SCORE = (None, _SCORED)
_CURVES = [{"fold": COUNT, "block": COUNT, "x": [NUMBER], "loss": [MAYBE]}]
_GREEDY = {"kind": TEXT, "ingredient": TEXT, "index": COUNT, "added": bool, "score": MAYBE, "evaluated": COUNT}
GUARD_SHAPE = {
    "held_out": {"*": MAYBE}, "intervals": {"*": [MAYBE] * 2}, "over_learned": {"*": [MAYBE] * 3}, "winner": TEXT,
}  # fmt: skip
RUN_SHAPE = {
    "format": COUNT, "kind": TEXT, "title": TEXT, "created": TEXT, "stockpot": TEXT, "command": [TEXT],
    "status": TEXT, "metric": TEXT, "unit": TEXT, "seed": COUNT, "recipe_digest": TEXT, "code": {"*": TEXT},
    "settings": {"*": {"*": ANY}}, "layout": {"*": ANY}, "fit_digest": TEXT, "report_digests": {"*": TEXT},
    "environment": {"*": ANY},
    "report_metrics?": {"*": {"metric": TEXT, "unit": TEXT}},  # of sets that are judged by a metric of their own
}  # fmt: skip
POOL_SHAPE = {
    "ingredients": [
        {
            "name": TEXT, "path": TEXT, "format": TEXT, "bytes": COUNT, "digest": TEXT, "fit": SCORE,
            "trial": (None, {"*": ANY}),
        }
    ],
    "parameters": COUNT, "tensors": COUNT, "dtypes": {"*": COUNT}, "frozen": [TEXT], "tied": [[TEXT]],
    "duplicates": [[COUNT]], "distances": [[MAYBE]], "to_mean": [MAYBE], "norms": [MAYBE],
    "outlier": (None, COUNT), "base": (None, {"path": TEXT, "digest": TEXT}),
}  # fmt: skip
RESULT_SHAPE = {
    "method": TEXT, "settings": {"*": ANY}, "seconds": NUMBER, "peak_host": COUNT, "peak_device": COUNT,
    "models_used": COUNT, "notes": [TEXT], "fit": SCORE, "held_out": SCORE, "reports": {"*": _SCORED}, "groups": [TEXT],
    "curves": {"fit": _CURVES, "held_out": _CURVES}, "greedy": (None, [_GREEDY]), "guard": (None, GUARD_SHAPE),
}  # fmt: skip
RESULTS_SHAPE = {
    "methods": [TEXT], "recommended": (None, TEXT), "verdict": TEXT, "baseline": (None, TEXT),
    "compared_on": (None, TEXT), "differences": {"*": {"*": [MAYBE] * 3}},
    "held_out": {"*": {"value": NUMBER, "low": MAYBE, "high": MAYBE}},
    "failed": {"*": TEXT}, "absent": {"*": TEXT},
}  # fmt: skip


def read_json(path: Path, root: Path, shape: Any) -> Any:
    """The values of one file of a run, as declared; None where there is no such file."""
    with readable(path):
        try:
            content = files.read_bytes(path, LIMIT, root=root)
        except FileNotFoundError:
            return None
        if content.count(b"[") + content.count(b"{") > CONTAINERS or content.count(b",") > VALUES:
            raise ValueError("more values than such a file has")
        value = files.parse_json(content)
        check(value, shape)
        return value


def check(value: Any, shape: Any, place: str = "") -> None:
    """Raise ValueError, with the place in the file, where a value has another shape than declared."""
    alternatives = shape if isinstance(shape, tuple) else (shape,)
    fitting = [one for one in alternatives if _fits(value, one)]
    if not fitting:
        expected = " or ".join(map(_named, alternatives))
        raise ValueError(f"{place or 'it'} is {_shown(value)} instead of {expected}")
    shape = fitting[0]
    if isinstance(shape, list):
        for number, item in enumerate(value):
            check(item, shape[number % len(shape)], f"{place}[{number}]")
    elif isinstance(shape, dict):
        shape = {name.rstrip("?"): one for name, one in shape.items() if name[-1] != "?" or name[:-1] in value}
        names = value if "*" in shape else shape
        odd = [f"no {name!r}" for name in names if name not in value]
        odd += [f"an unknown {name[:60]!r}" for name in value if name not in names]
        if odd:
            raise ValueError(f"{place or 'it'} has {odd[0]}")
        for name in names:
            check(value[name], shape.get("*", shape.get(name)), f"{place}.{name[:60]}".lstrip("."))
    elif shape is ANY and plain(value) != value:
        raise ValueError(f"{place or 'it'} has a number that JSON does not have")


def _fits(value: Any, shape: Any) -> bool:
    """Whether a value is of the kind, whatever it may hold."""
    if shape is ANY or shape is None:
        return shape is ANY or value is None
    if isinstance(value, bool):
        return shape is bool
    if shape is NUMBER:
        return isinstance(value, (int, float)) and abs(value) < 1e308  # also refuses NaN
    if shape is COUNT:
        return isinstance(value, int) and 0 <= value < 2**63
    if isinstance(shape, list):
        return isinstance(value, list) and len(shape) in (1, len(value))
    return isinstance(value, shape if isinstance(shape, type) else type(shape))


def _named(shape: Any) -> str:
    known: dict[Any, str] = {NUMBER: "a number", COUNT: "a count", TEXT: "a text", bool: "true or false", None: "null"}
    if isinstance(shape, list) and len(shape) > 1:
        return f"a list of {len(shape)} numbers"
    return known[shape] if shape is None or isinstance(shape, type) else _shown(shape)


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return "null" if value is None else repr(value)[:40]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """A file of the record that somebody damaged, replaced or removed, in our words."""
    try:
        yield
    except StockpotError:
        raise
    except Exception as error:  # libraries that read arrays have errors of their own
        found = " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, UnicodeDecodeError):
            found = "text that is not UTF-8"
        fix = "restore it from a copy, or start again with another output directory"
        raise RunError.of(str(path), expected="a file of a run record", found=found, fix=fix) from error


def plain(value: Any) -> Any:
    """The same for JSON, which has neither NaN nor infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


# Control characters, changes of writing direction, lone surrogates and two that are none.
_UNFIT = [*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_MARKED = dict.fromkeys([*_UNFIT, *range(0xD800, 0xE000), 0xFFFE, 0xFFFF], "\ufffd")


def clean(text: str) -> str:
    """What XML and UTF-8 cannot carry, and what makes a name look like another one, becomes a replacement mark."""
    return text.translate(_MARKED)


def cleaned(value: Any) -> Any:
    """Names come from files of strangers: what no page can carry is removed once, here."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    if isinstance(value, dict):
        return {clean(key): cleaned(item) for key, item in value.items()}
    return value


def flat(value: Any, place: str = "") -> dict[str, str]:
    """Every plain value as JSON under its dotted place, such as `plan.trials.3.lr`."""
    if not isinstance(value, (dict, list)) or place.count(".") >= DEEP:
        return {place: json.dumps(value)}
    parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    whole: dict[str, str] = {}
    for name, part in parts:
        said = json.dumps(str(name))[1:-1]  # no control characters of a stranger's file
        whole |= flat(part, f"{place}.{said}" if place else said)
    return whole
