"""What becomes of a finished run: its audit, the exported model, and the chain of records.

model -> checkpoint -> run -> dataset (-> raw files by digest), config, code
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagleray.actors.checkpoint.manifest import CheckpointFolder, newest_intact
from eagleray.actors.checkpoint.samples import Audit, SampleLog, audit
from eagleray.actors.checkpoint.snapshot import model_arrays
from eagleray.actors.checkpoint.state import Checkpoint
from eagleray.actors.data.dataset import Dataset
from eagleray.platform.artifact import publish_artifact
from eagleray.platform.code import code_identity
from eagleray.platform.config import ProjectConfig, config_digest, resolved_json
from eagleray.platform.errors import RunFailedError
from eagleray.platform.ledger import Ledger
from eagleray.platform.model import hf_layout
from eagleray.platform.model.config import DecoderConfig
from eagleray.platform.model.decoder import Decoder
from eagleray.platform.registry import ModelVersion, Registry
from eagleray.platform.storage import Storage


@dataclass(frozen=True)
class FinishedRun:
    """The records of a run that reached its end."""

    model: ModelVersion | None
    record: str
    audit: Audit
    eval_loss: float | None
    skipped_steps: int
    """Steps whose update was skipped, as something was not finite."""


def finish_run(
    storage: Storage,
    config: ProjectConfig,
    run_id: str,
    dataset: Dataset,
    model_config: DecoderConfig,
    *,
    register_as: str | None,
) -> FinishedRun:
    """Audit a run, export its final weights, record the chain, and register the model.

    Calling it again for the same run gives the same records and the same version.

    `register_as` is the name in the registry; None records the run without a model, as trials do.

    Raises:
        RunFailedError: It has no intact checkpoint, or is to be registered and has done fewer steps
            than it was asked for, or its audit is not exact.
    """
    checkpoint, damaged = newest_intact(CheckpointFolder(storage, run_id))
    if checkpoint is None:
        reason = damaged[0].what if damaged else "none was written"
        raise RunFailedError(
            f"run {run_id} left no intact checkpoint: {reason}", f"eagleray resume {run_id}"
        )
    steps = config.train.steps
    if register_as is not None and checkpoint.step < steps:
        reason = f": {damaged[0].what}" if damaged else ""
        raise RunFailedError(
            f"run {run_id} has no intact checkpoint after step {checkpoint.step} of {steps}"
            f"{reason}",
            f"eagleray resume {run_id}",
        )
    result = audit(SampleLog(storage, run_id).chain(checkpoint.samples), dataset.sizes("train"))
    record = _record_run(storage, config, run_id, dataset, checkpoint, result)
    eval_loss, skipped = checkpoint.meta.get("eval_loss"), _skipped_steps(checkpoint)
    if register_as is None:
        return FinishedRun(None, record, result, eval_loss, skipped)
    if not result.is_exact:
        raise RunFailedError(
            f"run {run_id} is not registered: its audit found {result.missing} samples missing and "
            f"{result.doubled} doubled in {result.steps} steps",
            "this is a defect: please report it with the run's events; train again",
        )
    artifact = publish_artifact(
        storage, lambda folder: _export(checkpoint, model_config, dataset, folder)
    )
    # Two losses compare only over the same held-out samples.
    held_out = config.train.eval.num_batches * config.train.batch_size
    metrics: dict[str, Any] = {
        "eval_data": f"{dataset.digest}:{held_out}", "steps": checkpoint.step, "run": run_id
    }  # fmt: skip
    if eval_loss is not None:
        metrics["eval_loss"] = eval_loss
    body = {"artifact": artifact, "metrics": metrics, "num_parameters": model_config.num_parameters}
    ledger = Ledger(storage)
    digest = ledger.put("model", body, {"checkpoint": record})
    version = Registry(storage).register(register_as, digest, artifact, metrics)
    return FinishedRun(version, digest, result, eval_loss, skipped)


def record_dataset(storage: Storage, dataset: Dataset) -> str:
    """The ledger record of a data set; its body names every raw file by digest."""
    return Ledger(storage).put("dataset", {"digest": dataset.digest, "manifest": dataset.manifest})


def _record_run(
    storage: Storage,
    config: ProjectConfig,
    run_id: str,
    dataset: Dataset,
    checkpoint: Checkpoint,
    result: Audit,
) -> str:
    ledger = Ledger(storage)
    inputs = {
        "dataset": record_dataset(storage, dataset),
        "config": ledger.put("config", {"digest": config_digest(config), **resolved_json(config)}),
        "code": ledger.put("code", code_identity()),
    }
    body: dict[str, Any] = {"run_id": run_id, "audit": asdict(result)}
    if skipped := _skipped_steps(checkpoint):
        body["skipped_steps"] = skipped
    run = ledger.put("run", body, inputs)
    manifest = CheckpointFolder(storage, run_id).digest(checkpoint.step)
    body = {
        "run_id": run_id,
        "step": checkpoint.step,
        "manifest": manifest,
        "samples": checkpoint.samples,
    }
    return ledger.put("checkpoint", body, {"run": run})


def _skipped_steps(checkpoint: Checkpoint) -> int:
    return int(checkpoint.meta.get("skipped", {}).get("count", 0))


def _export(
    checkpoint: Checkpoint, model_config: DecoderConfig, dataset: Dataset, folder: Path
) -> None:
    model = Decoder(model_config)
    model.load_state_dict(model_arrays(checkpoint.arrays))
    hf_layout.save(
        model, folder, dataset.tokenizer_json, eos_token=dataset.manifest["tokenizer"]["eod_token"]
    )
