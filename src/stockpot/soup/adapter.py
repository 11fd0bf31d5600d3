"""A soup of LoRA adapters as one adapter, which PEFT loads: theta = theta_0 + sum_k W[k, group] s_k B_k A_k.

Exact with the ranks of all side by side, weight and scale folded into B; or of a rank that the user names, the nearest
one in the Frobenius norm, module by module (QR of the factors, and the SVD of their small core).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from stockpot import files
from stockpot.errors import SoupError
from stockpot.layout import EXCLUDED, FROZEN, Layout, mixing_dtype
from stockpot.pool import Pool
from stockpot.pool.discover import ADAPTER_WEIGHTS as WEIGHTS
from stockpot.pool.peft_folders import CONFIG, PREFIX
from stockpot.soup.weights import check_holds, single

Form = Literal["auto", "merged", "adapter"] | int  # a number: an adapter of at most that rank
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM can be started with
WRITTEN_AS = "the soup is written as"  # how the note on its form begins
ROUNDING = 1e-12  # a smaller relative error is that of the arithmetic


@dataclass(frozen=True, eq=False)
class Part:
    """The delta of one tensor, B A, with the scale in B."""

    A: Tensor  # (r, in), with kernel sizes behind where the module is a convolution
    B: Tensor  # (out, r), likewise
    transposed: bool  # the base keeps the tensor as (in, out)
    error: float = 0.0  # of the delta, relative to its Frobenius norm

    def delta(self) -> Tensor:
        product = self.B.flatten(1) @ self.A.flatten(1)  # (out, in)
        return product.T if self.transposed else product.view(self.B.shape[0], *self.A.shape[1:])


class Factored:
    """The deltas of one soup of adapters, of at most `rank`; None: exact."""

    def __init__(self, pool: Pool, layout: Layout, W: Tensor, rank: int | None) -> None:
        assert pool.adapters is not None
        self.pool, self.layout, self.W, self.rank = pool, layout, W, rank
        self.adapters, self.base, self.each = pool.adapters, pool.adapters.base, pool.adapters.each
        self._reduced: dict[str, Part] = {}  # made once: these are small, and the work is not

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors with a delta."""
        return tuple(name for name in self.pool.specs if name not in self.dense and self._weights(name))

    @property
    def exact_rank(self) -> int:
        """The largest rank of the exact adapter."""
        return max((self._rank(name) for name in self.names), default=0)

    @property
    def errors(self) -> dict[str, float]:
        """Of each module, relative to its delta."""
        return {name.rpartition(".")[0]: self.part(name).error for name in self.names}

    def nbytes(self, dtype: torch.dtype | None) -> int:
        """What the adapter takes on disk, rather too many."""
        specs, rank = self.pool.specs, self.rank or self.exact_rank
        sides = sum(specs[name].shape[0] + specs[name].numel // specs[name].shape[0] for name in self.names)
        whole = sum(specs[name].numel for name in self.dense)
        return (sides * rank + whole) * (torch.float64 if dtype is None else dtype).itemsize

    def tensor(self, name: str) -> Tensor | None:
        """theta_0 + B A in fp32 or better; None where the ingredients' own tensors say it as well."""
        if name not in self.names or (self.rank is None and len(self._weights(name)) == 1 and self._whole(name)):
            return None
        base = self.base.tensor(name)
        return base.to(mixing_dtype(base.dtype)) + self.part(name).delta()

    def part(self, name: str) -> Part:
        if name in self._reduced:
            return self._reduced[name]
        part = self._side_by_side(name)
        limit = min(part.B.shape[0], part.A.shape[1:].numel(), self.rank or part.A.shape[0])
        if len(part.A) > limit:
            part = self._reduced[name] = reduced(part, limit)
        return part

    def _weights(self, name: str) -> dict[int, float]:
        """Which adapters are in this tensor's delta, and their weights; what is not mixed is the donor's."""
        if self.layout.kept.get(name) in (FROZEN, EXCLUDED):
            given = {self.layout.donor: 1.0}
        elif name in self.layout.kept:
            return {}
        else:
            given = dict(enumerate(self.W[:, self.layout.group_of[name]].tolist()))
        return {k: weight for k, weight in given.items() if weight and name in self.each[k].factors}

    def _whole(self, name: str) -> bool:
        return set(self._weights(name).values()) == {1.0}

    def _rank(self, name: str) -> int:
        total = sum(self.adapters.rank(k, name) for k in self._weights(name))
        shape = self.pool.specs[name].shape
        return min(total, shape[0], self.pool.specs[name].numel // max(shape[0], 1))

    def _side_by_side(self, name: str) -> Part:
        """The factors of all adapters in one, in fp32 or better."""
        dtype = mixing_dtype(self.pool.specs[name].dtype)
        A, B, turned = self.adapters.stacked(name, self._weights(name), dtype)
        for factor in (A, B):
            check_holds(factor, f"{name}, its factors", dtype)
        return Part(A, B, turned)

    # ---- what is no delta

    @cached_property
    def dense(self) -> frozenset[str]:
        """Tensors that an adapter holds whole: those of modules_to_save, and trained biases."""
        return frozenset(self._trained | {name for name in self.pool.specs if _owners(name) & self._wrapped})

    @cached_property
    def _trained(self) -> set[str]:
        found = {name for one in self.each for name in one.added}
        for one in self.each:
            for name, key in one.dense.items():
                # Beside an embedding's delta PEFT also saves the embedding (save_embedding_layers), mostly the base's.
                if name not in one.factors or not torch.equal(one.file.tensor(key), self.base.tensor(name)):
                    found.add(name)
        return found

    @cached_property
    def modules_to_save(self) -> list[str]:
        """What the adapters say, and the modules of other dense tensors than biases."""
        said = {entry for one in self.each for entry in one.config.get("modules_to_save") or ()}
        covered = self._ending(said)
        rest = {n.rpartition(".")[0] for n in self._trained if not n.endswith(".bias") and not _owners(n) & covered}
        return sorted(said | rest)

    @cached_property
    def _wrapped(self) -> set[str]:
        return self._ending(set(self.modules_to_save))

    def _ending(self, entries: set[str]) -> set[str]:
        """The modules that PEFT replaces for these entries: all whose names end with one."""
        return {module for name in self.pool.specs for module in _owners(name) if module.endswith(tuple(entries))}

    # ---- on disk

    def write(self, folder: Path, whole: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        """PEFT's two files. `whole` holds the soup's own tensors of `dense`."""
        if (alone := self._alone()) is not None and dtype is None and self.rank is None:
            one = self.each[alone]
            shutil.copyfile(one.path / CONFIG, folder / CONFIG)  # one adapter reproduces itself, byte for byte
            (file,) = one.file.files
            if file.name == WEIGHTS[0]:
                shutil.copyfile(file, folder / file.name)
            else:
                _save({key: one.file.tensor(key).clone() for key in one.file.specs}, folder)
            return
        tensors, ranks = {}, {}
        for name in self.names:
            part, module = self.part(name), name.rpartition(".")[0]
            embedding = any("lora_embedding_" in self.each[k].factors[name].A for k in self._weights(name))
            keys = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
            for key, factor in zip(keys, (part.A, part.B), strict=True):
                check_holds(factor, f"{name}, its factors", dtype or factor.dtype)
                tensors[f"{PREFIX}{module}.{key}"] = factor.to(dtype or factor.dtype).contiguous()
            ranks[module] = len(part.A)
        biases = False
        for name, tensor in whole.items():
            module, _, kind = name.rpartition(".")
            bias = not _owners(name) & self._wrapped
            biases |= bias
            place = f"{module}.base_layer.{kind}" if bias and module in ranks else name  # as PEFT's own layer has it
            tensors[PREFIX + place] = tensor.clone(memory_format=torch.contiguous_format)  # tied ones share storage
        _save(tensors, folder)
        files.write_json(folder / CONFIG, self._config(ranks, biases))

    def _alone(self) -> int | None:
        """The one adapter that the soup consists of, if it does."""
        k = single(self.W)
        excluded = [name for name, reason in self.layout.kept.items() if reason == EXCLUDED]
        touched = any(name in one.factors or name in self.dense for one in self.each for name in excluded)
        return None if touched and k != self.layout.donor else k

    def _config(self, ranks: Mapping[str, int], biases: bool) -> dict[str, Any]:
        """Scale is one everywhere, also for readers that know nothing of patterns; so r is the largest rank."""
        most = max(ranks.values(), default=1)
        # `^`, because PEFT lets anything stand before a pattern.
        patterns = {f"^{re.escape(module)}": rank for module, rank in ranks.items() if rank != most}
        first = self.each[0].config
        shared = {key: first.get(key) for key in ("base_model_name_or_path", "revision", "task_type", "auto_mapping")}
        if not shared["base_model_name_or_path"]:
            shared["base_model_name_or_path"] = str(self.base.path)
        return {
            **shared,
            "peft_type": "LORA", "inference_mode": True, "init_lora_weights": True, "lora_dropout": 0.0,
            "r": most, "lora_alpha": most, "rank_pattern": patterns, "alpha_pattern": patterns,
            "use_rslora": False, "use_dora": False, "bias": "all" if biases else "none",
            "fan_in_fan_out": any(bool(one.config.get("fan_in_fan_out")) for one in self.each),
            "target_modules": self._targets(ranks), "modules_to_save": self.modules_to_save or None,
        }  # fmt: skip

    def _targets(self, ranks: Mapping[str, int]) -> list[str]:
        """Short names where they mean these modules and no others; else whole ones."""
        short = sorted({module.rpartition(".")[2] for module in ranks})
        ends = tuple(f".{name}" for name in short)
        meant = {name.rpartition(".")[0] for name in self.pool.specs if not _owners(name) & self._wrapped}
        return short if {m for m in meant if m in short or m.endswith(ends)} == ranks.keys() else sorted(ranks)


def reduced(part: Part, rank: int) -> Part:
    """The nearest B A of this rank."""
    Q_B, R_B = torch.linalg.qr(part.B.flatten(1).double())  # (out, R)
    Q_A, R_A = torch.linalg.qr(part.A.flatten(1).double().T)  # (in, R)
    U, S, V = torch.linalg.svd(R_B @ R_A.T)
    total, lost = float(S.square().sum()), float(S[rank:].square().sum())
    root = S[:rank].sqrt()
    B, A = Q_B @ (U[:, :rank] * root), (V[:rank].T * root).T @ Q_A.T
    A, B = A.view(rank, *part.A.shape[1:]), B.view(len(B), rank, *part.B.shape[2:])
    dtype = part.A.dtype
    error = (lost / total) ** 0.5 if total else 0.0
    return Part(A.to(dtype), B.to(dtype), part.transposed, error if error > ROUNDING else 0.0)


def _owners(name: str) -> set[str]:
    """The modules that a tensor is in."""
    pieces = name.split(".")
    return {".".join(pieces[:cut]) for cut in range(1, len(pieces))}


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    with files.writing(folder / WEIGHTS[0]):
        save_file(tensors, folder / WEIGHTS[0], metadata={"format": "pt"})


# ---- which form


def resolve(form: Form, rank: int | None, *, statistics: bool = False) -> Literal["merged", "adapter"] | int:
    """What the user's word means for a soup whose exact adapter has this rank; None: of full checkpoints."""
    number = isinstance(form, int) and not isinstance(form, bool) and form > 0
    if not number and form not in ("auto", "merged", "adapter"):
        fix = "adapter is exact; a number is the highest rank that the adapter may have"
        raise SoupError.of("form of the soup", "auto, merged, adapter, or a rank such as 64", repr(form)[:60], fix)
    if form == "merged" or (form == "auto" and (rank is None or statistics or rank > RANKS[-1])):
        return "merged"
    if form == "auto":
        return "adapter"
    if rank is None or statistics:
        found = "a pool of full checkpoints" if rank is None else "running statistics, measured again for the soup"
        fix = "write it as a full model: form='merged'; in a recipe, output.form: merged"
        raise SoupError.of("the soup as an adapter", expected="a pool of LoRA adapters", found=found, fix=fix)
    return form


def described(factored: Factored, form: Literal["merged", "adapter"] | int) -> str:
    """One sentence on what is written, and what else could be."""
    exact = factored.exact_rank
    limit = exact if isinstance(form, str) else min(form, exact)
    fits = next((rank for rank in RANKS if rank >= limit), None)
    served = f"serve it with a rank of {fits}" if fits else f"servers take at most {RANKS[-1]}"
    if form == "merged":
        why = "" if fits else f", more than the {RANKS[-1]} that servers take"
        return f"{WRITTEN_AS} a full model; as an exact adapter it would have rank {exact}{why}"
    if form == "adapter":
        return f"{WRITTEN_AS} an exact adapter of rank {exact}; {served}"
    errors = factored.errors
    worst = max(errors, key=lambda module: errors[module], default="")
    low, high = min(errors.values(), default=0.0), errors.get(worst, 0.0)
    lost = f"relative error of its deltas {low:.2g} to {high:.2g} (most in {worst})" if high else "nothing is lost"
    return f"{WRITTEN_AS} an adapter of rank at most {form} (exact: {exact}); {lost}; {served}"
