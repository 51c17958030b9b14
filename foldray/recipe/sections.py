"""The sections of a recipe except `data`, `schedule` and `tune`: their keys, defaults, and the rules of single keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, NonNegativeFloat, PositiveFloat, model_validator

from foldray.blueprint import Strict
from foldray.recipe.bounds import (
    Adapters,
    Beta,
    FamilyName,
    Label,
    Length,
    OwnRows,
    Seed,
    SequenceCount,
    Steps,
    StepsOrZero,
    TokenId,
    Url,
    Workers,
)


class FoldSpec(Strict):
    """Parallel sizes. The sizes dp and edp follow from the number of workers.

    No size changes the results beyond rounding, unless experts drop tokens (`model.router.drop_scope`) or the balance loss counts
    batches (`model.router.balance_scope`).
    """

    tp: Workers = 1
    """Tensor-parallel size: workers that share attention's heads and the dense matrices. It divides
    their memory and compute, and adds collectives to every block."""
    cp: Workers = 1
    """Context-parallel size: workers that share each sequence. It divides activation memory and
    compute, and sends keys and values between workers."""
    pp: Workers = 1
    """Pipeline-parallel size: positions of the pipeline, which hold different blocks. It divides
    the memory of weights; positions idle while the pipeline fills and drains."""
    ep: Workers = 1
    """Expert-parallel size: workers that share the experts of a block. It divides the experts'
    memory; all-to-alls send tokens to the workers that hold their experts."""
    ep_inside: Workers = 1
    """How many neighbouring workers of an expert-parallel group share a node; it divides `ep`. With
    more than 1, a token travels once to each node, to the worker with the same place there. This
    worker passes it on to those of its node that have experts of the token. So links between nodes
    carry least. It needs `moe.dispatch: rank`, or `placement`."""
    etp: Workers = 1
    """Expert-tensor-parallel size: workers that share the matrices of each expert. It divides the
    experts' memory, and sends every row to all of them. It does not follow `tp`."""
    order: str = "tp-cp-dp-pp"
    """Attention's axes. Neighbouring ranks form the groups of the first axis, so the axis with the
    most traffic goes first."""
    moe_order: str = "etp-ep-edp-pp"
    """The experts' axes, in the same notation as `order`."""


class PlacementSpec(Strict):
    """Workers of their own for the experts (DisagMoE). Without this section, all workers have both attention and experts.

    The first workers hold attention, with embedding, dense blocks, shared experts and routers; `fold.tp`, `fold.cp` and
    `fold.pp` divide them. The last workers hold the experts; `fold.ep`, `fold.etp` and `expert_pp` divide them. The order of
    a step is `schedule.kind: af_pipe`, the default, or `list`.
    """

    attention: Workers
    """Workers for attention and everything else outside the experts."""
    experts: Workers
    """Workers for the experts. Both numbers must add up to `cluster.workers`."""
    expert_pp: Workers | None = None
    """Pipeline positions of the experts, which hold different MoE blocks. It may differ from
    `fold.pp`, the positions of attention. Null is `fold.pp`."""
    attention_nodes: Label | None = None
    """Label `KEY=VALUE` of the nodes that attention's workers may run on; a node gets its labels
    from `ray start --labels`. Null is any node."""
    expert_nodes: Label | None = None
    """Label of the nodes that the experts' workers may run on."""
    attention_adapters: Adapters | None = None
    """Names of the InfiniBand or RoCE adapters that NCCL takes on attention's workers, such as
    `[mlx5_0, mlx5_1]` (`NCCL_IB_HCA`). So halves that share nodes may have different numbers of them.
    Null is the job's own setting, or all of a node. It needs `cluster.gpu`."""
    expert_adapters: Adapters | None = None
    """Names of the adapters that NCCL takes on the experts' workers."""


