"""Jobs over a fake cluster: uploads once, bounded stops, nothing lost when the cluster goes."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from eagleray.platform.cluster.dashboard import Dashboard
from eagleray.platform.errors import DeadlineExceededError, NotFoundError, ServiceError
from eagleray.platform.jobs import JobRecords, Jobs, JobStatus, Package, Shipment
from eagleray.platform.storage import Storage

SHIPMENT = Shipment(
    ("train", "train.steps=5 0"),
    Package("code", (("a.py", 1),), b"code"),
    Package("project", (("eagleray.yaml", 1),), b"project"),
)


class FakeCluster:
    """The Jobs API in a dictionary; a job ends `polls_to_stop` looks after it was told to stop."""

    def __init__(self) -> None:
        self.packages: dict[str, bytes] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.uploads = 0
        self.polls_to_stop = 2
        self.is_broken = False
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self, request: httpx.Request) -> httpx.Response:
        parts = request.url.path.strip("/").split("/")
        if self.is_broken:
            return httpx.Response(500, text="broken")
        if parts[1] == "packages":
            return self._package(request, parts[3])
        if len(parts) == 2:
            return self._all(request)
        job = self.jobs.get(parts[2])
        if job is None:
            return httpx.Response(404, text="Job does not exist")
        if parts[3:] == ["logs"]:
            return httpx.Response(200, json={"logs": f"said by {parts[2]}\n"})
        if parts[3:] == ["stop"]:
            job.setdefault("left", self.polls_to_stop)
            return httpx.Response(200, json={"stopped": True})
        if "left" in job:
            job["left"] -= 1
            if job["left"] <= 0:
                job["status"] = "STOPPED"
        return httpx.Response(200, json=job)

    def _package(self, request: httpx.Request, name: str) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200 if name in self.packages else 404)
        self.uploads += 1
        self.packages[name] = request.content
        return httpx.Response(200)

    def _all(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            driver = {"submission_id": None, "status": "RUNNING", "entrypoint": "python x.py"}
            return httpx.Response(200, json=[*self.jobs.values(), driver])
        asked = json.loads(request.content)
        start_time = len(self.jobs) * 1000
        self.jobs[asked["submission_id"]] = {**asked, "status": "RUNNING", "start_time": start_time}
        return httpx.Response(200, json={"submission_id": asked["submission_id"]})


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def records(storage: Storage) -> JobRecords:
    return JobRecords(storage)


@pytest.fixture
def jobs(cluster: FakeCluster, records: JobRecords) -> Jobs:
    dashboard = Dashboard("http://h:1", "secret", transport=httpx.MockTransport(cluster))
    return Jobs(dashboard, records, "/env/python", clock=lambda: cluster.now, sleep=cluster.sleep)


def test_a_submitted_verb_runs_under_the_named_interpreter_with_its_words_kept_apart(
    jobs: Jobs, cluster: FakeCluster
) -> None:
    job = jobs.submit(SHIPMENT)
    sent = cluster.jobs[job.job_id]
    assert sent["entrypoint"] == "/env/python -m eagleray train 'train.steps=5 0'"
    assert sent["runtime_env"] == {
        "working_dir": SHIPMENT.project.uri,
        "py_modules": [SHIPMENT.code.uri],
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "20"},
    }
    assert job.job_id.startswith("train-")
    assert job.command == "eagleray train 'train.steps=5 0'"


def test_equal_packages_are_sent_once(jobs: Jobs, cluster: FakeCluster) -> None:
    jobs.submit(SHIPMENT)
    jobs.submit(SHIPMENT)
    assert cluster.uploads == 2
    assert cluster.packages[SHIPMENT.code.name] == b"code"


def test_a_submitted_job_is_on_record(jobs: Jobs, records: JobRecords) -> None:
    job = jobs.submit(SHIPMENT)
    assert records.get(job.job_id) == job


def test_drivers_that_attached_by_themselves_are_not_listed(jobs: Jobs) -> None:
    first, second = jobs.submit(SHIPMENT), jobs.submit(SHIPMENT)
    assert [job.job_id for job in jobs.all()] == [second.job_id, first.job_id]


def test_stop_waits_for_the_end_and_keeps_the_log(
    jobs: Jobs, cluster: FakeCluster, records: JobRecords
) -> None:
    cluster.polls_to_stop = 4
    job = jobs.submit(SHIPMENT)
    assert jobs.stop(job.job_id).status is JobStatus.STOPPED
    assert records.log(job.job_id) == f"said by {job.job_id}\n"
    assert records.get(job.job_id).status is JobStatus.STOPPED


def test_stop_gives_up_at_its_deadline(jobs: Jobs, cluster: FakeCluster) -> None:
    cluster.polls_to_stop = 10**6
    job = jobs.submit(SHIPMENT)
    with pytest.raises(DeadlineExceededError, match="still runs 3 s after"):
        jobs.stop(job.job_id, timeout_s=3)
    assert 3 <= cluster.now < 4


def test_an_unknown_job_is_not_found_by_any_act(jobs: Jobs) -> None:
    acts: list[Callable[[str], object]] = [jobs.get, jobs.stop, jobs.log]
    for act in acts:
        with pytest.raises(NotFoundError, match="knows no job 'x'"):
            act("x")


def test_an_id_is_one_name_not_a_path(jobs: Jobs) -> None:
    with pytest.raises(NotFoundError, match="knows no job"):
        jobs.get("../packages")


def test_before_the_cluster_goes_every_job_is_stopped_and_every_log_kept(
    jobs: Jobs, records: JobRecords
) -> None:
    ids = {jobs.submit(SHIPMENT).job_id for _ in range(3)}
    assert {job.job_id for job in jobs.stop_all()} == ids
    assert {records.get(job_id).status for job_id in ids} == {JobStatus.STOPPED}
    assert all(records.log(job_id) for job_id in ids)


def test_a_broken_cluster_does_not_keep_itself_from_being_stopped(
    jobs: Jobs, cluster: FakeCluster
) -> None:
    jobs.submit(SHIPMENT)
    cluster.is_broken = True
    assert jobs.stop_all() == []


def test_a_lost_connection_is_tried_again_a_bounded_number_of_times(
    cluster: FakeCluster,
    records: JobRecords,
) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    # Jobs exist over the fake transport, but nothing listens where logs are followed.
    dashboard = Dashboard("http://127.0.0.1:1", None, transport=httpx.MockTransport(cluster))
    jobs = Jobs(dashboard, records, pause=wait)
    job = jobs.submit(SHIPMENT)
    with pytest.raises(ServiceError, match=r"connection to job .* was lost") as lost:
        jobs.follow(job.job_id, lambda _: None)
    assert f"eagleray logs -f {job.job_id}" in lost.value.fix
    assert len(waits) == 8
    assert max(waits) <= 5
