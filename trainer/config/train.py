"""Every setting of a training run. The checks need only the settings; those of data and machine are in `trainer.training.start`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from common.settings.markers import (
    ASKED_AGAIN,
    FOLDER,
    MOVEABLE,
    PER_START,
    AlsoCalled,
    FixesShapes,
    Frequent,
    Identity,
    InReplay,
    NoEffectOnResults,
    NotSearched,
    OnlyIf,
    ResolvedInIdentity,
)
from common.settings.model import Place, Settings, needed_text, unmet_conditions
from trainer.config.data import BatchConfig, DataErrorsConfig, LoaderConfig, MixtureConfig, fitting_micro
from trainer.config.finetuning import ClassificationConfig, DistillationConfig, LoraConfig, PreferenceConfig
from trainer.config.health import AlertsConfig, GuardConfig, WatchdogConfig
from trainer.config.model import ModelConfig
from trainer.config.optimization import EmaConfig, LossConfig, OptimConfig, ScheduleConfig
from trainer.config.run import BranchConfig, CheckpointConfig, EvalConfig, LimitsConfig, LogConfig, ResumeConfig

Precision = Literal["fp32", "bf16", "fp16", "float8"]  # number format of a run's matrix products


class TrainConfig(Settings):
    """All settings of `trainer train`."""

    environment_prefix: ClassVar[str] = "TRAIN_"
    recipe_table: ClassVar[str] = "train"
    resolver: ClassVar[str] = "trainer.runs.defaults"
    facts: ClassVar[tuple[str, ...]] = ("device", "extension.loss", "extension.model", "ranks", "watchdog.enabled")
    examples: ClassVar[tuple[str, ...]] = (
        "--data workspace/data --run workspace/runs/first --recipe demo",
        "--data workspace/data --run workspace/runs/big --limits.epochs 3",
        "--run workspace/runs/first",
    )

    recipe: Annotated[
        ResolvedInIdentity[str | None],
        MOVEABLE,
        NotSearched("the recipe is the same for all trials"),
        Frequent("demo", 3),
        InReplay(None),
    ] = Field(
        None, description="Recipe: its name in env/recipes, a .toml file, or auto: settings chosen for the text and the time."
    )
    data: Annotated[
        ResolvedInIdentity[Path],
        FOLDER,
        MOVEABLE,
        NotSearched("losses on different data cannot be compared"),
        Frequent("workspace/data", 1),
        AlsoCalled("data_dir data_path dataset train_data"),
    ] = Field(description="Directory that `trainer prepare` wrote.")
    run: Annotated[
        NoEffectOnResults[Path],
        PER_START,
        NotSearched("each trial has its own run"),
        Place(target="folder"),
        Frequent("workspace/runs/first", 2),
        AlsoCalled("out out_dir output output_dir run_dir save_dir resume resume_from_checkpoint"),
    ] = Field(description="Directory of this run. An existing run is continued; --run alone uses its saved settings.")
    init: Annotated[ResolvedInIdentity[Path | None], FOLDER] = Field(
        None, description="Directory of a run whose weights a new run begins with; none: new weights."
    )
    init_checkpoint: Annotated[ResolvedInIdentity[str], OnlyIf("init"), FOLDER] = Field(
        "latest", pattern=r"^(latest|best|[0-9]{1,16})$", description="Checkpoint of `init`: latest, best, or its step."
    )
    seed: Annotated[Identity[int], AlsoCalled("random_seed")] = Field(
        1337, ge=0, lt=1 << 63, description="Seed of initial weights, order of rows and samples."
    )
    device: ResolvedInIdentity[Literal["auto", "cpu", "cuda"]] = Field(
        "auto", description="Device to compute on; auto: GPUs if there are any."
    )
    threads: Annotated[
        ResolvedInIdentity[int | None],
        NotSearched("all trials have the same number of threads"),
        InReplay(identity=True),
        AlsoCalled("num_threads"),
    ] = Field(None, ge=1, le=1024, description="CPU threads of a rank; none: OMP_NUM_THREADS or its share of the cores.")
    precision: Annotated[Identity[Literal["auto"] | Precision], AlsoCalled("dtype bf16 fp16 amp mixed_precision")] = Field(
        "auto",
        description="Number format of forward and backward; weights stay fp32. auto: bf16 on GPUs (fp16 without bf16), fp32 on "
        "CPUs (bf16 with AMX from model.width = 256 on). float8: matrix products; bf16 for the rest.",
    )
    tf32: Annotated[Identity[bool], OnlyIf("device = cuda")] = Field(
        False, description="Whether GPUs round the inputs of fp32 matrix products to 10 bits of mantissa, which is faster."
    )
    reproducibility: Annotated[Identity[Literal["off", "run", "elastic"]], AlsoCalled("deterministic")] = Field(
        "run",
        description="Runs with the same bits. off: none; run: those on as many ranks, also resumed; elastic: those on 1, 2, 4 or "
        "8 ranks.",
    )
    parallel: Annotated[Identity[Literal["ddp", "fsdp"]], AlsoCalled("fsdp ddp")] = Field(
        "ddp", description="ddp: each rank has all weights; fsdp: ranks share weights and optimizer state, for large models."
    )
    attention: ResolvedInIdentity[Literal["auto", "varlen", "flex", "documents", "sdpa"]] = Field(
        "auto", description="Kernel of the attention; auto: the fastest on the machine."
    )
    objective: Annotated[Identity[Literal["language", "classification", "preference", "distillation"]], FixesShapes()] = Field(
        "language",
        description="Task. language: the next token; classification: the label of a document; preference: the better answer of a "
        "pair; distillation: the next token and a teacher's distributions.",
    )
    teacher: Annotated[ResolvedInIdentity[Path | None], OnlyIf("objective = distillation"), FOLDER] = Field(
        None, description="Directory of the run that distillation learns from."
    )
    teacher_checkpoint: Annotated[ResolvedInIdentity[str], OnlyIf("objective = distillation"), FOLDER] = Field(
        "latest", pattern=r"^(latest|best|[0-9]{1,16})$", description="Checkpoint of `teacher`: latest, best, or its step."
    )
    encoder: Annotated[ResolvedInIdentity[Path | None], OnlyIf("objective = classification"), FOLDER] = Field(
        None,
        description="Directory of a Hugging Face encoder (config.json, *.safetensors) to classify with; none: the decoder of "
        "`model`.",
    )
    extension: Annotated[ResolvedInIdentity[Path | None], ASKED_AGAIN, NotSearched("the code is the same for all trials")] = Field(
        None, description="Python file, or folder with __init__.py, with own callbacks, loss, model or training step."
    )
    compile: Annotated[Identity[Literal["auto", "on", "layers", "off"]], AlsoCalled("torch_compile")] = Field(
        "auto",
        description="Whether torch.compile is used; auto: on CUDA only; layers: only for the layers, whose code is made once for "
        "all, so that short runs start sooner.",
    )
    verify_data: NoEffectOnResults[bool] = Field(True, description="Whether a shard's digest is checked when it is opened.")
    prefetch: Annotated[NoEffectOnResults[int], InReplay(2)] = Field(
        2, ge=1, le=64, description="Global batches to read in advance."
    )
    loader: LoaderConfig = LoaderConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    batch: BatchConfig = BatchConfig()
    mixture: MixtureConfig = MixtureConfig()
    preference: PreferenceConfig = PreferenceConfig()
    loss: LossConfig = LossConfig()
    distillation: DistillationConfig = DistillationConfig()
    classification: ClassificationConfig = ClassificationConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    ema: EmaConfig = EmaConfig()
    guard: GuardConfig = GuardConfig()
    limits: LimitsConfig = LimitsConfig()
    eval: Annotated[EvalConfig, NotSearched("losses of different evaluations cannot be compared")] = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: Annotated[LogConfig, NotSearched("it has no effect on the loss")] = LogConfig()
    alerts: AlertsConfig = AlertsConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    data_errors: DataErrorsConfig = DataErrorsConfig()
    resume: Annotated[ResumeConfig, NotSearched("it holds for one start alone")] = ResumeConfig()
    branch: BranchConfig = BranchConfig()

    @classmethod
    def adapted(cls, values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
        """Return a smaller `batch.micro_batch_size` if that of a recipe does not divide `batch.global_batch_size`."""
        if "batch.micro_batch_size" in given or "batch.micro_batch_size" not in values:
            return {}
        micro = fitting_micro(values.get("batch.global_batch_size"), values["batch.micro_batch_size"])
        return {} if micro is None else {"batch.micro_batch_size": micro}

    @property
    def number_format(self) -> Precision:
        """`precision` as a format. `auto` is replaced by a format before the model is built."""
        assert self.precision != "auto"
        return self.precision

    def compiles(self, device_type: str) -> bool:
        return self.compile in ("on", "layers") or (self.compile == "auto" and device_type == "cuda")

    @model_validator(mode="after")
    def _check_limits(self) -> TrainConfig:
        limits, schedule = self.limits, self.schedule
        if limits.steps is not None or limits.epochs is not None or limits.tokens is not None:
            return self
        if limits.minutes is None:
            raise ValueError("no limit is set; give limits.steps, limits.epochs, limits.tokens or limits.minutes")
        if schedule.needs_length and schedule.decay_steps is None:
            raise ValueError(
                f"{schedule.needs_length} needs a number of steps, and limits.minutes gives none; set schedule.decay_steps or "
                "another limit, or use schedule.kind = wsd, whose cool-down can begin in time for the end"
            )
        return self

    @property
    def without_adapters(self) -> TrainConfig:
        """The same settings for the model without adapters, or with merged ones."""
        return self.model_copy(update={"lora": LoraConfig()})

    @property
    def as_language_model(self) -> TrainConfig:
        """The same settings for the decoder that a training has left, used as a plain language model."""
        return self.without_adapters.model_copy(
            update={
                "objective": "language",
                "init": None,
                "init_checkpoint": "latest",
                "teacher": None,
                "teacher_checkpoint": "latest",
                "preference": PreferenceConfig(),
                "distillation": DistillationConfig(),
            }
        )

    @property
    def has_dropout(self) -> bool:
        return self.model.has_dropout or (self.lora.rank is not None and self.lora.dropout > 0)

    @model_validator(mode="after")
    def _check_lora(self) -> Self:
        if self.lora.rank is None:
            return self
        if not self.optim.optimizer.trains_adapters:
            raise ValueError(
                f"lora.rank trains adapters, which need AdamW: optim.kind = {self.optim.kind} works on whole matrices, and an "
                "adapter is the product of two; set optim.kind = adamw and a rate for it, such as optim.lr = 3e-4"
            )
        if self.precision == "float8":
            raise ValueError("lora.rank does not work with precision = float8, which replaces the same matrices; use bf16")
        return self

    @model_validator(mode="after")
    def _check_encoder(self) -> Self:
        if self.encoder is not None and self.init is not None:
            raise ValueError("init and encoder both name the weights that the run begins with; remove one of them")
        if self.encoder is not None and self.parallel == "fsdp":
            raise ValueError("parallel = fsdp cannot split an encoder, whose micro-batches have different shapes; use ddp")
        return self

    @model_validator(mode="after")
    def _check_elastic(self) -> Self:
        if self.reproducibility != "elastic":
            return self
        if self.parallel == "fsdp":
            raise ValueError("reproducibility = elastic adds gradients in a fixed order, which parallel = fsdp cannot do; use ddp")
        if self.batch.micro_batch_size == "auto":
            raise ValueError(
                "reproducibility = elastic needs a fixed batch.micro_batch_size, because its bits depend on it; give a number"
            )
        if self.batch.micro_batches & (self.batch.micro_batches - 1):
            raise ValueError(
                f"reproducibility = elastic adds gradients in a binary tree, and batch.global_batch_size = "
                f"{self.batch.global_batch_size} with batch.micro_batch_size = {self.batch.micro_batch_size} make "
                f"{self.batch.micro_batches} micro-batches, which is not a power of two; use for example "
                f"batch.global_batch_size = {self.batch.micro_batch_size << (self.batch.micro_batches.bit_length() - 1)}"
            )
        return self


class PlanConfig(TrainConfig):
    """The settings of `trainer plan`, which writes nothing and so needs no run."""

    run: Annotated[NoEffectOnResults[Path], PER_START, Frequent("workspace/runs/first", 2)] = Field(
        Path(".planned-run"), description="Directory of this run. For an existing run, the plan counts the steps that are done."
    )


def settings_without_effect(
    config: TrainConfig, *, device: str, num_ranks: int, watched: bool, custom_loss: bool, own_model: bool
) -> list[str]:
    """Return a warning for each setting that differs from its default and has no effect. `watched`: whether the watchdog runs."""
    found = (device, custom_loss, own_model, "several" if num_ranks > 1 else "one", "on" if watched else "off")
    unmet = unmet_conditions(config, dict(zip(config.facts, found, strict=True)))
    return [needed_text(name, conditions) for name, conditions in unmet.items()]
