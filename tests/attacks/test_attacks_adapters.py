"""PEFT folders of strangers: configurations that lie or hang, factors that do not fit, bases that lead elsewhere."""

from __future__ import annotations

import json
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from attacks.threats_archives import ARCHIVES
from attacks.threats_pickles import PICKLES
from stockpot import Pool
from stockpot.cli.app import app
from stockpot.errors import StockpotError
from stockpot.pool.peft_folders import _patterns, _places

PREFIX = "base_model.model."
BASE = {
    "layer.q.weight": torch.randn(6, 4),
    "layer.q.bias": torch.zeros(6),
    "conv.weight": torch.randn(6, 4, 3, 3),
    "embed.weight": torch.randn(5, 4),
}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}
A, B = f"{PREFIX}layer.q.lora_A.weight", f"{PREFIX}layer.q.lora_B.weight"


def factors(module: str = "layer.q", seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    left, right = torch.randn(2, 4, generator=draw), torch.randn(6, 2, generator=draw)
    return {f"{PREFIX}{module}.lora_A.weight": left, f"{PREFIX}{module}.lora_B.weight": right}


def folders(
    place: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    base: dict[str, torch.Tensor] | None = None,
) -> list[Path]:
    """Two adapters on a base beside them; the first one is changed."""
    (place / "base").mkdir(parents=True)
    save_file(base or BASE, place / "base" / "model.safetensors")
    (place / "base" / "config.json").write_text("{}")
    for k in range(2):
        folder = place / "adapters" / f"a{k}"
        folder.mkdir(parents=True)
        whole = {**CONFIG, "base_model_name_or_path": str(place / "base"), **((config or {}) if k == 0 else {})}
        (folder / "adapter_config.json").write_text(json.dumps(whole))
        save_file(tensors if k == 0 and tensors else factors(seed=k), folder / "adapter_model.safetensors")
    return [place / "adapters" / "a0", place / "adapters" / "a1"]


def refused(where: list[Path], words: str, **options: Any) -> None:
    began = time.process_time()
    with pytest.raises(StockpotError, match=words) as caught:
        Pool.open(where, **options)
    assert time.process_time() - began < 2
    assert len(str(caught.value)) < 4000
    str(caught.value).encode("utf-8")


def test_honest_ones_open(tmp_path: Path) -> None:
    """Or the refusals below would mean nothing."""
    pool = Pool.open(folders(tmp_path))
    made, delta = pool.tensor(0, "layer.q.weight"), factors()
    torch.testing.assert_close(made, BASE["layer.q.weight"] + 2 * delta[B] @ delta[A])


# ---- configurations


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"peft_type": "LORA", "r": ' + "9" * 5000 + "}", "no valid JSON"),
        ('{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}', "a positive number for lora_alpha, found nan"),
        ('{"peft_type": "LORA", "r": 2, "lora_alpha": 1e400}', "a positive number for lora_alpha, found inf"),
        ('{"peft_type": "LORA", "r": 2, "lora_alpha": -4}', "a positive number for lora_alpha, found -4"),
        ('{"peft_type": "LORA", "r": true, "lora_alpha": 4}', "a positive number for r, found True"),
        ('{"peft_type": "LORA", "r": 2, "r": 3}', "the key 'r' appears twice"),
        ('{"peft_type": "LORA", "\\ud800": 1}', "does not know: "),
        ('"LORA"', "peft_type LORA"),
        ("\0" * 100, "no valid JSON"),
    ],
)
def test_configurations_that_are_none(tmp_path: Path, content: str, words: str) -> None:
    where = folders(tmp_path)
    (where[0] / "adapter_config.json").write_text(content)
    refused(where, words)


