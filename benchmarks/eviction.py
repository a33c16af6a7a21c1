"""Hit ratios of the eviction policies, beside Belady's.

    python -m benchmarks.eviction [--quick] [--json FILE] [--trace FILE ...] ...

Patterns of training are generated: epochs in a new order each, four jobs over one dataset,
importance sampling with a drifting Zipf law, a mixture whose weights change. Traces are files of
little-endian int32 keys, plain or .xz, as cache2k's web07 and web12 in the simulator of
github.com/ben-manes/caffeine (CC BY 4.0; docs/data.md says how to get them). Values are of one
size; a first epoch is not counted. Half a minute with two traces.
"""

import argparse
import heapq
import lzma
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from benchmarks.record import Figure, run

from eagleray.actors.cache.policies import PolicyName, Scheduled, make_policy

Keys = npt.NDArray[np.int64]
_POLICIES: tuple[PolicyName, ...] = ("lru", "lru-k", "s3-fifo", "w-tinylfu", "no-evict")
_SHARES = (0.01, 0.1, 0.5)
_NEVER = np.iinfo(np.int64).max


def epochs(draw: np.random.Generator, items: int, count: int) -> Keys:
    """Every item once per epoch, each epoch in an order of its own."""
    return np.concatenate([draw.permutation(items) for _ in range(count)])


def jobs(draw: np.random.Generator, items: int, count: int) -> Keys:
    """Four jobs with seeds of their own over the same items, in step."""
    return np.stack([epochs(draw, items, count) for _ in range(4)], axis=1).ravel()


def importance(draw: np.random.Generator, items: int, count: int) -> Keys:
    """Zipf 0.8 over ranks that drift: a hundredth of the items change places each tenth."""
    weights = 1 / np.arange(1, items + 1) ** 0.8
    weights /= weights.sum()
    order = draw.permutation(items)
    parts = []
    for _ in range(10):
        parts.append(order[draw.choice(items, size=items * count // 10, p=weights)])
        moved = draw.choice(items, size=items // 100, replace=False)
        order[moved] = order[draw.permutation(moved)]
    return np.concatenate(parts)


def mixture(draw: np.random.Generator, items: int, count: int) -> Keys:
    """Three domains of different sizes, epochs inside each; the weights change in four phases."""
    sizes = (items // 100, items // 10, items)
    bases = np.cumsum((0, *sizes[:-1]))
    streams = [epochs(draw, size, 4 * count * items // size + 1) for size in sizes]
    taken = [0, 0, 0]
    parts = []
    for weights in ((0.1, 0.2, 0.7), (0.4, 0.4, 0.2), (0.1, 0.7, 0.2), (0.5, 0.1, 0.4)):
        domains = draw.choice(3, size=items * count // 4, p=weights)
        part = np.empty(len(domains), dtype=np.int64)
        for domain in range(3):
            at = np.flatnonzero(domains == domain)
            part[at] = bases[domain] + streams[domain][taken[domain] : taken[domain] + len(at)]
            taken[domain] += len(at)
        parts.append(part)
    return np.concatenate(parts)


def read_trace(path: Path) -> Keys:
    """Keys of a trace file.

    Raises:
        ValueError: It cannot be read, or is not a whole number of keys.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".xz":
            data = lzma.decompress(data)
    except (OSError, lzma.LZMAError) as error:
        raise ValueError(f"trace {path} cannot be read: {error}") from error
    if not data or len(data) % 4:
        raise ValueError(f"trace {path} holds {len(data)} bytes, not a number of 4-byte keys")
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


def hit_ratio(name: PolicyName, keys: Keys, room: int, first: int) -> float:
    """Share of the references from `first` on that find their value."""
    policy = make_policy(name, room)
    names = [b"%d" % key for key in keys.tolist()]
    if isinstance(policy, Scheduled):
        policy.expect(names)
    hits = 0
    for place, key in enumerate(names):
        is_hit = key in policy
        hits += is_hit and place >= first
        if is_hit or policy.admits(key, 1):
            policy.touch(key, 1)
            while policy.total_bytes > room:
                victim = policy.victim()
                assert victim is not None, "what is over the budget is resident"
                policy.remove(victim)
    return hits / (len(names) - first)


def belady(keys: Keys, room: int, first: int) -> float:
    """The same for MIN with bypass, which no policy can beat."""
    following = np.full(len(keys), _NEVER)
    last: dict[int, int] = {}
    for place in range(len(keys) - 1, -1, -1):
        key = int(keys[place])
        following[place] = last.get(key, _NEVER)
        last[key] = place
    next_use: dict[int, int] = {}
    heap: list[tuple[int, int]] = []
    hits = 0
    for place, (key, after) in enumerate(zip(keys.tolist(), following.tolist(), strict=True)):
        hits += key in next_use and place >= first
        next_use[key] = after
        heapq.heappush(heap, (-after, key))
        while len(next_use) > room:
            latest, victim = heapq.heappop(heap)
            if next_use.get(victim) == -latest:
                del next_use[victim]
    return hits / (len(keys) - first)


def measure(arguments: argparse.Namespace) -> list[Figure]:
    """Every policy on every pattern and size."""
    items, count = (1000, 4) if arguments.quick else (5000, 6)
    draw = np.random.default_rng(0)
    patterns = {
        "epochs": (epochs(draw, items, count), items, True),
        "4 jobs": (jobs(draw, items, count), 4 * items, True),
        "importance": (importance(draw, items, count), items, False),
        "mixture": (mixture(draw, items, count), items, True),
        **{name: (keys, 0, False) for name, keys in arguments.trace},
    }
    found: list[Figure] = []
    for pattern, (keys, first, is_scheduled) in patterns.items():
        for share in _SHARES:
            room = max(1, int(share * len(np.unique(keys))))
            best = belady(keys, room, first)
            found += _figures(f"{pattern} {share:.0%}", keys, room, first, best, is_scheduled)
    return found


def _figures(
    name: str, keys: Keys, room: int, first: int, best: float, is_scheduled: bool
) -> Iterable[Figure]:
    ratios = {policy: hit_ratio(policy, keys, room, first) for policy in _POLICIES}
    for policy, ratio in ratios.items():
        goal, holds = "", None
        if policy == "lru-k":
            goal, holds = f"above lru ({ratios['lru']:.1%})", ratio >= ratios["lru"]
        yield Figure(f"{name} {policy}", 100 * ratio, "%", "Belady", 100 * best, goal, holds)
    if is_scheduled:
        ratio = hit_ratio("auto", keys, room, first)
        holds = best - ratio <= 0.02
        yield Figure(
            f"{name} auto", 100 * ratio, "%", "Belady", 100 * best, "within 2 points", holds
        )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=_trace, nargs="+", action="extend", default=[], metavar="FILE",
        help="compare on these traces too; repeatable",
    )  # fmt: skip


def _trace(text: str) -> tuple[str, Keys]:
    path = Path(text)
    try:
        return path.name.partition(".")[0], read_trace(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    run("Hit ratios of the eviction policies, beside Belady's.", measure, _options)
