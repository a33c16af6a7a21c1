"""The sections of `eagleray.yaml`, in the order in which data flows.

Units are in the names (`_s`, `_bytes`, `_tokens`); a batch is counted in sequences of
`data.seq_len` tokens and is *global*: it does not change with the number of workers.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from eagleray.platform.config.data import DataConfig
from eagleray.platform.config.values import ByteSize, Name, Seconds, Section


class StorageConfig(Section):
    """Where everything that must last is kept."""

    uri: str = ".eagleray"
    """A folder, relative to eagleray.yaml or absolute; every node must see the same one."""

    @field_validator("uri")
    @classmethod
    def _local(cls, uri: str) -> str:
        scheme = uri.split("://", 1)[0] if "://" in uri else "file"
        if scheme != "file":
            raise ValueError(
                f"must be a folder that all nodes share (or file://); {scheme}:// is not supported"
            )
        if not uri.removeprefix("file://"):
            raise ValueError("must not be empty")
        return uri


class RedisConfig(Section):
    """The feature cache's Redis. It is never the truth: without it only speed is lost."""

    mode: Literal["auto", "off"] = "auto"
    """auto: `url`, else a server on PATH, else the embedded one. off: no Redis at all."""
    url: SecretStr | None = None
    """redis://, rediss:// or unix:// address of a running server; redis-cluster:// or
    rediss-cluster:// of any node of a cluster."""
    max_bytes: ByteSize = 256_000_000
    """Memory limit of a server that we start."""
    start_timeout_s: Seconds = 10.0


class ClusterConfig(Section):
    """The Ray cluster: started here, attached to, or launched from cluster.yaml."""

    address: str | None = None
    """host:port of a running cluster to attach to; null starts one on this machine."""
    launcher: str | None = None
    """A Ray cluster launcher file (see cluster.yaml) that `eagleray up` drives."""
    num_cpus: int | None = Field(default=None, ge=1)
    """CPUs that the cluster on this machine offers; null: as many as the machine has."""
    num_gpus: int | None = Field(default=None, ge=0)
    object_store_bytes: ByteSize = 512_000_000
    """Shared memory of the object store on this machine."""
    dashboard: bool | None = None
    """Ray's dashboard, some ten processes; null: only in a cluster that lasts, which needs it."""
    start_timeout_s: Seconds = 90.0
    place_timeout_s: Seconds = 60.0
    """How long work may wait for resources before it gives up and says why."""


class ModelConfig(Section):
    """A decoder-only transformer; the vocabulary comes from the tokenizer."""

    kind: Literal["decoder"] = "decoder"
    dim: int = Field(default=192, ge=8)
    num_layers: int = Field(default=4, ge=1)
    num_heads: int = Field(default=6, ge=1)
    num_kv_heads: int = Field(default=2, ge=1)
    ffn_dim: int | None = Field(default=None, ge=8)
    """Null: 8/3 of dim, rounded up to a multiple of 32."""
    max_seq_len: int = Field(default=512, ge=8)
    """Longest context that the served model accepts."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} must be a multiple of num_heads {self.num_heads}")
        if (self.dim // self.num_heads) % 2:
            raise ValueError(
                f"dim / num_heads = {self.dim // self.num_heads} must be even for RoPE"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        return self


class AdamWConfig(Section):
    """AdamW with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0, le=10)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)