class MoeSpec(Strict):
    """The kernels of the MoE layers, and how their tokens travel. All keys change the speed, and the results by no more than
    rounding."""

    backend: Literal["torch", "tutel", "deepspeed"] = "torch"
    """`torch` is foldray's own gate and permutation. `tutel` chooses experts with Tutel's gate (for
    `score: softmax`; with `topk: 1` only if weights are not rescaled), and copies and sums rows
    with Tutel's kernels (not in float64). `deepspeed` chooses experts with DeepSpeed's gates."""
    experts: Literal["grouped", "loop"] = "grouped"
    """`grouped` takes the fastest kernels for the experts' matrix products. `loop` is a slow
    reference: one expert after another, in plain autograd."""
    dispatch: Literal["assignment", "rank"] = "assignment"
    """What a token travels for. `assignment` sends a row to each of its experts, and brings back as
    many. `rank` sends one row to each worker of the expert-parallel group that has experts of the
    token; this worker sums their results. So fewer bytes travel if a worker has several experts of
    a token, which `topk` and `fold.ep` decide. `fold.ep_inside` sends one row to each node first.
    `rank` needs `backend: torch` or `deepspeed`, and `model.router.pad: false`. With `placement`,
    rows always travel once to each worker, or to each node."""

    place_every: Steps | None = None
    """Optimizer steps between two placements of the experts. By the tokens of these steps, experts of a
    block change places between workers, with their optimizer state, if the fullest worker's load then
    falls by a twentieth or more. Routers number them anew, so every token keeps its experts. Null
    leaves experts where they are."""
    copies: Annotated[int, Field(ge=0, le=4096)] = 0
    """Copies of other workers' experts that each worker has room for, in each block. The experts with
    the most tokens in the last steps get copies on workers that have few. Their weights travel there
    once in a step, beside what is computed, and the copies' gradients travel back. A copy takes as
    many tokens as make loads even, and at least so many that their rows are as many bytes as the copy
    itself. 0 makes no copies."""
    copies_every: Annotated[Steps, Field(ge=2)] = 10
    """Optimizer steps from one choice of the experts with copies to the next one. The first choice is
    made after two steps. A block has copies only if those that the first half of the steps asks for
    would have made its second half more even by a twentieth or more."""
    wire: Literal["bfloat16", "float8"] | None = None
    """How rows are written on their way to experts and back. Null sends them as they are.
    `bfloat16` rounds them: a number is off by at most 1/256 of it. `float8` (e4m3) is for rows on
    their way to experts, and for the gradients of results: a number is off by at most 1/16 of it,
    or by 1/458752 of the largest of the 128 numbers that share a scale; rows on their way back are
    bfloat16. `foldray verify` shows what this does to losses and gradients. With `fold.ep_inside`,
    it is for what travels between nodes."""


