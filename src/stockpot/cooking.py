"""The one way in: from a pool and a task to a soup by one method, or to a comparison of several.

What is asked for is checked here, before anything is read. What follows is `run/job.py` where it is recorded, shared
among ranks or a comparison; one method by itself is decided at once.
"""

from __future__ import annotations

import html
import webbrowser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stockpot import ranks, table, words
from stockpot.adapters.trackers import Track
from stockpot.errors import MethodError, RunError
from stockpot.events import Event, Listener, ignore
from stockpot.pool import Pool
from stockpot.progress import shown
from stockpot.run.directory import RecipeFacts
from stockpot.run.job import Job, name_strangers, outlook, threads_for, watching
from stockpot.run.verdict import BASELINE, advised, compared_on, differences
from stockpot.soup.adapter import Form
from stockpot.soups.problem import Problem
from stockpot.soups.registry import DEFAULT, METHODS, preset_for, repetitions, settings_for, settings_in_comparison
from stockpot.soups.result import Result, decided, report_on
from stockpot.soups.settings import Settings, block_size_for
from stockpot.task import Task


class Comparison(dict[str, Result]):
    """Results by method, and which of them to take. Shown, it is a table with the verdict under it."""

    recommended: str | None = None  # the soup with the highest score on held-out data, if there is one
    verdict: str = ""
    failed: Mapping[str, str] = {}  # method -> why
    absent: Mapping[str, str] = {}  # method that was left out, or has no meaning for this task -> why
    reused: tuple[str, ...] = ()  # finished by an earlier call
    path: Path | None = None  # the run directory
    soup: Path | None = None  # the saved soup in it

    def __init__(self, results: Mapping[str, Result] | None = None, **facts: Any) -> None:
        super().__init__(results or {})
        vars(self).update(facts)  # those above

    @property
    def best(self) -> Result | None:
        """The result of the recommended method."""
        return None if self.recommended is None else self[self.recommended]

    def rows(self) -> list[table.Row]:
        kind = compared_on(self)
        known = differences(self, kind)
        return [
            result.row(
                kind, known.get(name), chosen=name == self.recommended, baseline=name == BASELINE,
                recommended=name == self.recommended and advised(self.verdict),
            )
            for name, result in self.items()
        ]  # fmt: skip

    def table(self) -> list[dict[str, Any]]:
        """Plain numbers, one dict per method and set of data: `pandas.DataFrame(comparison.table())`."""
        return table.as_numbers(self.rows())

    def report(self, show: bool = False) -> Path:
        """Write the report of the run and return the page's path; `show` opens it in a browser."""
        if self.path is None:
            fix = 'give the comparison a directory, compare(..., run="run"), or print it'
            raise RunError.of("report of a comparison", expected="a run directory", found="none", fix=fix)
        from stockpot.report import write_report

        page = write_report(self.path)
        if show:
            webbrowser.open(page.absolute().as_uri())
        return page

    def _more(self) -> list[str]:
        missing = [f"{name} failed: {why}" for name, why in self.failed.items()]
        return [*self.verdict.splitlines(), *(f"{name}: {why}" for name, why in self.absent.items()), *missing]

    def __repr__(self) -> str:
        return "\n".join([*table.as_text(self.rows()), "", *map(words.harmless, self._more())]) if self else "{}"

    def _repr_html_(self) -> str:
        more = "".join(f"<p>{html.escape(words.harmless(line))}</p>" for line in self._more())
        return table.as_html(self.rows()) + more if self else "{}"


