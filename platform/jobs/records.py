"""What storage keeps of jobs, so that they and their logs outlive the cluster they ran on.

<storage>/jobs/<id>/job.json    the job as it was last seen
log.txt     what its driver printed, as far as it was read
"""

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from eagleray.platform.errors import NotFoundError
from eagleray.platform.storage import Storage, canonical_json


class JobStatus(StrEnum):
    """Life of a job; `lost` is one whose cluster went before its end was seen."""

    PENDING = "pending"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more will happen by itself."""
        return self not in (JobStatus.PENDING, JobStatus.RUNNING)


@dataclass(frozen=True)
class Job:
    """One job; times are seconds since the epoch, 0 if unknown."""

    job_id: str
    status: JobStatus
    command: str
    created_s: float
    ended_s: float = 0.0
    message: str = ""
    cluster: str = ""
    """URL of the dashboard of the cluster that it ran on."""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class JobRecords:
    """Jobs under `<storage>/jobs/`."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def save(self, job: Job) -> None:
        """Record how a job was last seen."""
        data = canonical_json(job.as_json())
        # Most looks bring no news.
        if not self._holds(data, job.job_id):
            self._storage.put(data, "jobs", job.job_id, "job.json")

    def get(self, job_id: str) -> Job:
        """A job as it was last seen.

        Raises:
            NotFoundError: It was never seen.
        """
        try:
            content = self._storage.read_json("jobs", job_id, "job.json")
        except NotFoundError:
            raise NotFoundError(f"there is no job {job_id!r}", "see `eagleray ps`") from None
        return Job(**{**content, "status": JobStatus(content["status"])})

    def all(self) -> list[Job]:
        """Every recorded job, newest first."""
        jobs = []
        for job_id in self._storage.names("jobs"):
            try:
                jobs.append(self.get(job_id))
            except NotFoundError:  # its folder is being made right now
                continue
        return sorted(jobs, key=lambda job: job.created_s, reverse=True)

    def lose(self, job: Job) -> Job:
        """The same job after its cluster went."""
        if job.status.is_terminal:
            return job
        lost = replace(job, status=JobStatus.LOST, message="its cluster went before it ended")
        self.save(lost)
        return lost

    def log(self, job_id: str) -> str | None:
        """What was kept of a job's log."""
        try:
            return self._storage.read("jobs", job_id, "log.txt").decode(errors="replace")
        except NotFoundError:
            return None

    def keep_log(self, job_id: str, text: str) -> None:
        """Keep a job's log unless more of it is kept already."""
        if len(text) > len(self.log(job_id) or ""):
            self._storage.put(text.encode(), "jobs", job_id, "log.txt")

    @contextlib.contextmanager
    def log_writer(self, job_id: str) -> Iterator[Callable[[str], None]]:
        """Keep a log piece by piece, from its first character; it replaces a shorter one."""
        target = self._storage.path("jobs", job_id, "log.txt")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
        try:
            with partial.open("w", encoding="utf-8") as file:

                def append(text: str) -> None:
                    file.write(text)

                yield append
        finally:
            if partial.stat().st_size > (target.stat().st_size if target.exists() else 0):
                partial.replace(target)
            else:
                partial.unlink()

    def _holds(self, data: bytes, job_id: str) -> bool:
        try:
            return self._storage.read("jobs", job_id, "job.json") == data
        except NotFoundError:
            return False


def job_from_ray(content: dict[str, Any], cluster: str) -> Job:
    """A job as Ray's Jobs API tells it."""
    status = {"SUCCEEDED": JobStatus.FINISHED}.get(content["status"])
    metadata, code = content.get("metadata") or {}, content.get("driver_exit_code")
    return Job(
        job_id=content["submission_id"],
        status=status or JobStatus(content["status"].lower()),
        command=metadata.get("command") or content["entrypoint"],
        created_s=(content.get("start_time") or 0) / 1e3,
        ended_s=(content.get("end_time") or 0) / 1e3,
        message=f"exit code {code}" if code else _first_line(content.get("message") or ""),
        cluster=cluster,
    )


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
