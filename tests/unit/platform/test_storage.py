"""Storage: whole or absent, whatever happens in between."""

import os
import threading
from pathlib import Path

import pytest

from eagleray.platform.errors import ConflictError, NotFoundError, StorageError
from eagleray.platform.storage import Storage, canonical_json, digest_bytes, digest_file


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "store")


def test_what_is_put_is_read_back(store: Storage) -> None:
    store.put(b"one", "a", "b")
    store.put(b"two", "a", "b")
    assert store.read("a", "b") == b"two"
    assert store.names("a") == ["b"]
    assert store.names("nothing") == []


def test_a_missing_file_is_named(store: Storage) -> None:
    with pytest.raises(NotFoundError, match="a/b"):
        store.read("a", "b")


def test_a_file_that_is_not_json_is_named(store: Storage) -> None:
    store.put(b"{", "x.json")
    with pytest.raises(StorageError, match=r"x\.json is not JSON"):
        store.read_json("x.json")


def test_a_path_out_of_the_root_is_refused(store: Storage) -> None:
    with pytest.raises(StorageError, match="leads out"):
        store.put(b"", "..", "escaped")


def test_only_one_of_many_writers_creates_a_file(store: Storage) -> None:
    wins: list[int] = []
    barrier = threading.Barrier(8)

    def create(number: int) -> None:
        barrier.wait()
        if store.put_if_absent(str(number).encode(), "once"):
            wins.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert store.read("once") == str(wins[0]).encode()


def test_compare_and_set_loses_no_update(store: Storage) -> None:
    store.put(b"0", "n")

    def add_ten() -> None:
        for _ in range(10):
            while True:
                before = store.read("n")
                try:
                    store.compare_and_set(before, str(int(before) + 1).encode(), "n")
                except ConflictError:
                    continue
                break

    threads = [threading.Thread(target=add_ten) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read("n") == b"40"


def test_compare_and_set_creates_only_what_is_absent(store: Storage) -> None:
    store.compare_and_set(None, b"a", "f")
    with pytest.raises(ConflictError):
        store.compare_and_set(None, b"b", "f")
    assert store.read("f") == b"a"


def test_a_failed_fill_leaves_nothing(store: Storage) -> None:
    def fill() -> None:
        with store.publish_folder("sets", "x") as folder:
            (folder / "part").write_bytes(b"half")
            raise ValueError("the writer died")

    with pytest.raises(ValueError, match="died"):
        fill()
    assert store.names("sets") == []
    assert os.listdir(store.root / "sets") == []


def test_a_published_folder_is_never_replaced(store: Storage) -> None:
    for text in (b"first", b"second"):
        with store.publish_folder("sets", "x") as folder:
            (folder / "f").write_bytes(text)
    assert store.read("sets", "x", "f") == b"first"
    assert os.listdir(store.root / "sets") == ["x"]


def _replace(store: Storage, content: bytes) -> None:
    with store.staging_folder("sets") as folder:
        (folder / content.decode()).write_bytes(content)
        store.replace(folder, "sets", "x")


def test_a_replaced_folder_holds_nothing_of_the_one_before(store: Storage) -> None:
    for content in (b"first", b"second"):
        _replace(store, content)
    assert store.names("sets", "x") == ["second"]
    assert os.listdir(store.root / "sets") == ["x"]


def test_a_folder_that_could_not_be_replaced_is_there_as_before(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    _replace(store, b"first")
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "publish", refuse)
        with pytest.raises(StorageError, match="Input/output error"):
            _replace(store, b"second")
    assert store.names("sets", "x") == ["first"]
    assert os.listdir(store.root / "sets") == ["x"]


@pytest.mark.parametrize("has_new", [False, True])
def test_a_replacement_that_was_killed_is_undone_or_ended(store: Storage, has_new: bool) -> None:
    store.put(b"old", "sets", ".old-x", "old")
    if has_new:
        store.put(b"new", "sets", "x", "new")
    store.remove_unfinished("sets")
    assert store.names("sets", "x") == ["new" if has_new else "old"]
    assert os.listdir(store.root / "sets") == ["x"]


def test_a_lock_excludes_others_of_its_name(store: Storage) -> None:
    entered: list[str] = []

    def enter() -> None:
        with store.locked("sets", "prune"):
            entered.append("other")

    other = threading.Thread(target=enter)
    with store.locked("sets", "prune"):
        other.start()
        with store.locked("sets", "another name"):
            entered.append("own")
    other.join(20)
    assert entered == ["own", "other"]


def test_remove_takes_files_and_folders_and_bears_repetition(store: Storage) -> None:
    store.put(b"", "folder", "f")
    store.remove("folder", "f")
    store.remove("folder", "f")
    store.remove("folder")
    assert store.names() == []


def test_storage_that_cannot_be_written_says_where_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"storage\.uri"):
        Storage(tmp_path / "file" / "store").probe()


def test_a_probe_leaves_nothing_behind(store: Storage) -> None:
    store.probe()
    assert os.listdir(store.root) == []


def test_canonical_json_does_not_depend_on_order() -> None:
    assert canonical_json({"b": 1, "a": [1.5, "é"]}) == '{"a":[1.5,"é"],"b":1}'.encode()
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json(float("nan"))


def test_file_and_byte_digests_agree(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert digest_file(tmp_path / "f") == digest_bytes(b"abc")
