"""Records what a writer does to a folder, and gives every state that a crash could leave there.

What a crash leaves, as POSIX allows and journaling file systems do:

* A killed process: all that it did, but its last write may be torn.
* A power failure: of a file, what was synced is sure. What was written since is there up to any
  byte, or its length is there and its bytes are zeros. Of a folder, the names as they were when it
  was synced are sure; later changes of its names are there up to any one of them, in their order.
  Each file and folder is independent of all others.

Files are written from their beginning to their end, and names move within a folder: what does
otherwise is refused, as nothing here could replay it.
"""

import builtins
import io
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Image = dict[str, bytes | None]
"""Path below the folder -> the bytes of a file, or None for a folder; parents come first."""


@dataclass
class _File:
    data: bytearray = field(default_factory=bytearray)
    num_synced: int = 0
    num_before: int = 0
    """Bytes before the last write."""

    def sync(self) -> None:
        self.num_synced = len(self.data)


@dataclass
class _Folder:
    versions: list[dict[str, int]] = field(default_factory=lambda: [{}])
    """The names when it was synced, and after each change since."""

    @property
    def names(self) -> dict[str, int]:
        return self.versions[-1]

    def change(self) -> dict[str, int]:
        """The names, to be changed."""
        self.versions.append(dict(self.names))
        return self.names

    def sync(self) -> None:
        del self.versions[:-1]


Step = Callable[["_Disk"], None]


