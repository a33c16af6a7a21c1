"""What is kept of jobs outlives their cluster; a longer log is never replaced by a shorter one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagleray.platform.errors import NotFoundError, StorageError
from eagleray.platform.jobs import Job, JobRecords, JobStatus
from eagleray.platform.jobs.records import job_from_ray
from eagleray.platform.storage import Storage

JOB = Job("train-abc", JobStatus.RUNNING, "eagleray train", 10.0, cluster="http://127.0.0.1:1")


@pytest.fixture
def records(storage: Storage) -> JobRecords:
    return JobRecords(storage)


def from_ray(**changes: Any) -> Job:
    content = {
        "submission_id": "a",
        "status": "RUNNING",
        "entrypoint": "python -m eagleray train",
        "metadata": {"command": "eagleray train"},
        "start_time": 1500,
        "end_time": None,
        "message": "Job is running.\nmore",
        "driver_exit_code": None,
    }
    return job_from_ray(content | changes, "http://h:1")


def test_a_saved_job_is_read_back_equal(records: JobRecords) -> None:
    records.save(JOB)
    records.save(JOB)
    assert records.get("train-abc") == JOB


def test_jobs_are_listed_newest_first(records: JobRecords) -> None:
    for job_id, created_s in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        records.save(replace(JOB, job_id=job_id, created_s=created_s))
    assert [job.job_id for job in records.all()] == ["b", "c", "a"]


def test_an_unknown_job_is_not_found(records: JobRecords) -> None:
    with pytest.raises(NotFoundError, match="no job 'x'"):
        records.get("x")
    assert records.log("x") is None


def test_an_id_cannot_lead_out_of_storage(records: JobRecords) -> None:
    with pytest.raises(StorageError, match="leads out of storage"):
        records.get("../../etc")


def test_a_job_whose_cluster_went_is_lost_unless_its_end_was_seen(records: JobRecords) -> None:
    assert records.lose(JOB).status is JobStatus.LOST
    assert records.get(JOB.job_id).status is JobStatus.LOST
    ended = replace(JOB, status=JobStatus.FINISHED)
    assert records.lose(ended) == ended


def test_a_shorter_log_never_replaces_a_longer_one(records: JobRecords) -> None:
    records.keep_log("a", "one\ntwo\n")
    records.keep_log("a", "one\n")
    assert records.log("a") == "one\ntwo\n"


def test_a_log_that_is_written_piece_by_piece_is_kept_even_if_its_reader_fails(
    records: JobRecords, storage: Storage
) -> None:
    def read_and_fail() -> None:
        with records.log_writer("a") as append:
            append("one\n")
            append("two\n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_and_fail()
    assert records.log("a") == "one\ntwo\n"
    with records.log_writer("a") as append:
        append("one\n")
    assert records.log("a") == "one\ntwo\n"
    assert [path.name for path in Path(storage.path("jobs", "a")).iterdir()] == ["log.txt"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("PENDING", JobStatus.PENDING),
        ("SUCCEEDED", JobStatus.FINISHED),
        ("FAILED", JobStatus.FAILED),
        ("STOPPED", JobStatus.STOPPED),
    ],
)
def test_rays_statuses_become_ours(theirs: str, ours: JobStatus) -> None:
    assert from_ray(status=theirs).status is ours


def test_rays_description_becomes_one_line_and_seconds() -> None:
    job = from_ray()
    assert (job.message, job.created_s, job.ended_s) == ("Job is running.", 1.5, 0.0)
    assert job.command == "eagleray train"


def test_a_failed_drivers_exit_code_says_more_than_rays_text() -> None:
    assert from_ray(status="FAILED", driver_exit_code=2).message == "exit code 2"


def test_a_plain_ray_job_shows_its_entrypoint() -> None:
    assert from_ray(metadata=None).command == "python -m eagleray train"
