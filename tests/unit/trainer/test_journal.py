"""What a rank leaves behind: found by who takes its place, whole or not at all."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from eagleray.actors.trainer.journal import Entry, StepJournal

RNG = bytes(range(256)) * 20
WRITER = """
import sys, time
import numpy as np
from eagleray.actors.trainer.journal import Entry, StepJournal
journal = StepJournal.create(16, 4)
print(journal.path, flush=True)
sys.stdin.readline()
done = 0
end = time.monotonic() + 20
while time.monotonic() < end:
    done += 1
    rng = bytes([done % 256]) * 5056
    journal.write(Entry(done, rng, {"loss_sum": done / 3}), np.arange(4) + done)
"""


@pytest.fixture
def journal() -> StepJournal:
    return StepJournal.create(num_rows=8, ids_per_step=3)


def test_what_is_written_is_read_through_another_opening(journal: StepJournal) -> None:
    entry = Entry(5, RNG, {"loss_sum": 0.1 + 0.2, "steps": 3}, 2, [[2**60, 1], [0, 7]])
    journal.write(entry, np.array([1, 2, 2**40]))
    reader = StepJournal.open(journal.path)
    assert reader is not None
    assert reader.entry(5) == entry
    found = reader.ids(4, 5)
    assert found is not None
    assert found[4].tolist() == [1, 2, 2**40]


def test_the_last_four_states_and_as_many_ids_as_fit_are_there(journal: StepJournal) -> None:
    for done in range(1, 21):
        journal.write(Entry(done, RNG), np.full(3, done))
    assert [done for done in range(22) if journal.entry(done)] == [17, 18, 19, 20]
    assert journal.ids(11, 20) is None
    found = journal.ids(12, 20)
    assert found is not None
    assert [ids[0] for ids in found.values()] == list(range(13, 21))


@pytest.mark.parametrize("place", [4096 + 8, 4096 + 24, 4096 + 5000])
def test_an_entry_that_is_not_whole_is_not_there(journal: StepJournal, place: int) -> None:
    journal.write(Entry(4, RNG))
    with open(journal.path, "r+b") as memory:
        memory.seek(place)
        byte = memory.read(1)
        memory.seek(place)
        memory.write(bytes([byte[0] ^ 1]))
    assert journal.entry(4) is None


def test_an_entry_too_large_for_its_slot_is_refused(journal: StepJournal) -> None:
    with pytest.raises(ValueError, match="does not fit in 65536"):
        journal.write(Entry(1, bytes(70_000)))


def test_a_journal_that_nobody_holds_is_gone(journal: StepJournal) -> None:
    path = journal.path
    journal.close()
    assert StepJournal.open(path) is None


def test_a_killed_writer_leaves_its_last_states_to_who_holds_the_journal() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        held = StepJournal.open(writer.stdout.readline().strip())
        assert held is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
        while held._rows[:, 0].max() < 500:
            assert writer.poll() is None
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    newest = max(int(row[0]) for row in held._rows)
    # The entry that was being written may be torn; the one before it must not be.
    entry = held.entry(newest)
    assert entry == Entry(newest, bytes([newest % 256]) * 5056, {"loss_sum": newest / 3})