class ScheduleConfig(Section):
    """Linear warm-up, then a cosine down to `min_lr_ratio` of the peak."""

    warmup_steps: int | None = Field(default=None, ge=0)
    """Null: a tenth of the steps, at most 100."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)


_MIN_BYTES_PER_S = 1_000
NumWorkers = Annotated[int, Field(ge=1, le=4096)]


class CheckpointConfig(Section):
    """How often state is saved and how much of it is kept."""

    every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] = 20
    """auto: as often as `mtbf_s` asks for (Young 1974), within `overhead_budget`."""
    overhead_budget: float = Field(default=0.005, gt=0, lt=1)
    """For auto: the share of training time that snapshots may take."""
    mtbf_s: Seconds = 86_400.0
    """For auto: the time between failures that is to be expected."""
    keep: int = Field(default=2, ge=1)
    """The newest K stay; the best by evaluation loss stays beside them."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Checkpoints of steps that are multiples of this stay too; null: none."""
    max_bytes_per_s: ByteSize | None = None
    """Pace of the writer, so that a slow shared disk stays usable by others; null: no limit."""
    write_timeout_s: Seconds = 120.0
    double_buffer: bool = False
    """A third buffer in shared memory: storage may be slower than the interval for a while."""

    @field_validator("every_steps", mode="wrap")
    @classmethod
    def _interval(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError:  # one problem, not one for each kind that it could have been
            raise ValueError("must be a number of steps, at least 1, or auto") from None

    @field_validator("max_bytes_per_s")
    @classmethod
    def _moves(cls, rate: int | None) -> int | None:
        if rate is not None and rate < _MIN_BYTES_PER_S:
            raise ValueError(f"must be at least {_MIN_BYTES_PER_S} bytes per second, or null")
        return rate


class TrainEvalConfig(Section):
    """Loss on held-out documents while training."""

    every_steps: int = Field(default=50, ge=1)
    num_batches: int = Field(default=4, ge=1)


class NonFiniteConfig(Section):
    """What becomes of a step whose loss or gradient norm is NaN or infinite."""

    action: Literal["stop", "skip", "rewind"] = "stop"
    """stop: the run ends. skip: weights and optimizer stay as they are, the batch counts as used.
    rewind: on from the newest snapshot; where the same step is met again, it is skipped."""
    max_steps: int = Field(default=3, ge=1)
    """So many in a row may be skipped; one more ends the run."""


class TrainConfig(Section):
    """One training run."""

    num_workers: NumWorkers | tuple[NumWorkers, NumWorkers] = 1
    """[min, max]: as many as find a place, among those that divide the batch; more or fewer when
    nodes come or go. Training goes on meanwhile, and no sample is missed or doubled."""
    resize_after_s: Seconds = 10.0
    """How long there must have been room for more workers before they are started."""
    device: Literal["cpu", "cuda"] = "cpu"
    cpus_per_worker: float = Field(default=1.0, gt=0)
    threads_per_worker: int = Field(default=1, ge=1)
    """Compute threads; results are bit-identical only at the same number."""
    steps: int = Field(default=200, ge=1)
    batch_size: int = Field(default=32, ge=1)
    """Global batch in sequences; constant whatever the number of workers."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Largest number of sequences one worker runs at once; the rest is accumulated."""
    optimizer: AdamWConfig = AdamWConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    clip_grad_norm: float = Field(default=1.0, gt=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = Field(default=0, ge=0, lt=2**63)
    eval: TrainEvalConfig = TrainEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    non_finite: NonFiniteConfig = NonFiniteConfig()
    log_every_steps: int = Field(default=5, ge=1)
    max_failures: int = Field(default=3, ge=0)
    """So many deaths of training processes, and of Ray Train's workers, are forgiven."""
    max_hangs: int = Field(default=3, ge=0)
    """So many processes that were stopped or made no progress, and were killed, are forgiven."""
    max_preemptions: int | None = Field(default=None, ge=0)
    """So many losses of nodes are forgiven; null: any number."""
    spares: int = Field(default=1, ge=0, le=64)
    """Warm processes on each node that take a dead worker's place at once; each takes as much
    memory as a worker. 0: a new process is started, which takes seconds."""
    step_timeout_s: Seconds = 600.0
    """A worker that does no step for so long is taken for hung: the stacks of all are saved, and
    it is replaced."""
    register_as: Name | None = None
    """Model name under which the result is registered; null: the project's name."""

    @property
    def gpus_per_worker(self) -> int:
        """What a worker asks of the cluster besides CPUs."""
        return int(self.device == "cuda")

    @property
    def world_sizes(self) -> list[int]:
        """Numbers of workers that may train: each divides the batch. Ascending."""
        least, most = self.worker_range
        return [n for n in range(least, most + 1) if self.batch_size % n == 0]

    @property
    def worker_range(self) -> tuple[int, int]:
        """Fewest and most workers."""
        n = self.num_workers
        return n if isinstance(n, tuple) else (n, n)

    @field_validator("num_workers", mode="wrap")
    @classmethod
    def _number(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            found = check(value)
        except ValidationError:  # one problem, not one for each kind that it could have been
            raise ValueError(
                "must be a number of workers from 1 to 4096, or [min, max] of them"
            ) from None
        if isinstance(found, tuple) and found[0] > found[1]:
            raise ValueError(f"[min, max] must ascend, but {found[0]} is above {found[1]}")
        return found

    @model_validator(mode="after")
    def _divides(self) -> Self:
        # The ends are what a user counts on; sizes between them that do not divide are passed over.
        for count in dict.fromkeys(self.worker_range):
            if self.batch_size % count:
                raise ValueError(
                    f"batch_size {self.batch_size} must be a multiple of num_workers {count}"
                )
        if (self.schedule.warmup_steps or 0) > self.steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} must not exceed "
                f"steps {self.steps}"
            )
        return self


class FloatSpace(Section):
    """A real number in [low, high]."""

    kind: Literal["float"]
    low: float
    high: float
    log: bool = False

    @model_validator(mode="after")
    def _range(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low {self.low} must be above 0 on a log scale")
        return self


class IntSpace(Section):
    """A whole number in [low, high]."""

    kind: Literal["int"]
    low: int
    high: int
    log: bool = False

    @model_validator(mode="after")
    def _range(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        if self.log and self.low < 1:
            raise ValueError(f"low {self.low} must be at least 1 on a log scale")
        return self


class ChoiceSpace(Section):
    """One of a list of values."""

    kind: Literal["choice"]
    values: list[Any] = Field(min_length=2)


Space = Annotated[FloatSpace | IntSpace | ChoiceSpace, Field(discriminator="kind")]


class AshaConfig(Section):
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934) on training steps."""

    grace_steps: int = Field(default=20, ge=1)
    reduction_factor: int = Field(default=3, ge=2)


class TuneConfig(Section):
    """A sweep: every trial is a run with `space` values and `overrides` laid over this file."""

    space: dict[str, Space] = Field(default={})
    """Dotted path -> values: `train.optimizer.lr: {kind: float, low: 1e-4, high: 1e-2}`."""
    overrides: dict[str, Any] = Field(default={})
    """Fixed changes for the trials, for example `train.steps: 60`."""
    num_trials: int = Field(default=6, ge=1, le=10_000)
    max_concurrent: int = Field(default=1, ge=1)
    startup_trials: int = Field(default=4, ge=1)
    """Quasi-random trials before the model is asked."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    asha: AshaConfig | None = AshaConfig()
    best: str | None = None
    """`last` or a sweep id: lay that sweep's best trial over this file."""


class EvalConfig(Section):
    """The gate: what a model must reach before `models promote` lets it through."""

    max_loss: float | None = Field(default=None, gt=0)
    """Highest held-out loss in nats per token; null: only better than the model now promoted."""
    tolerance: float = Field(default=0.02, ge=0)
    """How much worse than the promoted model, relatively, still passes."""


class KeyLimitsConfig(Section):
    """What each API key may use on each replica if it has no limits of its own; null: no limit."""

    requests_per_s: float | None = Field(default=None, gt=0)
    concurrency: int | None = Field(default=None, ge=1)
    """Requests at once."""
    tokens_per_min: int | None = Field(default=None, ge=1)
    """Of prompts and outputs together."""


class ServeConfig(Section):
    """The inference endpoint."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    model: str | None = None
    """name, name@version or name@alias; null: the project's model at alias `prod`."""
    num_replicas: int = Field(default=1, ge=1)
    cpus_per_replica: float = Field(default=1.0, ge=0)
    num_threads: int = Field(default=2, ge=1)
    block_tokens: int = Field(default=16, ge=1, le=256)
    """Tokens per KV-cache block."""
    kv_cache_bytes: ByteSize = 256_000_000
    prefix_cache: bool = True
    """Keep the blocks of requests that ended, as long as nobody needs them, for those that begin
    alike: a system prompt is computed once."""
    guessed_tokens: int = Field(default=4, ge=0, le=16)
    """Tokens that a request's next step guesses from what it has said before, while few requests
    run; only what would have been drawn is taken. 0: none."""
    weights: Literal["exact", "int8", "int4"] = "exact"
    """exact: as registered; others: linear layers rounded, in groups of 32 inputs, for compiled
    kernels on the CPU. int4 leaves the head at 8 bits, and 4-bit weights of a GGUF file alone."""
    max_running: int = Field(default=32, ge=1)
    """Requests decoded together."""
    max_queued: int = Field(default=64, ge=0)
    """Requests that may wait; one more is answered 429 with Retry-After."""
    step_tokens: int = Field(default=512, ge=1)
    """Token budget of one engine step: decodes first, then chunks of prompts."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Largest max_tokens that a request may ask for."""
    request_timeout_s: Seconds = 120.0
    max_body_bytes: ByteSize = 1_000_000
    require_key: bool = True
    """Off only behind something else that authenticates."""
    key_limits: KeyLimitsConfig = KeyLimitsConfig()


class ProjectConfig(Section):
    """The whole of `eagleray.yaml`."""

    name: Name
    storage: StorageConfig = StorageConfig()
    redis: RedisConfig = RedisConfig()
    cluster: ClusterConfig = ClusterConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    tune: TuneConfig = TuneConfig()
    eval: EvalConfig = EvalConfig()
    serve: ServeConfig = ServeConfig()

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.data.features is None and self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} must not exceed model.max_seq_len "
                f"{self.model.max_seq_len}"
            )
        return self