class OptimizerSpec(Strict):
    """The update rule and the learning rate."""

    kind: Literal["adamw", "sgd", "muon"] = "adamw"
    """Update rule. `adamw` keeps two more values per parameter; `sgd` keeps one with `momentum`,
    and none without. `muon` makes the momentum of each matrix of the hidden layers orthogonal: of
    attention, networks, experts and routers. It keeps one more value for each of their elements.
    AdamW updates all other parameters: embeddings, the head, norms, biases and other vectors.
    `muon` needs `engine.kind: torch`."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate. The warm-up ends at this rate."""
    adamw_lr: PositiveFloat | None = None
    """Peak learning rate of what `muon` leaves to AdamW. It rises and falls as `lr` does. Null is
    `lr`. Other kinds need null."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment. `sgd` does not use them."""
    eps: PositiveFloat = 1e-8
    """Number that AdamW adds to the denominator of its update. `sgd` does not use it."""
    moments: Literal["bfloat16"] | None = None
    """Type in which `adamw` keeps its two moments. Null is that of the weights that it updates.
    `bfloat16` saves 4 bytes per parameter. The update computes in that wider type; then moments are
    rounded to the nearest bfloat16, by at most 1/256, which acts on later steps. It needs
    `engine.kind: torch`, and `betas` of at most 0.996, because a moment that decays more slowly
    would be rounded back to where it was."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay, which pulls matrices towards zero. Norms and biases have none."""
    momentum: Beta = 0.0
    """Momentum of `sgd` and `muon`. The default of `muon` is 0.95. With `sgd`, above 0 it keeps one
    more value per parameter. `adamw` needs 0."""
    nesterov: bool = True
    """Whether `muon` has Nesterov's momentum. Other kinds need true."""
    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Iterations of Newton-Schulz with which `muon` makes a matrix orthogonal. They run in
    bfloat16, or in float64 with `precision: float64`. Other kinds need 5."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate for a matrix with `muon`, as in torch. `match_rms_adamw` makes
    updates as large as those of AdamW, so `lr` and `weight_decay` of AdamW fit: 0.2 · √max(in,
    out). `original` is √max(1, out / in). Other kinds need `match_rms_adamw`."""
    clip: PositiveFloat | None = 1.0
    """Largest norm of the gradient; a larger gradient is scaled down to it. Null does not clip."""
    warmup_steps: StepsOrZero = 0
    """Optimizer steps in which the learning rate rises linearly to `lr`."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up, until the last of `training.steps`. `constant`
    keeps it at `lr`."""
    min_lr: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end, as a share of `lr`. `decay: constant` does not use it."""

    @model_validator(mode="before")
    @classmethod
    def _muon_has_momentum(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("kind") == "muon":
            return {"momentum": 0.95, **given}
        return given

    @property
    def moment_bytes(self) -> int:
        """Bytes of an element of a moment, if weights are updated in float32."""
        return 2 if self.moments else 4

    @property
    def iterations(self) -> int:
        """Iterations of Newton-Schulz in every step; 0 without Muon."""
        return self.ns_steps if self.kind == "muon" else 0


class TrainingSpec(Strict):
    """How long to train, on how much data at once, and when to validate."""

    steps: Steps = 100
    """Optimizer steps of the whole training. The learning rate ends its decay there."""
    stop_after: Steps | None = None
    """Save and stop after this step; `--resume` trains the rest later. Null trains all `steps`."""
    global_batch: SequenceCount = 8
    """Sequences per optimizer step, over all workers. It must be a multiple of dp ×
    `micro_batch`."""
    micro_batch: SequenceCount = 1
    """Sequences that a data-parallel place takes through the model at once. A larger micro-batch
    computes more efficiently and needs more activation memory."""
    eval_every: Steps | None = None
    """Optimizer steps between validations. Null validates only at the end."""
    eval_sequences: Steps | None = None
    """Sequences per validation, of every source of a mixture. Fewer are faster, and measure less
    exactly. Null takes the whole validation set."""
    seed: Seed = 0
    """Seed of the initial weights and of the order of the sequences. Every fold starts from the
    same weights."""
    skip_steps: Annotated[int, Field(ge=0, le=1000)] = 0
    """How many steps in a row training skips because their gradient has a number that is not
    finite. A skipped step leaves weights, biases and the optimizer's state as they are, and its
    text is not trained. One such step more ends the attempt. 0 skips none."""
    weights: str | None = None
    """Folder of a model of Hugging Face's transformers, which every node must see. Training starts
    from its weights instead of drawn ones. `foldray import-hf` writes such a recipe. With
    `model.adapter`, the folder must stay: checkpoints hold only what training changes."""
    adapter: str | None = None
    """Folder of an adapter in PEFT's format, which every node must see. Training starts from it.
    Its rank, its scale and its targets must be those of `model.adapter`. Null starts with adapters
    that add nothing."""


class EngineSpec(Strict):
    """The engine that holds the optimizer."""

    kind: Literal["deepspeed", "torch"] = "deepspeed"
    """`deepspeed` trains with DeepSpeed's ZeRO, `torch` with foldray's own. Both give the same
    update, to rounding."""
    zero: Literal[0, 1, 2] = 1
    """ZeRO stage. 1 shares the optimizer's state out over data-parallel workers, which saves
    memory; 2 also frees gradients as they leave, which with `kind: deepspeed` needs
    `schedule.reduction: buckets` or `chunks`. The default is 0 with `kind: torch`."""
    wire: Literal["bfloat16"] | None = None
    """How gradients are written on their way to the worker that owns their sum. Null sends float32.
    `bfloat16` halves the bytes, and rounds each worker's part of a sum by up to 1/256 of it; the owner
    adds the parts up in float32. It needs `kind: torch` and `zero: 1` or `2`."""
    offload: Literal["optimizer"] | None = None
    """What is in the memory of the host instead of the GPU. `optimizer` moves the weights that the
    optimizer updates, its moments and its update: 12 bytes per parameter with `adamw` and
    `precision: bfloat16`. A step then takes longer, because gradients and weights travel, and
    processors update (`cluster.cpus_per_worker`). With `kind: deepspeed`, it needs `zero: 1` or
    `2`. Checkpoints are the same with and without it. Null keeps all on the GPU."""
    deepspeed: Annotated[dict[str, JsonValue], Field(max_length=64)] = Field({})
    """Keys of DeepSpeed's own configuration, which are added to what foldray gives it, such as
    `{zero_optimization: {reduce_bucket_size: 50000000}}`. Keys that foldray sets itself, or whose
    effect has a recipe key of its own, are refused. It needs `kind: deepspeed`."""

    @model_validator(mode="before")
    @classmethod
    def _torch_has_stage_0(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("kind") == "torch":
            return {"zero": 0, **given}
        return given


class CheckpointSpec(Strict):
    """When the state of a training is saved, and how much of it is kept."""

    every: Steps | None = None
    """Optimizer steps between checkpoints. A lost worker costs the steps since the last one. Null
    saves only at the end."""
    keep: Steps = 2
    """Number of newest checkpoints that stay in the run storage."""
    asynchronous: bool = True
    """Write a copy in host memory to the storage while training goes on. False makes training wait
    for the storage."""


class RoutesSpec(Strict):
    """The routes of tokens as data: which experts get them, recorded in the run's folder or taken from another run."""

    record: Steps | None = None
    """Optimizer steps between records of how many tokens of each worker go to each expert, in every
    MoE block. Null records none."""
    record_tokens: Steps | None = None
    """Optimizer steps between records of the experts of every token. These need far more room: a
    byte for each of a token's experts in each block, or two with more than 256 experts."""
    replay: str | None = None
    """Folder of a run that has recorded the experts of its tokens, which every node must see. They
    stand for the choice of the routers in the steps that have them. The routers weigh them, and
    these weights have gradients. Model, data, `training.seed` and `training.global_batch` must be
    those of that run; the fold may be another one. Null lets routers choose."""


class TrackingSpec(Strict):
    """Where metrics go."""

    experiment: Annotated[str, Field(min_length=1)] = "foldray"
    """MLflow experiment that the run is listed under."""
    uri: Url | None = None
    """MLflow tracking URI. Null is a SQLite database, `mlflow.db`, in the run storage."""
    metrics: OwnRows = ()
    """Metrics of your own, each as `module:NAME`, where NAME is a `trainers.Metric`.
    `metrics.jsonl` and MLflow have them, and Prometheus and the closing table where the metric says
    so."""


class ClusterSpec(Strict):
    """What the run takes of a Ray cluster."""

    workers: Workers = 1
    """Number of workers. Each is a Ray actor and one rank of the fold."""
    cpus_per_worker: Workers = 1
    """CPU cores that Ray reserves for a worker, and threads that torch computes with."""
    gpu: bool = False
    """True gives every worker one GPU and communicates over NCCL. False computes on CPUs, over
    gloo."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Ray's placement of workers: on few nodes (`PACK`), on many (`SPREAD`), on one node only
    (`STRICT_PACK`), one per node (`STRICT_SPREAD`). Traffic inside a node is faster."""
    address: Url | None = None
    """Address of the Ray cluster to join. Null joins the cluster of RAY_ADDRESS or of the
    surrounding Ray job, and else starts Ray on this machine."""
    storage: Url | None = None
    """Folder or URI for runs and checkpoints, which every node must see. Null is `./runs`, or
    `~/foldray/runs` in a Ray job."""
    min_workers: Workers | None = None
    """Fewest workers that training goes on with after it has lost some. It then takes the best
    legal fold for the workers that are left, and all of them again when the cluster has room. If
    there are more than 64 numbers in between, only every n-th of them counts. Null waits for all
    workers."""
    max_failures: StepsOrZero = 3
    """How many attempts of a training may fail without a new checkpoint between them. After each
    failure, training goes on from the newest undamaged checkpoint. An error that comes back at the
    same step ends it at once."""
    failures: OwnRows = ()
    """Kinds of failures of your own, each `module:NAME` of a `trainers.FailureKind`. It says which
    exceptions of workers are of its kind, and whether another attempt follows."""
    timeout: Annotated[float, Field(ge=1, le=86400)] = 300.0
    """Seconds that a rank waits for others before the attempt fails, with the name of the rank that
    stands still. No part of a step may take as long. A rank that shows no sign of life at all is
    replaced sooner: after a minute, or after 30 times what a step takes if that is longer."""


class TokensSpec(Strict):
    """Tokens with a role, as an exported model names them in `config.json`. Null takes those that the training uses."""

    bos: TokenId | None = None
    """Token that begins a text (`bos_token_id`). Null is none."""
    eos: Annotated[tuple[TokenId, ...], Field(max_length=64)] = ()
    """Tokens that end a text or an answer (`eos_token_id`)."""
    pad: TokenId | None = None
    """Token that fills up a batch (`pad_token_id`). Null is none."""


class ExportSpec(Strict):
    """What an exported model says of itself, beside its weights. `foldray import-hf` writes here what the folder says.

    Training does not depend on these keys. `foldray generate` stops where they say that an answer ends.
    """

    family: FamilyName | None = None
    """Family of the model in transformers, by its name in `config.json`, such as `dots1`, where
    several have all that the model has. Null is the first of them. Or `module:NAME` of a
    `trainers.hugging_face.family.Family`, if foldray does not know the family. `training.weights`
    are read by it, too."""
    max_positions: Length | None = None
    """Longest sequence of the model in tokens (`max_position_embeddings`). The export says
    `data.seq_len` if that is longer, or if this is null. With YaRN it says how far
    `model.rope_scaling` reaches, if this key says no more than its `original_positions`."""
    tokens: TokensSpec | None = None
    generation: Annotated[dict[str, JsonValue], Field(max_length=256)] = Field({})
    """Content of `generation_config.json`. The export adds to its `eos_token_id` the tokens with
    which training ends documents or answers."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that `generation` and `tokens` name as ends, each once."""
        named: Any = self.generation.get("eos_token_id")
        listed = named if isinstance(named, list) else [] if named is None else [named]
        return tuple(dict.fromkeys([*listed, *(self.tokens.eos if self.tokens else ())]))
