"""The section `data`: sources and their domains, tokenizer or features, mixture, cache."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from eagleray.platform.config.features import FeaturesConfig
from eagleray.platform.config.values import ByteSize, Name, Seconds, Section, near

MAX_DOMAINS = 64
"""So many domains can be mixed."""
_LEAST_SEGMENTED_BYTES = 4_000_000
_TEXT_FIELD = "text"
_SEQ_LEN = 128


class RangeCondition(Section):
    """A number from `min` to `max`, both included; at least one of them."""

    min: int | float | None = None
    max: int | float | None = None

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} must not be above max {self.max}")
        return self


def _condition_kind(value: Any) -> str | None:
    if isinstance(value, list):
        return "values"
    return "range" if isinstance(value, dict | RangeCondition) else None


Condition = Annotated[
    Annotated[list[str | int | float], Tag("values")] | Annotated[RangeCondition, Tag("range")],
    Discriminator(
        _condition_kind,
        custom_error_type="condition",
        custom_error_message="must be a list of values, or a range {min: ..., max: ...}",
    ),
]
"""One of the values listed, or a range of numbers."""


class SourceConfig(Section):
    """One file, folder or glob of raw data."""

    kind: Literal["jsonl", "text", "csv", "parquet"] = "jsonl"
    """jsonl: an object per line; csv: a header, then a record per row; text: a document per file.
    All but parquet may be packed (.gz, .zst)."""
    path: str
    """Relative to eagleray.yaml or absolute; `*` and `**` are globs."""
    text_field: str = _TEXT_FIELD
    """The field or column that holds the text."""
    where: dict[str, Condition] = Field(default={})
    """Keep only records whose fields fit: `{party: [Whig], year: {min: 1834, max: 1860}}`."""
    domain: Name = "main"
    """What `data.mixture` calls this text; sources of one domain are read as one."""


class BpeConfig(Section):
    """Train a byte-level BPE on the data."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int = Field(default=4096, ge=300, le=1_000_000)
    train_bytes: ByteSize = 8_000_000
    """How much of the text the merges are learnt from."""


class TokenizerFileConfig(Section):
    """Use a `tokenizer.json` as it is."""

    kind: Literal["file"]
    path: str


def _tokenizer_kind(value: Any) -> Any:
    return value.get("kind", "bpe") if isinstance(value, dict) else getattr(value, "kind", None)


Tokenizer = Annotated[
    Annotated[BpeConfig, Tag("bpe")] | Annotated[TokenizerFileConfig, Tag("file")],
    Discriminator(
        _tokenizer_kind,
        custom_error_type="tokenizer_kind",
        custom_error_message="kind must be bpe or file",
    ),
]
"""How text becomes tokens; without `kind` it is bpe."""


