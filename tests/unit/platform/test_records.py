"""Ledger, registry, gate, artifacts and runs: the chain of digests and the acts on it."""

import json
import threading
from pathlib import Path

import pytest

from eagleray.platform.artifact import artifact_digest, publish_artifact, verify_artifact
from eagleray.platform.code import code_identity
from eagleray.platform.config import EvalConfig
from eagleray.platform.errors import (
    ConflictError,
    GateRefusedError,
    IntegrityError,
    NotFoundError,
    UsageError,
)
from eagleray.platform.gate import Verdict, judge
from eagleray.platform.ledger import Ledger
from eagleray.platform.registry import Registry
from eagleray.platform.runs import RunStatus, RunStore
from eagleray.platform.storage import Storage


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


def test_equal_records_have_one_digest(store: Storage) -> None:
    ledger = Ledger(store)
    one = ledger.put("run", {"a": 1, "b": 2})
    assert ledger.put("run", {"b": 2, "a": 1}) == one
    assert ledger.put("run", {"a": 1, "b": 3}) != one
    assert ledger.get(one).body == {"a": 1, "b": 2}


def test_lineage_leads_from_the_model_to_the_data(store: Storage) -> None:
    ledger = Ledger(store)
    data = ledger.put("dataset", {"files": 1})
    config = ledger.put("config", {})
    run = ledger.put("run", {}, {"dataset": data, "config": config})
    model = ledger.put("model", {}, {"run": run})
    tree = ledger.lineage(model, "model")
    assert [(depth, node.role) for depth, node in tree.walk()] == [
        (0, "model"), (1, "run"), (2, "config"), (2, "dataset")
    ]  # fmt: skip
    found = tree.find("dataset")
    assert found is not None
    assert found.digest == data
    assert tree.find("nothing") is None


def test_a_changed_record_is_noticed(store: Storage) -> None:
    ledger = Ledger(store)
    digest = ledger.put("run", {"loss": 1.0})
    path = store.path("records", digest[:2], f"{digest}.json")
    path.write_bytes(path.read_bytes().replace(b"1.0", b"0.1"))
    with pytest.raises(IntegrityError, match="changed after"):
        ledger.get(digest)


def test_a_missing_or_malformed_digest_is_named(store: Storage) -> None:
    with pytest.raises(NotFoundError, match="no record"):
        Ledger(store).get("0" * 64)
    with pytest.raises(UsageError, match="not a SHA-256"):
        Ledger(store).get("../../etc/passwd")


def test_a_prefix_completes_only_if_it_is_unambiguous(store: Storage) -> None:
    ledger = Ledger(store)
    digest = ledger.put("run", {})
    assert ledger.complete(digest[:8]) == digest
    with pytest.raises(UsageError, match="shorter than 6"):
        ledger.complete(digest[:5])
    with pytest.raises(NotFoundError):
        ledger.complete("f" * 10 if not digest.startswith("f" * 10) else "e" * 10)
    twin = digest[:8] + "0" * 56
    store.put(b"{}", "records", twin[:2], f"{twin}.json")
    with pytest.raises(UsageError, match="fits 2 records"):
        ledger.complete(digest[:8])


def test_versions_count_up_and_repeat_registrations_do_not(store: Storage) -> None:
    registry = Registry(store)
    assert registry.register("m", "r1", "a1", {}).spec == "m@1"
    assert registry.register("m", "r1", "a1", {}).spec == "m@1"
    assert registry.register("m", "r2", "a2", {}).spec == "m@2"
    assert registry.register("m", "r1", "a1", {}).spec == "m@1"
    assert [version.version for version in registry.versions("m")] == [1, 2]


