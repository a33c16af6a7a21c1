"""Submit, list, follow and stop the jobs of one cluster through Ray's Jobs API.

Every request has a deadline. A lost connection is tried again a bounded number of times; the job
itself does not depend on any of its watchers.
"""

import asyncio
import contextlib
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import quote

import aiohttp

from eagleray import __version__
from eagleray.platform.cluster.dashboard import Dashboard
from eagleray.platform.cluster.options import STOP_VARIABLES
from eagleray.platform.errors import (
    DeadlineExceededError,
    EagleRayError,
    NotFoundError,
    ServiceError,
)
from eagleray.platform.jobs.records import Job, JobRecords, job_from_ray
from eagleray.platform.jobs.shipment import Shipment

_ALPHABET = "23456789abcdefghjkmnpqrstuvwxyz"
_POLL_S = 0.2
_QUIET_S = 15.0
_RECONNECTS = 8
_LONGEST_BACKOFF_S = 5.0
# Ray gives a stopped job RAY_JOB_STOP_WAIT_TIME_S before it kills it: see cluster/options.py.
STOP_TIMEOUT_S = 35.0


class Jobs:
    """The jobs of one cluster.

    Args:
        dashboard: The cluster.
        records: What is kept of them.
        interpreter: The Python that runs `-m eagleray` on the cluster.
    """

    def __init__(
        self,
        dashboard: Dashboard,
        records: JobRecords,
        interpreter: str = "python",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._dashboard, self._records = dashboard, records
        self._interpreter, self._clock = interpreter, clock
        self._sleep, self._pause = sleep, pause

    @property
    def url(self) -> str:
        """The dashboard of the cluster."""
        return self._dashboard.url

    def submit(self, shipment: Shipment, num_cpus: float = 0.0) -> Job:
        """Send what is not there yet, and start the job.

        Args:
            shipment: The verb and what it needs.
            num_cpus: CPUs set aside for the verb's own process; its workers ask for their own.

        Raises:
            ServiceError: The cluster did not take it.
        """
        for package in shipment.packages:
            path = f"/api/packages/gcs/{package.name}"
            try:
                self._dashboard.call("GET", path)
            except NotFoundError:
                self._dashboard.call("PUT", path, content=package.data)
        verb = shipment.arguments[0]
        job_id = f"{verb}-{''.join(secrets.choice(_ALPHABET) for _ in range(6))}"
        request = {
            "submission_id": job_id,
            "entrypoint": shlex.join([self._interpreter, "-m", "eagleray", *shipment.arguments]),
            "runtime_env": {
                "working_dir": shipment.project.uri,
                "py_modules": [shipment.code.uri],
                # A cluster that is not ours would kill the job after three seconds.
                "env_vars": STOP_VARIABLES,
            },
            "metadata": {
                "command": f"eagleray {shlex.join(shipment.arguments)}",
                "eagleray_version": __version__,
            },
            "entrypoint_num_cpus": num_cpus,
        }
        self._dashboard.call("POST", "/api/jobs/", json=request)
        return self.get(job_id)

    def get(self, job_id: str) -> Job:
        """How a job is now.

        Raises:
            NotFoundError: The cluster does not know it.
        """
        job = job_from_ray(self._ask("GET", job_id), self._dashboard.url)
        self._records.save(job)
        return job

    def all(self) -> list[Job]:
        """Every job that the cluster knows, newest first."""
        listed = self._dashboard.call("GET", "/api/jobs/")
        # Drivers that attached by themselves are listed too, without a submission.
        jobs = [job_from_ray(e, self._dashboard.url) for e in listed if e.get("submission_id")]
        for job in jobs:
            self._records.save(job)
        return sorted(jobs, key=lambda job: job.created_s, reverse=True)

    def stop(self, job_id: str, timeout_s: float = STOP_TIMEOUT_S) -> Job:
        """End a job: SIGTERM, then SIGKILL by Ray.

        Returns:
            The job after its end, whatever that was.

        Raises:
            NotFoundError: The cluster does not know it.
            DeadlineExceededError: It still runs.
        """
        self._ask("POST", job_id, "/stop")
        deadline = self._clock() + timeout_s
        while not (job := self.get(job_id)).status.is_terminal:
            if self._clock() >= deadline:
                raise DeadlineExceededError(
                    f"job {job_id} still runs {timeout_s:g} s after it was told to stop",
                    "see what it does: eagleray logs " + job_id,
                )
            self._sleep(_POLL_S)
        self.log(job_id)
        return job

    def log(self, job_id: str) -> str:
        """What a job's driver has printed so far.

        Raises:
            NotFoundError: The cluster does not know it.
        """
        text: str = self._ask("GET", job_id, "/logs")["logs"] or ""
        self._records.keep_log(job_id, text)
        return text

    def follow(self, job_id: str, write: Callable[[str], None]) -> Job:
        """Hand over what a job prints until it ends; what was printed before comes first.

        Raises:
            NotFoundError: The cluster does not know it.
            ServiceError: The connection was lost and could not be made again; the job may run on.
        """
        self.get(job_id)
        with self._records.log_writer(job_id) as keep:

            def take(text: str) -> None:
                keep(text)
                write(text)

            asyncio.run(self._follow(job_id, take))
        return self.get(job_id)

    async def _follow(self, job_id: str, take: Callable[[str], None]) -> None:
        failures = known = 0
        while True:
            try:
                async for text in _news(self._dashboard, job_id, known):
                    take(text)
                    known += len(text)
                    failures = 0
                if self.get(job_id).status.is_terminal:
                    return
                await self._pause(_POLL_S)
            except (aiohttp.ClientError, TimeoutError, ServiceError) as error:
                failures += 1
                if failures > _RECONNECTS:
                    raise ServiceError(
                        f"the connection to job {job_id} was lost: {error}",
                        f"the job may still run; come back with: eagleray logs -f {job_id}",
                    ) from error
                await self._pause(min(_LONGEST_BACKOFF_S, 0.2 * 2**failures))

    def stop_all(self, timeout_s: float = STOP_TIMEOUT_S) -> list[Job]:
        """End every job that runs, and keep the logs of all: the cluster is about to go.

        Never fails: what cannot be saved is lost with the cluster, which must end all the same.
        """
        ended: list[Job] = []
        with contextlib.suppress(EagleRayError):
            jobs = self.all()
            for job in jobs:
                if not job.status.is_terminal:
                    self._ask("POST", job.job_id, "/stop")
            for job in jobs:
                with contextlib.suppress(EagleRayError):
                    if not job.status.is_terminal:
                        job = self.stop(job.job_id, timeout_s)
                    self.log(job.job_id)
                    ended.append(job)
        return ended

    def _ask(self, method: str, job_id: str, act: str = "") -> Any:
        try:
            return self._dashboard.call(method, f"/api/jobs/{quote(job_id, safe='')}{act}")
        except NotFoundError:
            raise NotFoundError(
                f"the cluster at {self._dashboard.url} knows no job {job_id!r}",
                "see `eagleray ps`",
            ) from None


async def _news(dashboard: Dashboard, job_id: str, known: int) -> AsyncIterator[str]:
    """What a job prints beyond its first `known` characters, until the server closes."""
    url = f"{dashboard.url.replace('http', 'ws', 1)}/api/jobs/{quote(job_id, safe='')}/logs/tail"
    timeout = aiohttp.ClientTimeout(total=None, connect=dashboard.timeout_s)
    async with (
        aiohttp.ClientSession(headers=dashboard.headers, timeout=timeout) as session,
        session.ws_connect(url, heartbeat=_QUIET_S) as socket,
    ):
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            text = message.data
            # The server starts from the first character at each connection.
            news, known = text[known:], max(0, known - len(text))
            if news:
                yield news