def test_a_configuration_has_a_size_limit(tmp_path: Path) -> None:
    where = folders(tmp_path)
    with (where[0] / "adapter_config.json").open("wb") as file:
        file.truncate(2**30)
    refused(where, "more than such a file has")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 3}, "expected rank 3, as adapter_config.json says"),
        ({"rank_pattern": {"q": 1e9}}, r"expected rank 1e\+09"),
        ({"rank_pattern": ["q"]}, "expected rank_pattern as a table of names, found"),
        ({"alpha_pattern": "q"}, "expected alpha_pattern as a table of names, found 'q'"),
        ({"rank_pattern": {"q": None}}, "a positive number for r, found None"),
        ({"use_rslora": "false"}, "expected use_rslora true or false, found 'false'"),
        ({"fan_in_fan_out": 1}, "expected fan_in_fan_out true or false, found 1"),
        ({"rank_pattern": {f"x{n}": 2 for n in range(200_000)}}, "a bearable number of patterns in rank_pattern"),
        ({"rank_pattern": {"a" * 501: 2}}, "it is too long"),
        ({"rank_pattern": {"(": 2}}, "a group without an end"),
        ({"rank_pattern": {"(" * 200 + ")" * 200: 2}}, "at an odd place"),
        ({"rank_pattern": {"a)|(b": 2}}, "at an odd place"),
        ({"rank_pattern": {"(a+)+b": 2}}, "a repeated group"),
        ({"rank_pattern": {"q{1,9}": 2}}, "at an odd place"),
        ({"rank_pattern": {"x": 1, "[b-a]+": 2}}, "bad character range b-a"),
        ({"rank_pattern": {"(?=q)": 2}}, "at an odd place"),
        ({"rank_pattern": {r"(q)\1": 2}}, "more than letters, classes"),
    ],
)
def test_configurations_that_lie_or_would_hang(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    refused(folders(tmp_path, fields), words)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "pattern", ["a?" * 100 + "a" * 100 + "b", "(a|aa)" * 60 + "b", "a*a*a*b", ".*.*.*b", "(.*|a)(.*|a)(.*|a)b"]
)
def test_patterns_that_keep_a_matcher_busy_take_no_time(tmp_path: Path, pattern: str) -> None:
    """Python's own takes minutes to ages for each of them."""
    where = folders(tmp_path, {"rank_pattern": {pattern: 7}, "target_modules": None}, factors("a" * 480))
    refused(where, "not in the base: aaaa")


def test_patterns_mean_what_they_mean_to_peft() -> None:
    draw = random.Random(0)
    parts = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "1", "a*", ".*", "b+", "[ab]?", "(a|b)", "(a|b1)?", "^", "$"]
    names = ["a", "b", "a.b", "aa.b1", "b.a.b", "ab", "1", "a.1", "b1b1", "aab.ab", "layers.10.q", "layers.1.q"]
    for _ in range(3000):
        pattern = "".join(draw.choice(parts) for _ in range(draw.randrange(1, 7)))
        (matches, _) = _patterns(Path(), {"rank_pattern": {pattern: 1}}, "rank_pattern", 1)[0]
        for name in names:
            expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
            assert matches(name, _places(name)) == expected, (pattern, name)


# ---- tensors


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({A: torch.ones(2, 4), B: torch.ones(6, 2, 1, 2)}, "two factors that can be multiplied"),
        ({A: torch.ones(2), B: torch.ones(6, 2)}, "expected rank 2"),
        ({A: torch.ones(2, 2**20), B: torch.ones(2**20, 2)}, r"has \[1048576, 1048576\] instead of \[6, 4\]"),
        ({A: torch.ones(2, 0), B: torch.ones(6, 2)}, r"has \[6, 0\] instead"),
        ({**factors(), f"{PREFIX}layer.q.weight": torch.ones(6, 4)}, "and the product itself"),
        ({**factors(), f"{PREFIX}layer.q.lora_embedding_A": torch.ones(2, 5)}, "one of the two missing, or more"),
        ({A: torch.ones(2, 4, dtype=torch.int8), B: torch.ones(6, 2)}, "factors of a floating-point type"),
        ({**factors(), f"{PREFIX}layer.q.bias": torch.ones(6, dtype=torch.int8)}, "is float32 there, int8 here"),
        ({**factors(), f"{PREFIX}layer.q.bias": torch.ones(6, dtype=torch.complex64)}, "complex64 here"),
        (
            {**factors(), f"{PREFIX}layer.q.base_layer.bias": torch.ones(6), f"{PREFIX}layer.q.bias": torch.zeros(6)},
            "one value for layer.q.bias, found two that differ",
        ),
        (factors("a." * 50_000 + "q"), "names of at most 500 letters"),
        (factors("." * 50_000), "names of at most 500 letters"),
        (factors("layer\n.q"), "it does not know"),
    ],
)
def test_tensors_that_lie(tmp_path: Path, tensors: dict[str, torch.Tensor], words: str) -> None:
    refused(folders(tmp_path, None, tensors), words)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int64, torch.complex64])
def test_a_base_whose_weights_are_no_real_numbers_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    where = folders(tmp_path, base={**BASE, "layer.q.weight": torch.ones(6, 4, dtype=dtype)})
    refused(where, f"{str(dtype)[6:]} there|quantised ones")


