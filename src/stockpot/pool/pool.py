"""K checkpoints of one model, opened and checked against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from stockpot import words
from stockpot.errors import ChangedError, CheckpointError, MismatchError, PoolError, describe
from stockpot.events import Event, Listener, ignore, progress
from stockpot.pool.agreement import bare_factors, common_specs, mixed_averages, quantised
from stockpot.pool.checkpoint import Rename, open_checkpoint
from stockpot.pool.discover import ADAPTER_WEIGHTS, Run, find_checkpoints, ingredient_names, weights_of
from stockpot.pool.facts import PoolFacts, facts_of, nonfinite, require_finite
from stockpot.pool.lora import Adapters, open_adapters
from stockpot.pool.lora_scan import scan_adapters
from stockpot.pool.peft_folders import CONFIG, adapter_folder
from stockpot.pool.scan import Scan, scan
from stockpot.pool.source import Checkpoint, TensorSpec, is_directory, listed, shown

Stamp = tuple[int, int, int, int]  # size, times of the last change of content and of status, which file it is
_PAGES, _PAGE = 16, 4096  # of each file, and bytes of one, by which copies of a pool are compared
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Pool:
    """The ingredients of a soup. Made by `Pool.open`; no tensor data is read before it is asked for.

    `opened_with` holds the settings of `Pool.open` as plain JSON values, so that the pool can be opened
    again; a `rename` function appears there as `"custom"`.
    """

    def __init__(
        self,
        names: Sequence[str],
        checkpoints: Sequence[Checkpoint],
        specs: Mapping[str, TensorSpec],
        opened_with: Mapping[str, Any],
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters = adapters  # where the ingredients are LoRA adapters: their factors and their base
        self.names = tuple(names)
        self.checkpoints = tuple(checkpoints)
        self.specs: Mapping[str, TensorSpec] = MappingProxyType(dict(specs))
        self.opened_with = dict(opened_with)
        self.dropped: tuple[str, ...] = ()  # names of ingredients that drop_nonfinite left out
        # Names of running statistics (BatchNorm), which are measured and not learned.
        self.statistics = frozenset(name for name in specs if name.rpartition(".")[2] in _STATISTICS)
        self.nbytes = sum(spec.nbytes for spec in specs.values())  # bytes of one ingredient
        self._scan: Scan | None = None
        self._facts: PoolFacts | None = None
        # As the files were when they were opened.
        self._stamps = {file: _stamp(file) for checkpoint in checkpoints for file in checkpoint.files}

    @classmethod
    def open(
        cls,
        *sources: str | Path | Iterable[Any],
        key: str | None = None,
        rename: Rename | None = None,
        mixed_dtypes: bool = False,
        base: str | Path | None = None,
        all_steps: bool = False,
        listen: Listener = ignore,
    ) -> Pool:
        """Open every checkpoint and compare all of them, or raise one error that lists everything wrong.

        Sources are files, Hugging Face directories, folders of either, patterns, and state dicts; what a folder or
        pattern yields is in natural order. Of the output folder of a training run (Trainer, Lightning, timm) the best
        or last checkpoint is taken; all of its steps where it is the only source, or with `all_steps`.
        `hf://name/model` is a model of the Hub. `key` is the dotted path to the weights in nested files (`"ema"`: any
        form of averaged weights). `rename` is a map of prefixes or a function, applied after wrapper prefixes
        (`module.`, `_orig_mod.`) are gone. With `mixed_dtypes` floating-point dtypes may differ; the pool then has the
        dtype that holds them all.

        Folders of LoRA adapters, as PEFT saves them, make a pool of the models they make of their `base`: its folder,
        or its name in the Hugging Face cache; by default what the adapters name. `rename` is for the base's names.
        """
        held: dict[Path, Checkpoint] = {}
        runs: list[Run] = []
        paths, problems = find_checkpoints(sources, held, runs, all_steps=all_steps)
        for run in runs:
            taken = {"run": shown(run.folder), "checkpoint": run.chosen.name, "why": run.why, "steps": len(run.steps)}
            listen(Event("run", taken))
        folders = [folder for path in paths if (folder := adapter_folder(path))]
        renamed = dict(rename) if isinstance(rename, Mapping) else rename and "custom"
        opened_with = {"key": key, "rename": renamed, "mixed_dtypes": mixed_dtypes}
        adapters = None
        progress(listen, "open", 0, len(paths), unit="files")
        if folders or base is not None:
            if problems:
                raise _error(problems, [], [], len(paths))
            _check_adapters(paths, folders, key)
            opened, specs, adapters = open_adapters(folders, base, rename)
            opened_with["base"] = str(adapters.base.path.absolute())
            paths = [checkpoint.path for checkpoint in opened]
            progress(listen, "open", len(paths), len(paths), unit="files")
        else:
            opened, unreadable = [], []
            for done, path in enumerate(paths, start=1):
                try:
                    opened.append(open_checkpoint(held.get(path, path), key=key, rename=rename))
                except CheckpointError as error:
                    unreadable.append(str(error))
                progress(listen, "open", done, len(paths), unit="files")
            specs, differing = common_specs(opened, mixed_dtypes) if opened else ({}, [])
            differing += [*mixed_averages(opened), *quantised(opened), *bare_factors(opened)]
            if len(paths) < 2 and not problems and not unreadable:
                found = f"only one, {shown(paths[0])}" if paths else "no sources"
                fix = "give several checkpoints of the same model"
                # A Trainer leaves the last model beside the folders of earlier ones.
                if paths and any(paths[0].glob("checkpoint-*")):
                    fix += f"; folders in this one are read where a pattern names them: {shown(paths[0])}/checkpoint-*"
                problems.append(describe("the pool", expected="at least two ingredients", found=found, fix=fix))
            if problems or unreadable or differing:
                raise _error(problems, unreadable, differing, len(paths))
        return cls(ingredient_names(paths), opened, specs, opened_with, adapters)

    def __len__(self) -> int:
        return len(self.checkpoints)

    def __repr__(self) -> str:
        return f"<Pool of {len(self)} ingredients, {len(self.specs)} tensors, {self.nbytes:,} bytes each>"

    def tensor(self, k: int, name: str) -> Tensor:
        """Ingredient k's tensor, to be treated as read-only; converted where the pool has mixed dtypes."""
        return self.checkpoints[k].tensor(name).to(self.specs[name].dtype)

    def subset(self, indices: Iterable[int]) -> Pool:
        """A pool of some ingredients, in the order given; what is known of their content stays known."""
        chosen = [range(len(self))[index] for index in indices]
        if not chosen:
            raise PoolError.of("Pool.subset", expected="at least one ingredient", found="none", fix="give some indices")
        names, checkpoints = [self.names[k] for k in chosen], [self.checkpoints[k] for k in chosen]
        adapters = self.adapters and self.adapters.part(chosen)
        smaller = Pool(names, checkpoints, self.specs, self.opened_with, adapters)
        smaller._scan = self._scan and self._scan.part(chosen)
        smaller._stamps = {file: self._stamps[file] for file in smaller._stamps}
        smaller.dropped = self.dropped
        return smaller

    def drop_nonfinite(self, listen: Listener = ignore) -> Pool:
        """The same pool without ingredients that have NaN or infinite weights. Reads everything once."""
        bad = nonfinite(self.checkpoints, self.scanned(listen))
        kept = [k for k in range(len(self)) if k not in bad]
        if len(kept) < 2:
            expected, found = "at least two checkpoints without NaN or infinity", f"{len(kept)} of {len(self)}"
            fix = "look for what went wrong in training:\n" + "\n".join(bad.values()).removesuffix(".")
            raise PoolError.of("the pool", expected=expected, found=found, fix=fix)
        if not bad:
            return self
        listen(Event("dropped", {"names": [self.names[k] for k in bad], "why": list(bad.values())}))
        pool = self.subset(kept)
        pool.dropped = (*self.dropped, *(self.names[k] for k in bad))
        return pool

    def verify_finite(self, listen: Listener = ignore) -> None:
        """Raise if there is a NaN or infinite weight, naming every file and tensor. Reads everything once."""
        require_finite(self.checkpoints, self.scanned(listen))

    def verify_unchanged(self) -> None:
        """Raise when a file was written to, replaced or removed since the pool was opened. Reads nothing."""
        changes = [line for file, stamp in self._stamps.items() if (line := _change(file, stamp, _stamp(file)))]
        if changes:
            found = f"changes:\n    {words.first_of(changes)}\n "
            fix = "let whatever writes to them finish, or restore them, and run again; no soup was written"
            raise ChangedError.of("the ingredients", "files that stay as they are while they are used", found, fix)

    def sampled(self) -> dict[str, str]:
        """A digest of some pages of each ingredient's files: enough to see that another host has other models."""
        found = {name: _sample(one.files) for name, one in zip(self.names, self.checkpoints, strict=True)}
        return found if self.adapters is None else {**found, "base of the adapters": _sample(self.adapters.base.files)}

    @property
    def spare(self) -> frozenset[str]:
        """Tensors of adapters' base that none of them changes: the model may lack them."""
        return self.checkpoints[0].spare

    @property
    def hashed(self) -> bool:
        """Whether the digests are known, so that asking for them reads nothing."""
        return self._scan is not None

    def digests(self, listen: Listener = ignore) -> tuple[str, ...]:
        """SHA-256 of each ingredient's content, whatever its file format. Reads everything once."""
        return self.scanned(listen, measured=False).digests

    @property
    def base_digest(self) -> str | None:
        """SHA-256 of the base of adapters, known with the digests."""
        return None if self._scan is None else self._scan.base

    def facts(self, listen: Listener = ignore, *, measured: bool = True) -> PoolFacts:
        """What one pass over the files tells. `measured=False`: hashing alone, unless more is known already.

        With many large models the K x K inner products behind distances take longer than hashing.
        """
        found = self.scanned(listen, measured=measured)
        if self._facts is None or (self._facts.measured is None and found.measured):
            self._facts = facts_of(self.checkpoints, self.specs, self.statistics, found)
        return self._facts

    def scanned(self, listen: Listener = ignore, *, measured: bool = True) -> Scan:
        """What `facts` are made from, to be given to another process with the same files (`adopt`)."""
        if self._scan is None or (measured and not self._scan.measured):
            options: dict[str, Any] = {"no_weights": self.statistics} if measured else {"hashes_only": True}
            if self.adapters is None:
                self._scan = scan(self.checkpoints, self.specs, listen, **options)
            else:
                self._scan = scan_adapters(self.adapters, listen, **options)
        return self._scan

    def adopt(self, found: Scan) -> None:
        """What another process has found in the same files, instead of reading them here."""
        self._scan, self._facts = found, None


