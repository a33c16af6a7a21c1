"""Reading for many epochs takes no more memory than reading for a few."""

import subprocess
import sys
from pathlib import Path

from eagleray.actors.data import Dataset

# Resident bytes after the second and after the twentieth epoch.
READER = """
import sys
from pathlib import Path
import psutil
from eagleray.actors.data import BatchStream, Dataset
from eagleray.platform.storage import Storage
with BatchStream(Dataset.open(Storage(Path(sys.argv[1])), sys.argv[2]), 8) as stream:
    for epoch in range(20):
        for batch in stream:
            pass
        if epoch in (1, 19):
            print(psutil.Process().memory_info().rss)
"""


def test_resident_memory_grows_by_less_than_a_twentieth_over_eighteen_epochs(
    small_dataset: Dataset,
) -> None:
    root: Path = small_dataset.folder.parents[1]
    words = [sys.executable, "-c", READER, str(root), small_dataset.digest]
    done = subprocess.run(words, text=True, capture_output=True, timeout=120, check=True)
    early, late = map(int, done.stdout.split())
    assert late < 1.05 * early
