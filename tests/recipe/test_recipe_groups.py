"""What belongs together is one unit: a column of groups, and the pieces of one document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_recipe_language import checkpoints, learned, refusal, task

from stockpot.adapters.splits import Share, cut
from stockpot.errors import DataError, RecipeError
from stockpot.events import Event
from words import TEXTS, write

np = pytest.importorskip("numpy")
pytest.importorskip("transformers")
BOOK = " ".join(TEXTS)  # several times as long as a piece


@pytest.fixture
def home(tmp_path: Path) -> Path:
    checkpoints(tmp_path, 1)
    (tmp_path / "books").mkdir()
    for number in range(6):
        (tmp_path / "books" / f"{number}.txt").write_text(f"{number} {BOOK}", encoding="utf-8")
    return tmp_path


PIECES: dict[str, Any] = {"text": "text", "long_texts": "split", "max_length": 16}


def report_of(made: Any) -> Any:
    return made._sealed._Sealed__sets["report"]


def test_pieces_of_a_document_are_one_group(home: Path) -> None:
    made = task(home, table="books", **PIECES)
    report = report_of(made)
    assert made.fit.columns["input_ids"].shape[1] == 16
    assert [len(torch.unique(data.groups)) for data in (made.fit, report)] == [3, 3]
    assert len(made.fit) > 6
    first = (made.fit.groups == made.fit.groups[0]).nonzero().flatten().tolist()
    text = "".join(learned(home, made, row)[0] for row in first)
    assert text.endswith(BOOK)  # packed: no token of the document is lost
    assert made.score().independent == 3
    for fold, held in made.fit.folds(3, seed=0):
        assert not set(made.fit.groups[fold].tolist()) & set(made.fit.groups[held].tolist())


def test_one_file_needs_to_say_what_separates_its_documents(home: Path) -> None:
    file = home / "all.txt"
    file.write_text("<end>".join(f"{n} {BOOK}" for n in range(5)) + "<end>\n", encoding="utf-8")
    said = refusal(home, table="all.txt", **PIECES)
    assert "expected several documents, the independent units of all scores, found one" in said
    assert "data.separator" in said
    made = task(home, table="all.txt", separator="<end>", **PIECES)
    assert len(torch.unique(made.fit.groups)) + len(torch.unique(report_of(made).groups)) == 5
    write(home / "texts.jsonl", [{"text": text} for text in TEXTS])
    assert "expected a .txt file or a folder of them" in refusal(home, table="texts.jsonl", text="text", separator="x")
    (home / "books" / "0.txt").write_bytes(b"caf\xe9")
    assert "0.txt: expected UTF-8 text" in refusal(home, table="books", **PIECES)


def test_a_note_beside_a_table_is_no_data(home: Path) -> None:
    (home / "set").mkdir()
    write(home / "set" / "all.jsonl", [{"text": text} for text in TEXTS])
    (home / "set" / "readme.txt").write_text("what this is")
    assert len(task(home, table="set", text="text", fit=0.5).fit) == len(TEXTS) // 2


def test_a_group_column_keeps_speakers_together(home: Path) -> None:
    write(home / "said.jsonl", [{"text": text, "speaker": f"s{n % 6}"} for n, text in enumerate(TEXTS)])
    made = task(home, table="said.jsonl", text="text", group="speaker")
    fit, report = made.fit, report_of(made)
    assert [len(torch.unique(data.groups)) for data in (fit, report)] == [3, 3]
    texts = [{learned(home, made, row)[0] for row in range(len(fit))}]
    speakers = {f"s{TEXTS.index(text) % 6}" for text in texts[0]}
    assert len(speakers) == 3
    assert made.score().independent == 3
    assert "data.group: who" in refusal(home, table="said.jsonl", text="text", group="who")
    write(home / "others.jsonl", [{"text": text} for text in TEXTS])  # a second set, of another source
    sets = {"test": 0.5, "shifted": {"path": "others.jsonl"}}
    said = refusal(home, table="said.jsonl", text="text", group="speaker", fit=0.5, report=sets)
    assert "or add it to that file, with a number of its own in each row if samples are independent" in said
    write(home / "said.jsonl", [{"text": text, "speaker": "s"} for text in TEXTS])
    said = refusal(home, table="said.jsonl", text="text", group="speaker", fit=1.0)
    assert "expected at least two groups: they are the independent units of folds and intervals, found one" in said


def test_groups_that_two_splits_share_are_told(home: Path) -> None:
    (home / "parts").mkdir()
    for name, first in (("val", 0), ("test", 2)):
        rows = [{"text": text, "speaker": n % 4 + first} for n, text in enumerate(TEXTS)]
        write(home / "parts" / f"{name}.jsonl", rows)
    heard: list[Event] = []
    task(home, heard.append, table="parts", text="text", group="speaker", fit="val", report="test")
    assert "report data: 2 of 4 groups of data.group are in the fitting data too" in [e.data.get("text") for e in heard]


def test_groups_come_from_the_function_where_a_function_makes_the_data(home: Path) -> None:
    with pytest.raises(RecipeError, match=r"data.group: let the python function return stockpot.task.Data.of"):
        task(home, python="net:data", group="speaker")


@pytest.mark.parametrize("seed", range(8))
def test_shares_of_whole_groups_are_near_what_was_asked_for(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = random.integers(0, 40, 400)
    shares = {"train": Share(fraction=0.5), "fit": Share(fraction=0.25), "report": Share(count=100)}
    rows = cut(400, None, shares, seed, "here", groups=groups)
    assert sorted(np.concatenate(list(rows.values()))) == list(range(400))
    for name, wanted in {"train": 200, "fit": 100, "report": 100}.items():
        assert abs(len(rows[name]) - wanted) <= 15  # at most a group or so of about ten
        others = np.concatenate([rows[other] for other in rows if other != name])
        assert not set(groups[rows[name]]) & set(groups[others])


def test_every_share_gets_a_group_or_the_error_says_how_many_there_are() -> None:
    shares = {"fit": Share(fraction=0.5), "report": Share(fraction=0.5)}
    rows = cut(10, None, shares, 0, "here", groups=np.array([0] * 9 + [1]))
    assert sorted(map(len, rows.values())) == [1, 9]
    with pytest.raises(DataError, match=r"here has 10, in 1 group\.\n  Fix: give data of more groups"):
        cut(10, None, shares, 0, "here", groups=np.zeros(10))