def _check_adapters(paths: Sequence[Path], folders: Sequence[Path], key: str | None) -> None:
    subject, expected = "the pool", "at least two adapters, and nothing else"
    weights = {path: weights_of(path) if is_directory(path) else path for path in paths if adapter_folder(path) is None}
    if bare := [shown(path) for path, file in weights.items() if file is not None and file.name in ADAPTER_WEIGHTS]:
        found = f"adapters without {CONFIG}, which says their scales: {listed(bare)}"
        fix = f"copy {CONFIG} from where they were saved, beside the weights"
    elif not folders:
        subject, expected = "Pool.open", "LoRA adapters for the base"
        found, fix = "base= and no adapter among the sources", "leave base= out, or give folders of PEFT adapters"
    elif weights or len(paths) < 2:
        full = [shown(path) for path in weights]
        found = f"full checkpoints among adapters: {listed(full)}" if full else f"only one, {shown(paths[0])}"
        fix = "mix adapters with adapters, or merge them into full checkpoints first"
    elif key is not None:
        found, fix = f"the key {key!r}, for nested files", "leave key out: adapters are not nested"
    else:
        return
    raise PoolError.of(subject, expected=expected, found=found, fix=fix)


def _sample(paths: Iterable[Path]) -> str:
    found = sha256()
    for path in paths:
        size = path.stat().st_size
        found.update(size.to_bytes(8, "big"))
        with path.open("rb") as file:
            for i in range(_PAGES):
                file.seek(max(0, size - _PAGE) * i // (_PAGES - 1))
                found.update(file.read(_PAGE))
    return found.hexdigest()[:16]


def _stamp(file: Path) -> Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    # Whoever writes to a file can set its time back, but not the time of its last change of status.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _change(file: Path, before: Stamp | None, now: Stamp | None) -> str | None:
    if before == now:
        return None
    what = "written to"
    if now is None:
        what = "gone"
    elif before is not None and before[0] != now[0]:
        what = f"{before[0]:,} bytes before, {now[0]:,} now"
    elif before is not None and (before[1], before[3]) == (now[1], now[3]):
        what = "written to, or given other permissions, links or times"
    return f"{shown(file)}: {what}"


def _error(problems: list[str], unreadable: list[str], differing: list[str], total: int) -> PoolError:
    """One error for all, of the most specific kind that is true."""
    sorts = {PoolError: problems, CheckpointError: unreadable, MismatchError: differing}
    words = ("wrong sources", "unreadable", "different")
    counts = [f"{len(texts)} {what}" for texts, what in zip(sorts.values(), words, strict=True) if texts]
    kind = next(kind for kind, texts in sorts.items() if texts) if len(counts) == 1 else PoolError
    everything = [*problems, *unreadable, *differing]
    if len(everything) == 1:
        return kind(everything[0])
    return kind("\n".join((f"{total} checkpoints cannot be used as a pool ({', '.join(counts)})", *everything)))
