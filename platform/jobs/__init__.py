"""Ray jobs that run a verb of ours: what travels, how they are started, followed, stopped, kept."""

from eagleray.platform.jobs.client import STOP_TIMEOUT_S, Jobs
from eagleray.platform.jobs.records import Job, JobRecords, JobStatus
from eagleray.platform.jobs.shipment import MAX_BYTES, Package, Shipment, prepare

__all__ = [
    "MAX_BYTES",
    "STOP_TIMEOUT_S",
    "Job",
    "JobRecords",
    "JobStatus",
    "Jobs",
    "Package",
    "Shipment",
    "prepare",
]
