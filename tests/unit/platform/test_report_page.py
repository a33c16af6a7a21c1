"""The page of a run: whole in itself, safe, the same each time, and true in every state."""

import base64
import hashlib
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagleray.platform.errors import NotFoundError
from eagleray.platform.ledger import Ledger
from eagleray.platform.registry import Registry
from eagleray.platform.report import (
    Summary,
    SweepSummary,
    masked,
    read_facts,
    render_report,
    summarize,
    write_report,
)
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage

RAW, SHARD = "a" * 64, "b" * 64
EVIL = "<script>document.title='owned'</script> ]]> --> \"'&"
CONFIG: dict[str, Any] = {
    "name": "sotu", "data": {"sources": [{"path": "data/*.jsonl"}]}, "redis": {"url": None},
    "train": {"steps": 20, "optimizer": {"lr": 0.01}}, "model": {"num_layers": 2, "dim": 64},
    "tune": {"num_trials": 3, "space": {"train.optimizer.lr": {
        "kind": "float", "low": 1e-4, "high": 1.0, "log": True}}},
}  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class Page(html.parser.HTMLParser):
    """What a browser would see: texts, ids, scripts, addresses; its elements must balance."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.references: list[str] = []
        self.open_tags: list[str] = []
        self.policy = ""
        self.feed(text)
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in self.VOID:
            self.open_tags.append(tag)
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if tag == "script" and given.get("type") != "application/json":
            self.scripts.append("")
        self.ids += [given["id"] or ""] if "id" in given else []
        self.handlers += [name for name in given if name.startswith("on")]
        self.references += (given.get("aria-labelledby") or "").split()
        self.addresses += [str(given[name]) for name in ("src", "href", "action") if name in given]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open_tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] == "script" and self.scripts:
            self.scripts[-1] += data
        elif self.open_tags and self.open_tags[-1] not in ("script", "style"):
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(part for part in self.texts if part)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def runs(storage: Storage, clock: Clock) -> RunStore:
    return RunStore(storage, clock)


def add_rows(runs: RunStore, run_id: str, attempt: int, steps: range, clock: Clock) -> None:
    for step in steps:
        runs.add_metrics(
            run_id,
            {
                "attempt": attempt, "step": step, "loss": 6.0 - step / 10, "grad_norm": 1.0,
                "eval_loss": 5.5 - step / 10 if step % 5 == 0 else None, "lr": 1e-3,
                "tokens_per_s": 2000.0, "mfu": 0.3, "data_s": 0.1, "compute_s": 0.7,
                "communication_s": 0.1, "checkpoint_s": 0.0, "eval_s": 0.1, "time_s": clock(),
            },
        )  # fmt: skip


@pytest.fixture
def finished(storage: Storage, runs: RunStore, clock: Clock) -> str:
    """A run that lost a worker, came back, and was registered as a promoted model."""
    run_id = runs.create("sotu", "train", CONFIG, steps=20)
    runs.add_event(run_id, "attempt", attempt=1, world_size=2, token="t1")
    add_rows(runs, run_id, 1, range(1, 13), clock)
    runs.add_event(run_id, "checkpoint", step=10, digest="c" * 64)
    runs.add_event(run_id, "fault", attempt=1, ranks=[1], message=f"rank 1: {EVIL}")
    runs.add_event(run_id, "checkpoint_failed", step=12, message="disk full")
    runs.add_event(run_id, "attempt", attempt=2, world_size=2, token="t2")
    add_rows(runs, run_id, 2, range(11, 21), clock)
    ledger = Ledger(storage)
    dataset = ledger.put("dataset", {"digest": "d" * 64, "manifest": {
        "sources": [{"name": "speeches.jsonl", "sha256": RAW, "bytes": 1000, "documents": 3}],
        "tokenizer": {"sha256": "e" * 64},
        "splits": {"train": {"samples": 10, "shards": [
            {"file": "train-00000.bin", "sha256": SHARD, "tokens": 99}]}},
    }})  # fmt: skip
    code = ledger.put("code", {"version": "0.1.0", "source": "f" * 64, "torch": "2.13"})
    run = ledger.put(
        "run",
        {"run_id": run_id, "audit": {"samples": 640, "missing": 0, "doubled": 0, "steps": 20}},
        {"dataset": dataset, "code": code},
    )
    checkpoint = ledger.put("checkpoint", {"step": 20, "manifest": "9" * 64}, {"run": run})
    model = ledger.put(
        "model", {"artifact": "8" * 64, "num_parameters": 816_000}, {"checkpoint": checkpoint}
    )
    version = Registry(storage).register("sotu", model, "8" * 64, {"eval_loss": 3.5})
    Registry(storage).promote(version, "prod")
    runs.update(
        run_id, status=RunStatus.FINISHED, step=20,
        results={"model": version.spec, "record": model, "eval_loss": 3.5},
    )  # fmt: skip
    return run_id


def sweep(runs: RunStore, count: int = 3) -> str:
    run_id = runs.create("sotu-sweep", "sweep", CONFIG)
    for number in range(count):
        params = {"train.optimizer.lr": 10.0 ** -(number + 1)}
        runs.add_event(run_id, "trial", number=number, run=f"sotu-{number}", params=params)
        runs.add_event(run_id, "value", number=number, steps=5, value=4.0 - number / 10)
        runs.add_event(run_id, "trial_end", number=number, status="finished")
    return run_id


def page_of(storage: Storage, run_id: str) -> Page:
    return Page(write_report(storage, run_id).read_text(encoding="utf-8"))


def test_a_finished_run_shows_its_figures_faults_and_lineage(
    storage: Storage, finished: str
) -> None:
    page = page_of(storage, finished)
    for words in (
        finished, "finished", "sotu@1", "prod", "3.500", "perplexity 33.12", "816k", "MFU",
        "2 layers, width 64", "fault 1", "Exactly once: 640 samples", "through 1 fault",
        "raw file speeches.jsonl", "3 documents, 1 kB", RAW, SHARD, "checkpoint_failed",
        "train.optimizer.lr", "eagleray 0.1.0, torch 2.13",
    ):  # fmt: skip
        assert words in page.text, words
    assert "resume" not in page.text


def test_the_page_needs_nothing_but_itself(storage: Storage, finished: str) -> None:
    text = write_report(storage, finished).read_text(encoding="utf-8")
    assert Page(text).addresses == []
    assert not re.search(r"url\(|@import|https?://", text)
    assert len(text) < 200_000


def test_only_the_pages_own_script_may_run(storage: Storage, finished: str) -> None:
    page = page_of(storage, finished)
    [script] = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.policy
    assert page.policy.startswith("default-src 'none'")
    assert page.handlers == []


def test_what_a_run_says_is_shown_and_never_run(
    storage: Storage, runs: RunStore, finished: str
) -> None:
    runs.update(finished, status=RunStatus.FAILED, message=EVIL)
    runs.add_event(finished, EVIL, note=EVIL)
    page = page_of(storage, finished)
    assert len(page.scripts) == 1
    assert "document.title='owned'" not in page.scripts[0]
    assert page.text.count("document.title='owned'") >= 3
    hover = re.findall(
        r'<script type="application/json">(.*?)</script>',
        render_report(read_facts(storage, finished)),
    )
    assert any("document.title" in mark[1] for mark in json.loads(hover[0])["marks"])


def test_every_picture_has_a_title_and_ids_are_unique(storage: Storage, finished: str) -> None:
    page = page_of(storage, finished)
    assert len(page.ids) == len(set(page.ids))
    assert len(page.references) >= 14
    assert set(page.references) <= set(page.ids)


def test_equal_records_give_equal_bytes(storage: Storage, finished: str) -> None:
    first = write_report(storage, finished).read_bytes()
    assert write_report(storage, finished).read_bytes() == first


def test_figures_for_scripts(storage: Storage, finished: str) -> None:
    summary = summarize(read_facts(storage, finished))
    assert isinstance(summary, Summary)
    assert (summary.attempts, summary.faults, summary.steps_redone) == (2, 1, 2)
    assert (summary.samples, summary.missing, summary.doubled) == (640, 0, 0)
    assert summary.time_shares["compute"] == pytest.approx(0.7)
    assert summary.lost_s == 5.0
    assert json.loads(json.dumps(summary.__dict__))["train_loss"] == 4.0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RunStatus.FAILED, ("This run failed at step 7: no room", "eagleray resume {}")),
        (RunStatus.STOPPED, ("This run was stopped at step 7", "eagleray resume {}")),
        (RunStatus.RUNNING, ("This run is running",)),
        (RunStatus.PENDING, ("This run has not begun",)),
    ],
)
def test_an_unfinished_run_says_so_and_shows_what_there_is(
    storage: Storage, runs: RunStore, clock: Clock, status: RunStatus, words: tuple[str, ...]
) -> None:
    run_id = runs.create("sotu", "train", CONFIG, steps=20)
    runs.add_event(run_id, "attempt", attempt=1, world_size=2)
    add_rows(runs, run_id, 1, range(1, 8), clock)
    message = "no room" if status is RunStatus.FAILED else ""
    runs.update(run_id, status=status, step=7, message=message)
    page = page_of(storage, run_id)
    for each in words:
        assert each.format(run_id) in page.text
    assert "audited when the run finishes" in page.text
    assert "gets its records when it finishes" in page.text


def test_a_run_of_which_nothing_is_known_still_has_a_page(storage: Storage, runs: RunStore) -> None:
    run_id = runs.create("sotu", "trial", {})
    storage.path("runs", run_id, "config.json").unlink()
    page = page_of(storage, run_id)
    assert "Nothing was reported yet." in page.text
    assert "No configuration was stored." in page.text
    with pytest.raises(NotFoundError, match="no run 'sotu-none'"):
        write_report(storage, "sotu-none")


def test_samples_that_are_not_exactly_once_are_named(storage: Storage, runs: RunStore) -> None:
    run_id = runs.create("sotu", "train", CONFIG)
    runs.update(
        run_id, status=RunStatus.FINISHED, results={"samples": 9, "missing": 1, "doubled": 2}
    )
    assert "Not exactly once: 9 samples" in page_of(storage, run_id).text


def test_a_damaged_record_costs_the_lineage_and_nothing_else(
    storage: Storage, finished: str
) -> None:
    digest = RunStore(storage).state(finished).results["record"]
    storage.path("records", digest[:2], f"{digest}.json").write_text("{}")
    page = page_of(storage, finished)
    assert "was changed after it was written" in page.text
    assert "3.500" in page.text


def test_secrets_are_never_shown(storage: Storage, runs: RunStore) -> None:
    config = {
        **CONFIG, "redis": {"url": "redis://user:hunter2@cache:6379/0"},
        "serve": {"api_key": "er-0123456789abcdefghij", "nested": [{"password": "hunter3"}]},
    }  # fmt: skip
    run_id = runs.create("sotu", "train", config)
    runs.add_event(
        run_id, "fault", attempt=1, ranks=[0],
        message="cannot reach redis://:hunter4@cache, Authorization: Bearer hunter5",
    )  # fmt: skip
    runs.update(run_id, status=RunStatus.FAILED, message="key er-0123456789abcdefghij refused")
    text = write_report(storage, run_id).read_text(encoding="utf-8")
    assert "hunter" not in text
    assert "0123456789abcdefghij" not in text
    assert "redis://**********@cache:6379/0" in text
    assert masked({"tokens": 3, "token": None, "eod": "x"}) == {
        "tokens": 3, "token": None, "eod": "x"
    }  # fmt: skip


def test_a_sweep_lists_its_trials_best_first(storage: Storage, runs: RunStore) -> None:
    run_id = sweep(runs)
    runs.update(run_id, status=RunStatus.FINISHED)
    page = page_of(storage, run_id)
    summary = summarize(read_facts(storage, run_id))
    assert isinstance(summary, SweepSummary)
    assert (summary.best_number, summary.best_value, summary.planned) == (2, 3.8, 3)
    assert summary.ends == {"finished": 3}
    order = [page.text.index(f" sotu-{number} ") for number in (2, 1, 0)]
    assert order == sorted(order)
    for words in ("Value over steps", "Search progress", "train.optimizer.lr (log)", "0.001"):
        assert words in page.text


@pytest.mark.parametrize("count", [0, 2])
def test_a_sweep_that_was_interrupted_says_how_to_go_on(
    storage: Storage, runs: RunStore, count: int
) -> None:
    run_id = sweep(runs, count)
    runs.update(run_id, status=RunStatus.STOPPED, message="interrupted")
    assert f"eagleray tune --resume {run_id}" in page_of(storage, run_id).text


def test_a_record_that_many_trials_share_is_drawn_once(storage: Storage, runs: RunStore) -> None:
    ledger = Ledger(storage)
    data = ledger.put("imported", {"files": {"w.safetensors": RAW}})
    inputs = {
        f"trial-{n:04d}": ledger.put("checkpoint", {"step": n}, {"dataset": data})
        for n in range(500)
    }
    record = ledger.put("sweep", {"sweep_id": "s"}, inputs)
    run_id = sweep(runs)
    runs.update(run_id, status=RunStatus.FINISHED, results={"record": record})
    page = page_of(storage, run_id)
    assert page.text.count(RAW) == 1
    assert "(see above)" in page.text
    assert "more" in page.text
    assert page.text.count("after step") < 401


def test_the_parts_of_the_page_are_package_data() -> None:
    from importlib import resources

    folder = resources.files("eagleray.platform.report")
    names = {Path(str(entry)).name for entry in folder.iterdir()}
    assert {"page.html", "page.css", "page.js"} <= names


def test_every_colour_has_a_dark_twin() -> None:
    from importlib import resources

    style = resources.files("eagleray.platform.report").joinpath("page.css").read_text()
    light, dark = (
        set(re.findall(r"(--[a-z-]+):", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    )
    used = set(re.findall(r"var\((--[a-z-]+)", style)) - {"--tint"}
    assert light == dark
    assert used <= light