def test_a_quantised_base_is_refused(tmp_path: Path) -> None:
    state = {"layer.q.weight": torch.ones(6, 4).to(torch.float8_e4m3fn), "layer.q.weight_scale": torch.ones(6, 1)}
    refused(folders(tmp_path, base={**BASE, **state}), "quantised ones")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threat", [*PICKLES, *ARCHIVES], ids=str)
def test_pickles_beside_a_configuration_are_looked_through(tmp_path: Path, threat: Any) -> None:
    made = threat.make(tmp_path)
    if made.is_dir():
        pytest.skip("a folder, which is no adapter_model.bin")
    where = folders(tmp_path / "pool")
    (where[0] / "adapter_model.safetensors").unlink()
    made.rename(where[0] / "adapter_model.bin")
    refused(where, r"adapter_model\.bin|a0: expected")


# ---- what a folder leads to


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes FIFOs")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "circle", "text"])
def test_places_that_are_no_files(tmp_path: Path, name: str, kind: str) -> None:
    where = folders(tmp_path)
    if name.startswith("adapter_model"):
        (where[0] / "adapter_model.safetensors").unlink()
    path = where[0] / name
    path.unlink(missing_ok=True)
    (tmp_path / "secret").write_text("a line that nobody may see")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"circle": path, "text": tmp_path / "secret"}.get(kind, Path(kind)))
    with pytest.raises(StockpotError) as caught:
        Pool.open(where)
    assert "a line" not in str(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("of", ["adapters", "argument"])
@pytest.mark.parametrize(
    "base", ["~nobody_of_that_name/x", "x" * 5000, "x\0y", "\ud800", "//host/share", r"\\host\share", "/dev/zero", "/",
             "../" * 500, "", "[]", "http://host/x", "a/b"],
)  # fmt: skip
def test_bases_that_are_nowhere(tmp_path: Path, base: str, of: str) -> None:
    where = folders(tmp_path)
    for folder in where:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base}))
    refused(where, "expected a", **({} if of == "adapters" else {"base": base}))


def test_an_adapter_on_itself_or_on_another_adapter_is_refused(tmp_path: Path) -> None:
    where = folders(tmp_path)
    refused(where, "not in the base", base=where[0])


def test_the_base_that_adapters_name_is_read_as_a_checkpoint_only(tmp_path: Path) -> None:
    """A stranger's adapter may name any path here: of what lies there nothing but tensors that fit is taken."""
    where = folders(tmp_path)
    (tmp_path / "secret.bin").write_text("a line that nobody may see")
    for folder in where:
        file = folder / "adapter_config.json"
        named = {"base_model_name_or_path": str(tmp_path / "secret.bin")}
        file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
    with pytest.raises(StockpotError, match="expected the zip format") as caught:
        Pool.open(where)
    assert "a line" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes FIFOs")
@pytest.mark.timeout(20)
def test_a_revision_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library opens whatever file `refs/REVISION` is, and waits for a FIFO, or reads a device until memory ends."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--a--b" / "refs").mkdir(parents=True)
    os.mkfifo(tmp_path / "fifo")
    for revision in ("../../../fifo", str(tmp_path / "fifo"), "x/../../../../fifo", "..", "x\ny"):
        where = folders(tmp_path / str(len(revision)))
        for folder in where:
            file = folder / "adapter_config.json"
            named = {"base_model_name_or_path": "a/b", "revision": revision}
            file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
        refused(where, "neither as a path here nor in the Hugging Face cache")


@pytest.mark.parametrize("key", ["pool", "table"])
def test_a_home_of_nobody_is_no_place(tmp_path: Path, key: str) -> None:
    for k in range(2):
        save_file({"weight": torch.ones(2, 1) * k, "bias": torch.ones(2)}, tmp_path / f"m{k}.safetensors")
    (tmp_path / "a.csv").write_text("x,y\n1,0\n2,1\n")
    (tmp_path / "net.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(1, 2)\n")
    places = {"pool": "'*.safetensors'", "table": "a.csv", key: "~nobody_of_that_name/x"}
    recipe = f"pool: {{path: {places['pool']}}}\nmodel: {{python: 'net:make'}}\nmethod: {{name: uniform}}\n"
    recipe += f"data: {{table: {places['table']}, fit: 2, label: y, features: [x]}}\noutput: {{dir: run}}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    result = CliRunner().invoke(app, ["cook", str(tmp_path / "recipe.yaml")])
    assert result.exit_code == 1
    assert "nobody_of_that_name" in result.stderr
    assert "unexpected" not in result.stderr