def cook(
    pool: Pool,
    task: Task,
    method: str = DEFAULT,
    *,
    run: str | Path | None = None,
    overwrite: bool = False,
    preset: str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    donor: int | str = 0,
    form: Form = "auto",
    progress: bool | None = None,
    track: Track | None = None,
    listen: Listener = ignore,
    recipe: RecipeFacts | None = None,
    **settings: Any,
) -> Result:
    """Find mixing weights by one method and score the soup; the report data is touched once, at the end.

    `settings` are fields of `Settings`. `preset="authors"` learns as the paper's released code does. `include`,
    `exclude` and `donor` are those of `Layout.of`, `form` that of `Soup.save`. Afterwards `task.model` holds the soup's
    weights. `run` is a directory for records, soup and whatever is needed to go on after an interruption; `overwrite`
    replaces an earlier run there. More than two seconds of work show a bar in a terminal or a notebook;
    `progress=True` shows it anywhere, `progress=False` nowhere. `track` is tensorboard, mlflow or wandb.
    """
    chosen = settings_for(method, preset, **settings)
    _check_fits({method: chosen}, pool, task)
    ranks.join()
    if run is None and track is None and not ranks.active():
        choices: dict[str, Any] = {"include": include, "exclude": exclude, "donor": donor, "form": form}
        with shown(progress, listen) as tell, threads_for(pool, task):
            problem = Problem(pool, task, listen=watching(pool, tell), **choices)
            name_strangers(pool, tell)
            tell(Event("start", outlook({method: chosen}, pool, task)))
            result = decided(problem, method, chosen, preset_for(method, preset))
            return dict(report_on(problem, {method: result}))[method] if task.has_report else result
    every = {method: chosen}
    if run is not None and METHODS[method].scores_ingredients:
        # The best ingredient can be shown beside it for nothing.
        every = {BASELINE: settings_for(BASELINE, seed=chosen.seed), **every}
    layout = _layout(include, exclude, donor)
    job = Job(pool, task, every, preset, layout, listen, progress=progress, track=track, form=form, wanted=method)
    job.cooked(run, overwrite, recipe or RecipeFacts(kind="cook"))
    return job.results[method]


def compare(
    pool: Pool,
    task: Task,
    methods: Iterable[str] | None = None,
    *,
    run: str | Path | None = None,
    overwrite: bool = False,
    preset: str | None = None,
    each: Mapping[str, Mapping[str, Any]] | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    donor: int | str = 0,
    form: Form = "auto",
    progress: bool | None = None,
    track: Track | None = None,
    listen: Listener = ignore,
    recipe: RecipeFacts | None = None,
    **settings: Any,
) -> Comparison:
    """Every method on the same pool and data; all decisions are made before the report data is touched.

    `each={"mehl+": {"steps": 500}}` are settings of one method; the others reach every method they concern. Where no
    `methods` are named, one that would do the same as another is left out, such as `mehl` with all models in one block.
    A method that fails does not cost the others: it is in `failed`. `run`, `progress` and the rest are as for `cook`.
    """
    names = list(METHODS) if methods is None else list(methods)
    chosen = {name: settings_in_comparison(name, preset, settings, each or {}) for name in names}
    _check_fits(chosen, pool, task)
    layout = _layout(include, exclude, donor)
    absent = repetitions(chosen, preset, len(pool)) if methods is None else {}
    chosen = {name: one for name, one in chosen.items() if name not in absent}
    job = Job(pool, task, chosen, preset, layout, listen, progress=progress, track=track, form=form, absent=absent)
    facts = job.cooked(run, overwrite, recipe or RecipeFacts(kind="compare"))
    return Comparison(job.results, **facts)


def _layout(include: Iterable[str] | None, exclude: Iterable[str] | None, donor: int | str) -> dict[str, Any]:
    """Choices of `Layout.of` as values that can be used twice and written down."""

    include, exclude = (x if x is None or isinstance(x, str) else list(x) for x in (include, exclude))
    return {"include": include, "exclude": exclude, "donor": donor}


def _check_fits(chosen: Mapping[str, Settings], pool: Pool, task: Task) -> None:
    """Before anything is read: a pool, block sizes that it can have, folds that the data can be cut into."""
    if not isinstance(pool, Pool):
        raise MethodError.of(
            "pool",
            expected="a Pool",
            found=f"{type(pool).__name__} {str(pool)[:60]!r}",
            fix="open the checkpoints first: Pool.open(folder)",
        )
    for name, settings in chosen.items():
        if METHODS[name].learned:
            block_size_for(settings, len(pool))
            if settings.folds > 1:
                task.fit.folds(settings.folds, settings.seed)