Weights = dict[Name, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class StratifiedMixtureConfig(Section):
    """Every batch holds of each domain what the dataset holds of it, to one sample."""

    kind: Literal["stratified"] = "stratified"


class FixedMixtureConfig(Section):
    """The same weights for the whole run."""

    kind: Literal["fixed"]
    weights: Weights
    """Domain -> share, in any unit; a domain that is not named is left out."""


class PhaseConfig(Section):
    """Weights for some steps."""

    steps: int | None = Field(default=None, ge=1)
    """How many; null, in the last phase only: until the end."""
    weights: Weights


class PhasedMixtureConfig(Section):
    """Weights that change at given steps."""

    kind: Literal["phased"]
    phases: list[PhaseConfig] = Field(min_length=1, max_length=1000)

    @model_validator(mode="after")
    def _ends(self) -> Self:
        for number, phase in enumerate(self.phases[:-1], start=1):
            if phase.steps is None:
                raise ValueError(f"phase {number} needs `steps`: only the last one may go on")
        return self


class _OnlineMixtureConfig(Section):
    """What policies that follow the losses share."""

    every_steps: int = Field(default=20, ge=1)
    """Steps of an interval; its losses decide the weights of the interval after the next."""
    floor: float = Field(default=0.02, ge=0, le=1)
    """Smallest share of a domain."""


class DoremiMixtureConfig(_OnlineMixtureConfig):
    """More of the domains whose loss is above a reference (arXiv:2305.10429)."""

    kind: Literal["doremi"]
    reference: dict[Name, Annotated[float, Field(ge=0)]] = Field(default={})
    """Domain -> loss in nats per token that counts as learnt; 0 for one that is not named."""
    rate: float = Field(default=1.0, gt=0)
    """How fast weights follow the excess."""


class BanditMixtureConfig(_OnlineMixtureConfig):
    """More of the domains with the higher loss, after some exploration (arXiv:2312.02406)."""

    kind: Literal["bandit"]
    decay: float = Field(default=0.8, ge=0, lt=1)
    """Share of the past in the running loss of a domain."""
    temperature: float = Field(default=0.1, gt=0)
    """Below 1 small differences count more."""


def _mixture_kind(value: Any) -> Any:
    if isinstance(value, dict):
        return value.get("kind", "stratified")
    return getattr(value, "kind", None)


MixtureConfig = Annotated[
    Annotated[StratifiedMixtureConfig, Tag("stratified")]
    | Annotated[FixedMixtureConfig, Tag("fixed")]
    | Annotated[PhasedMixtureConfig, Tag("phased")]
    | Annotated[DoremiMixtureConfig, Tag("doremi")]
    | Annotated[BanditMixtureConfig, Tag("bandit")],
    Discriminator(
        _mixture_kind,
        custom_error_type="mixture_kind",
        custom_error_message="kind must be stratified, fixed, phased, doremi or bandit",
    ),
]
"""How much of each domain is trained on, when; without `kind` it is stratified."""


class FeatureCacheConfig(Section):
    """The cache that the loaders read through: node memory, Redis, a local disk."""

    enabled: bool = True
    max_bytes: ByteSize = 128_000_000
    """Byte budget of the values in Redis; eviction goes down to 85 % of it."""
    shared_bytes: ByteSize = 0
    """Byte budget in /dev/shm of each node, shared by its processes; 0: none."""
    disk_bytes: ByteSize = 0
    """Byte budget on a local disk of each node; 0: none."""
    disk_path: str | None = None
    """Folder on that disk, absolute; needed if `disk_bytes` is above 0."""
    policy: Literal["lru-k", "auto", "lru", "s3-fifo", "w-tinylfu", "no-evict"] = "lru-k"
    """What is evicted; auto: what the loaders will ask for last, as their order is known, and
    lru-k for the rest; no-evict keeps what came first."""
    history: int = Field(default=2, ge=1, le=8)
    """K of LRU-K: how many past references decide."""
    timeout_s: Seconds = 0.05
    """A slower Redis counts as a miss."""

    @property
    def has_segments(self) -> bool:
        """Whether a node keeps values of its own, with or without Redis."""
        return self.enabled and bool(self.shared_bytes or self.disk_bytes)

    @model_validator(mode="after")
    def _segments(self) -> Self:
        for name in ("shared_bytes", "disk_bytes"):
            value = getattr(self, name)
            if 0 < value < _LEAST_SEGMENTED_BYTES:
                raise ValueError(
                    f"{name} {value} must be 0 or at least {_LEAST_SEGMENTED_BYTES} (4MB)"
                )
        if self.disk_bytes and self.disk_path is None:
            raise ValueError(f"disk_bytes {self.disk_bytes} needs disk_path: a folder on the disk")
        if self.disk_path is not None and not Path(self.disk_path).is_absolute():
            raise ValueError(
                f"disk_path {self.disk_path!r} must be absolute: each node uses its own disk"
            )
        return self


class DataConfig(Section):
    """Raw text, or records of numbers, to verified shards to batches."""

    sources: list[SourceConfig] = Field(default=[], max_length=1000)
    features: FeaturesConfig | None = None
    """Make rows of numbers of the records; null: their text becomes tokens."""
    tokenizer: Tokenizer = BpeConfig()
    seq_len: int = Field(default=_SEQ_LEN, ge=8, le=1_048_576)
    """Tokens that a sample trains on; each sample holds one more, as the last target."""
    eval_fraction: float = Field(default=0.02, gt=0.0, lt=0.5)
    """Share of the documents or rows held out, chosen by content digest."""
    shard_bytes: ByteSize = 64_000_000
    on_bad_record: Literal["fail", "skip"] = "fail"
    order_seed: int = Field(default=0, ge=0, lt=2**63)
    """Seeds the global sample order."""
    mixture: MixtureConfig = StratifiedMixtureConfig()
    on_exhausted: Literal["repeat", "fail"] = "repeat"
    """When a run needs more of a domain than there is: start it over in another order, or refuse
    the run before its first step."""
    loaders: int = Field(default=1, ge=0, le=16)
    """Loader actors on each node, shared by its workers; 0: each worker reads for itself."""
    prefetch_batches: int | None = Field(default=None, ge=0, le=256)
    """Steps read ahead; null: tuned from how long reads and steps take."""
    fetchers: int | None = Field(default=None, ge=1, le=64)
    """Threads of a loader that read ahead; null: tuned."""
    cache: FeatureCacheConfig = FeatureCacheConfig()

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains, in the order of their first sources."""
        return tuple(dict.fromkeys(source.domain for source in self.sources))

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.features is None:
            return self
        for source in self.sources:
            if source.kind == "text":
                raise ValueError(
                    f"features are columns of records, and source {source.path} has kind text: "
                    "use jsonl, csv or parquet, or remove features"
                )
            if source.text_field != _TEXT_FIELD:
                raise ValueError(
                    f"text_field {source.text_field!r} of source {source.path} is for text: with "
                    "features, name columns in features.columns"
                )
        for name, default in (("tokenizer", BpeConfig()), ("seq_len", _SEQ_LEN)):
            value = getattr(self, name)
            if value != default:
                shown = value if isinstance(value, int) else f"of kind {value.kind}"
                raise ValueError(
                    f"{name} {shown} is for text, and features make numbers of the records: "
                    "remove one of the two"
                )
        if isinstance(self.mixture, _OnlineMixtureConfig):
            raise ValueError(
                f"mixture of kind {self.mixture.kind} follows the losses of a language model: "
                "with features, use stratified, fixed or phased"
            )
        return self

    @model_validator(mode="after")
    def _mixed(self) -> Self:
        if len(self.domains) > MAX_DOMAINS:
            raise ValueError(
                f"sources name {len(self.domains)} domains; at most {MAX_DOMAINS} can be mixed"
            )
        mixture = self.mixture
        if isinstance(mixture, FixedMixtureConfig):
            self._weigh("mixture", mixture.weights)
        elif isinstance(mixture, PhasedMixtureConfig):
            for number, phase in enumerate(mixture.phases, start=1):
                self._weigh(f"mixture, phase {number}", phase.weights)
        elif isinstance(mixture, _OnlineMixtureConfig):
            if mixture.floor * len(self.domains) > 1:
                raise ValueError(
                    f"mixture.floor {mixture.floor} for each of {len(self.domains)} domains is "
                    "more than there is"
                )
            if isinstance(mixture, DoremiMixtureConfig):
                self._check_names("mixture.reference", mixture.reference)
            if self.on_exhausted == "fail":
                raise ValueError(
                    f"on_exhausted: fail needs weights that are known beforehand, and kind "
                    f"{mixture.kind} decides them as it goes"
                )
        return self

    def _weigh(self, where: str, weights: dict[str, float]) -> None:
        self._check_names(where, weights)
        if not any(weights.values()):
            raise ValueError(f"{where}: no weight is above 0")

    def _check_names(self, where: str, named: dict[str, float]) -> None:
        for name in named:
            if name not in self.domains:
                meant = near(name, self.domains)
                raise ValueError(
                    f"{where}: {name!r} is no domain of data.sources "
                    f"({', '.join(self.domains) or 'none'})"
                    + (f": did you mean {meant!r}?" if meant else "")
                )