class CrashRecorder:
    """Records the operations below a folder while it is installed; syncs are not carried out."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self._ids = {_key(os.stat(root)): 0}
        self._steps: list[tuple[str, Step]] = []
        self._num_made = 0

    def note(self, change: Callable[[], None]) -> None:
        """Call `change` at this place of every replay."""
        self._steps.append(("note", lambda disk: change()))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Record from now on, until the patch is undone."""
        real = {name: getattr(os, name) for name in _CALLS}
        for name in _CALLS:
            patch.setattr(os, name, getattr(self, f"_{name}")(real[name]))
        opened = self._opened(builtins.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)

    def crashes(self, seed: int, num_random: int) -> Iterator[tuple[str, Image]]:
        """What happened last, and what a crash after it left; several for each operation."""
        draw = random.Random(seed)
        disk = _Disk()
        yield "nothing", disk.image()
        for what, step in self._steps:
            step(disk)
            if what == "note":
                continue
            yield f"killed after {what}", disk.image()
            for num_bytes in disk.torn_lengths():
                yield f"killed in {what}", disk.image(torn=num_bytes)
            for data in ("lost", "zeros", "there"):
                for names in ("lost", "there"):
                    if (data, names) != ("there", "there"):
                        yield f"power lost after {what}", disk.image(data, names)
            for _ in range(num_random):
                yield f"power lost after {what}", disk.image("any", "any", draw)

    def _add(self, what: str, step: Step) -> None:
        self._steps.append((what, step))

    def _id(self, path: Any, dir_fd: int | None = None) -> int | None:
        """The id of a file or folder that exists, if it is below ours."""
        try:
            found = os.fstat(path) if isinstance(path, int) else os.stat(path, dir_fd=dir_fd)
        except OSError:
            return None
        return self._ids.get(_key(found))

    def _place(self, path: Any, dir_fd: int | None = None) -> tuple[int | None, str]:
        """Id of the folder, and the name in it."""
        folder, name = os.path.split(os.fspath(path))
        if dir_fd is not None and not folder:
            return self._id(dir_fd), name
        return self._id(folder or "."), name

    def _made(self, path: Any, is_folder: bool, dir_fd: int | None = None) -> None:
        folder, name = self._place(path, dir_fd)
        if folder is None:
            return
        # Numbers of the system are used again, ours are not.
        self._num_made += 1
        number = self._num_made
        self._ids[_key(os.stat(path, dir_fd=dir_fd))] = number
        self._add(f"making {name}", lambda disk: disk.make(folder, name, number, is_folder))

    def _wrote(self, descriptor: int, data: bytes) -> None:
        number = self._id(descriptor)
        if number is not None and data:
            self._add(f"writing {len(data)} bytes", lambda disk: disk.write(number, data))

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            is_new = flags & os.O_CREAT and not os.path.lexists(path)
            descriptor = real(path, flags, mode, dir_fd=dir_fd)
            if is_new:
                self._made(path, False, dir_fd)
            return descriptor

        return call

    def _write(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, data: Any) -> int:
            written = real(descriptor, data)
            self._wrote(descriptor, bytes(memoryview(data).cast("B")[:written]))
            return written

        return call

    def _fsync(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            number = self._id(descriptor)
            if number is None:
                real(descriptor)
            else:
                self._add("a sync", lambda disk: disk.sync(number))

        return call

    _fdatasync = _fsync

    def _rename(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, new_path: Any) -> None:
            (folder, name), (new_folder, new_name) = self._place(path), self._place(new_path)
            real(path, new_path)
            if folder is None and new_folder is None:
                return
            assert folder == new_folder, f"{path} moved to another folder: {new_path}"
            what = f"renaming {name} to {new_name}"
            self._add(what, lambda disk: disk.rename(folder, name, new_name))

        return call

    _replace = _rename

    def _link(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, new_path: Any) -> None:
            real(path, new_path)
            number, (folder, name) = self._id(path), self._place(new_path)
            if folder is not None and number is not None:
                self._add(f"linking {name}", lambda disk: disk.link(folder, name, number))

        return call

    def _unlink(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            folder, name = self._place(path, dir_fd)
            real(path, dir_fd=dir_fd)
            if folder is not None:
                self._add(f"removing {name}", lambda disk: disk.unlink(folder, name))

        return call

    _remove = _rmdir = _unlink

    def _mkdir(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            real(path, mode, dir_fd=dir_fd)
            self._made(path, True, dir_fd)

        return call

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            is_ours = not isinstance(file, int) and self._place(file)[0] is not None
            if not is_ours or not set(mode) & set("wax+"):
                return real(file, mode, *args, **options)
            is_new = not os.path.lexists(file)
            assert mode in ("w", "wb", "x", "xb"), f"{file} opened as {mode!r}"
            assert is_new or not os.path.getsize(file), f"{file} is written again"
            raw = _RecordedFile(self, file, mode.rstrip("b"))
            if is_new:
                self._made(file, False)
            stream = io.BufferedWriter(raw)
            if "b" in mode:
                return stream
            text = {name: value for name, value in options.items() if name != "buffering"}
            return io.TextIOWrapper(stream, **text)

        return call


class _RecordedFile(io.FileIO):
    def __init__(self, recorder: CrashRecorder, path: Any, mode: str) -> None:
        super().__init__(path, mode)
        self._recorder = recorder

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._recorder._wrote(self.fileno(), bytes(memoryview(data).cast("B")[:written]))
        return written


_CALLS = (
    "open", "write", "fsync", "fdatasync", "rename", "replace", "link", "unlink", "remove",
    "mkdir", "rmdir",
)  # fmt: skip


class _Disk:
    """The files and folders while the operations are replayed."""

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._folders: dict[int, _Folder] = {0: _Folder()}
        self._written: int | None = None  # by the last operation
        self._bytes: dict[tuple[int, int, int], bytes] = {}

    def make(self, folder: int, name: str, number: int, is_folder: bool) -> None:
        if is_folder:
            self._folders[number] = _Folder()
        else:
            self._files[number] = _File()
        self.link(folder, name, number)

    def link(self, folder: int, name: str, number: int) -> None:
        self._written = None
        self._folders[folder].change()[name] = number

    def rename(self, folder: int, name: str, new_name: str) -> None:
        self._written = None
        names = self._folders[folder].change()
        names[new_name] = names.pop(name)

    def unlink(self, folder: int, name: str) -> None:
        self._written = None
        del self._folders[folder].change()[name]

    def write(self, number: int, data: bytes) -> None:
        self._written = number
        file = self._files[number]
        file.num_before = len(file.data)
        file.data += data

    def sync(self, number: int) -> None:
        self._written = None
        (self._files.get(number) or self._folders[number]).sync()

    def torn_lengths(self) -> list[int]:
        """Lengths at which the last operation, a write, may have been torn."""
        if self._written is None:
            return []
        file = self._files[self._written]
        before, after = file.num_before, len(file.data)
        return sorted({before + 1, (before + after) // 2, after - 1} & set(range(before, after)))

    def image(
        self,
        data: str = "there",
        names: str = "there",
        draw: random.Random | None = None,
        torn: int | None = None,
    ) -> Image:
        """What is found on it; `data` and `names`: what became of what was not synced."""
        found: Image = {}

        def walk(number: int, path: str) -> None:
            versions = self._folders[number].versions
            index = {"lost": 0, "there": -1}.get(names)
            if index is None:
                assert draw is not None
                index = draw.randrange(len(versions))
            for name, inner in versions[index].items():
                inner_path = f"{path}{name}"
                if inner in self._folders:
                    found[inner_path] = None
                    walk(inner, f"{inner_path}/")
                else:
                    found[inner_path] = self._content(inner, data, draw, torn)

        walk(0, "")
        return found

    def _content(
        self, number: int, data: str, draw: random.Random | None, torn: int | None
    ) -> bytes:
        file = self._files[number]
        length, num_good = len(file.data), len(file.data)
        if torn is not None and number == self._written:
            length = num_good = torn
        if data == "any":
            assert draw is not None
            data = draw.choice(["lost", "zeros", "there", "part"])
        if data == "lost":
            length = num_good = file.num_synced
        elif data == "zeros":
            num_good = file.num_synced
        elif data == "part":
            assert draw is not None
            num_good = draw.randint(file.num_synced, length)
            length = draw.choice([num_good, length])
        key = (number, num_good, length)
        if key not in self._bytes:
            self._bytes[key] = bytes(file.data[:num_good]) + bytes(length - num_good)
        return self._bytes[key]


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