def test_registrations_at_the_same_time_get_different_versions(store: Storage) -> None:
    registry = Registry(store)
    made: list[int] = []

    def register(number: int) -> None:
        made.append(registry.register("m", f"r{number}", "a", {}).version)

    threads = [threading.Thread(target=register, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(1, 9))


def test_a_spec_is_resolved_by_version_alias_or_newest(store: Storage) -> None:
    registry = Registry(store)
    first = registry.register("m", "r1", "a", {})
    second = registry.register("m", "r2", "a", {})
    assert registry.resolve("m") == second
    registry.promote(first)
    assert registry.resolve("m") == registry.resolve("m@prod") == registry.resolve("m@1") == first
    for spec in ("m@9", "m@canary"):
        with pytest.raises(NotFoundError, match=r"versions: 1, 2; aliases: prod"):
            registry.resolve(spec)
    for spec in ("other", "../m", ""):
        with pytest.raises(NotFoundError, match="registered: m"):
            registry.resolve(spec)


def test_rollback_goes_back_one_promotion_at_a_time(store: Storage) -> None:
    registry = Registry(store)
    versions = [registry.register("m", f"r{n}", "a", {}) for n in range(3)]
    for version in versions:
        registry.promote(version)
    assert registry.rollback("m") == versions[1]
    assert registry.rollback("m") == versions[0]
    with pytest.raises(NotFoundError, match="no earlier version"):
        registry.rollback("m")


def test_promoting_the_promoted_adds_no_history(store: Storage) -> None:
    registry = Registry(store)
    version = registry.register("m", "r", "a", {})
    registry.promote(version)
    registry.promote(version)
    with pytest.raises(NotFoundError):
        registry.rollback("m")


def test_a_lost_race_for_an_alias_changes_nothing(store: Storage) -> None:
    registry = Registry(store)
    one, two = (registry.register("m", f"r{n}", "a", {}) for n in range(2))

    def overtaken(*_: object) -> Verdict:
        registry.promote(two)
        return Verdict(True)

    with pytest.raises(ConflictError):
        registry.promote(one, gate=overtaken)
    assert registry.resolve("m@prod") == two


def test_the_gate_refuses_and_nothing_moves(store: Storage) -> None:
    registry = Registry(store)
    good = registry.register("m", "r1", "a", {"eval_loss": 2.0})
    bad = registry.register("m", "r2", "a", {"eval_loss": 3.0})
    rules = EvalConfig(tolerance=0.1)
    registry.promote(good, gate=lambda new, old: judge(new.metrics, old and old.metrics, rules))
    with pytest.raises(GateRefusedError, match=r"3\.0000 is above 2\.2000") as caught:
        registry.promote(bad, gate=lambda new, old: judge(new.metrics, old and old.metrics, rules))
    assert caught.value.exit_code == 5
    assert registry.resolve("m@prod") == good


@pytest.mark.parametrize(
    ("candidate", "incumbent", "rules", "passes"),
    [
        ({"eval_loss": 2.0}, None, EvalConfig(), True),
        ({"eval_loss": 2.0}, None, EvalConfig(max_loss=1.9), False),
        ({"eval_loss": 2.0}, {"eval_loss": 2.0}, EvalConfig(tolerance=0), True),
        ({"eval_loss": 2.1}, {"eval_loss": 2.0}, EvalConfig(tolerance=0.01), False),
        ({"eval_loss": float("nan")}, None, EvalConfig(), False),
        ({"eval_loss": float("inf")}, None, EvalConfig(), False),
        ({}, None, EvalConfig(), False),
        # Figures on different held-out data say nothing about each other.
        (
            {"eval_loss": 9.0, "eval_data": 1},
            {"eval_loss": 2.0, "eval_data": 2},
            EvalConfig(),
            True,
        ),
    ],
)
def test_the_gate_decides_from_figures_alone(candidate, incumbent, rules, passes) -> None:  # type: ignore[no-untyped-def]
    verdict = judge(candidate, incumbent, rules)
    assert verdict.passed is passes
    assert bool(verdict.reasons) is not passes


@pytest.mark.parametrize("name", ["Bad", "a/b", "", "x" * 64, "a\n"])
def test_bad_model_names_are_refused(store: Storage, name: str) -> None:
    with pytest.raises(UsageError, match="not a name"):
        Registry(store).register(name, "r", "a", {})


def test_an_alias_that_reads_as_a_version_is_refused(store: Storage) -> None:
    registry = Registry(store)
    with pytest.raises(UsageError, match="alias '2' would read as a version"):
        registry.promote(registry.register("m", "r", "a", {}), "2")


def test_an_artifact_is_named_by_its_content(store: Storage) -> None:
    one = publish_artifact(store, lambda folder: (folder / "f").write_bytes(b"x") and None)
    two = publish_artifact(store, lambda folder: (folder / "f").write_bytes(b"x") and None)
    assert one == two == artifact_digest(verify_artifact(store, one))
    assert store.names("artifacts") == [one]
    (store.path("artifacts", one) / "f").write_bytes(b"y")
    with pytest.raises(IntegrityError, match="content of digest"):
        verify_artifact(store, one)
    with pytest.raises(NotFoundError):
        verify_artifact(store, "0" * 64)


def test_a_run_keeps_state_rows_and_events(store: Storage) -> None:
    runs = RunStore(store, clock=lambda: 5.0)
    run_id = runs.create("demo", "train", {"a": 1}, steps=10)
    assert run_id.startswith("demo-")
    assert runs.state(run_id).status is RunStatus.PENDING
    runs.update(run_id, status=RunStatus.RUNNING, step=3)
    runs.add_metrics(run_id, {"step": 3, "loss": 1.0})
    runs.add_event(run_id, "fault", rank=1)
    assert runs.state(run_id).step == 3
    assert not runs.state(run_id).status.is_terminal
    assert runs.config(run_id) == {"a": 1}
    assert runs.metrics(run_id) == [{"loss": 1.0, "step": 3}]
    assert runs.events(run_id) == [{"event": "fault", "rank": 1, "time_s": 5.0}]


def test_a_message_goes_with_the_status_that_it_came_with(store: Storage) -> None:
    runs = RunStore(store)
    run_id = runs.create("tiny", "train", {})
    runs.update(run_id, status=RunStatus.STOPPED, message="interrupted")
    assert runs.update(run_id, step=3).message == "interrupted"
    assert runs.update(run_id, status=RunStatus.RUNNING).message == ""


def test_a_torn_last_row_is_ignored(store: Storage) -> None:
    runs = RunStore(store)
    run_id = runs.create("demo", "train", {})
    runs.add_metrics(run_id, {"step": 1})
    path = store.path("runs", run_id, "metrics.jsonl")
    path.write_bytes(path.read_bytes() + json.dumps({"step": 2}).encode()[:5])
    assert runs.metrics(run_id) == [{"step": 1}]
    assert runs.events(run_id) == []


def test_a_torn_row_spoils_no_later_one(store: Storage) -> None:
    runs = RunStore(store)
    run_id = runs.create("demo", "train", {})
    path = store.path("runs", run_id, "metrics.jsonl")
    path.write_bytes(b'{"st')
    runs.add_metrics(run_id, {"step": 2})
    assert runs.metrics(run_id) == [{"step": 2}]


def test_a_run_that_is_being_created_is_no_run_yet(store: Storage) -> None:
    runs = RunStore(store)
    store.path("runs", "demo-half").mkdir(parents=True)
    assert runs.all() == []
    with pytest.raises(NotFoundError, match="demo-half"):
        runs.state("demo-half")


def test_a_run_takes_one_driver_at_a_time(store: Storage) -> None:
    runs = RunStore(store)
    run_id, other = (runs.create("demo", "train", {}) for _ in range(2))
    with (
        runs.claim(run_id),
        runs.claim(other),
        pytest.raises(UsageError, match="takes only one"),
        RunStore(store).claim(run_id),
    ):
        pass
    with runs.claim(run_id):
        pass


def test_updates_at_the_same_time_lose_no_field(store: Storage) -> None:
    runs = RunStore(store)
    run_id = runs.create("demo", "train", {})
    started = threading.Barrier(2)

    def step_on() -> None:
        started.wait(10)
        for step in range(1, 6):
            runs.update(run_id, step=step)

    def tell() -> None:
        started.wait(10)
        for number in range(1, 6):
            runs.update(run_id, message=f"{number}")

    threads = [threading.Thread(target=step_on), threading.Thread(target=tell)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = runs.state(run_id)
    assert (state.step, state.message) == (5, "5")


def test_an_unknown_run_names_the_newest(store: Storage) -> None:
    runs = RunStore(store)
    run_id = runs.create("demo", "train", {})
    with pytest.raises(NotFoundError, match=run_id):
        runs.state("demo-zzzz")
    assert [state.run_id for state in runs.all()] == [run_id]


def test_the_code_is_identified_by_its_sources() -> None:
    identity = code_identity()
    assert len(identity["source"]) == 64
    assert identity["torch"].startswith("2.13")
