"""One thread of a process stands still, and the rest of the process goes on."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagleray.actors.chaos.hang import hang

Until = Callable[..., None]
PROCESS = """
import faulthandler, pathlib, signal, sys, threading

folder = pathlib.Path(sys.argv[1])
faulthandler.register(signal.SIGUSR2, file=(folder / "stacks").open("a"), all_threads=True)

def train_forever():
    done = 0
    while True:
        done += sum(range(20_000)) > 0
        (folder / "done").write_text(str(done))

trainer = threading.Thread(target=train_forever)
trainer.start()
trainer.join()
"""


@pytest.fixture
def process(tmp_path: Path, until: Until) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose second thread works."""
    started = subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path)])
    until((tmp_path / "done").exists, "its first work")
    yield started
    started.kill()
    started.wait()


def states(pid: int) -> dict[int, str]:
    """Thread -> its state; t: a tracer holds it."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return {int(stat.parent.name): stat.read_text().rpartition(")")[2].split()[0] for stat in stats}


def test_the_thread_that_works_stands_still_alone(
    process: subprocess.Popen[bytes], tmp_path: Path, until: Until
) -> None:
    assert hang(process.pid) > 0
    [held] = [tid for tid, state in states(process.pid).items() if state == "t"]
    assert held != process.pid
    # As a watcher does: the stacks show where it hangs, and then it is killed.
    process.send_signal(signal.SIGUSR2)
    until(lambda: "in train_forever" in (tmp_path / "stacks").read_text(), "its stacks")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL


def test_a_process_that_is_gone_cannot_hang() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert hang(ended.pid) == 0
