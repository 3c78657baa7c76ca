"""The options of an engine. Each is described once, here: for help(Engine), and for the commands
that share it.

class Options(SharedOptions, ModelOptions):
    max_batch: MaxBatch = 32        its type and its text for --help
...
Engine(model, **engine_arguments(options))
"""

import inspect
import textwrap
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import numpy as np
from typing_extensions import Doc

from ..errors import UserError
from ..nn.draft_heads import DraftHeads
from ..nn.model import Transformer
from .paged_cache import KINDS as CACHE_KINDS

# Prompt tokens in one forward pass. More would cost more memory than they save time: on the CPU the
# reference of attention computes all scores at once, heads x tokens x keys.
PREFILL_TOKENS = {"gpu": 8192, "cpu": 512, "sim": 512}
PREFILL_INTERVAL = {"gpu": 8, "cpu": 1, "sim": 1}  # steps: some 30 ms
SERVED_TOKENS = 8192  # of a sequence in `serve` and `chat`, if the model supports more
MAX_BATCH = 1 << 16  # sequences at a time
MAX_DRAFT = 31  # tokens: beyond 32 rows a step takes longer
# 16 KB of keys per head of 128 channels in bf16; larger blocks would waste more of their last one
BLOCK_TOKENS = 64

# ------------------------------------------------------------------ options that some commands have
MaxBatch = Annotated[int, Doc("sequences at a time; the others wait")]
MaxSeqLen = Annotated[
    int | None,
    Doc(
        "tokens of a sequence, prompt and answer; none: what the model supports, at most 8192 in "
        "serve and chat"
    ),
]
BatchInvariant = Annotated[
    bool,
    Doc(
        "the tokens of a sequence do not depend on the other sequences, not even by rounding; "
        "slower"
    ),
]
KVCache = Annotated[
    Literal["full", "fp8"],
    Doc(
        "fp8: keys and values in one byte per number, with a scale per token and head; full: as "
        "precision says"
    ),
]
LogprobsOf = Annotated[
    Literal["model", "sampled"],
    Doc(
        "of which distribution the log-probabilities of an answer's tokens are: the model's own, or "
        "the one that they are drawn from, after constraints, bias, penalties, temperature, min-p, "
        "top-k and top-p (vLLM: raw_logprobs, processed_logprobs)"
    ),
]
Draft = Annotated[
    str | None,
    Doc(
        "the folder of a smaller model with the same tokenizer, which guesses the tokens, or of "
        "heads that were trained for this model (finetune --draft-heads); none: what followed the "
        "last tokens before is guessed"
    ),
]
PrefillInterval = Annotated[
    int | None,
    Doc(
        "while sequences decode, admit new requests every so many steps: more tokens per second, a "
        "later first token; none: 8 on a GPU, else 1"
    ),
]


class Sizes(NamedTuple):
    """The sizes that None stands for."""

    max_seq_len: int
    prefill_tokens: int
    prefill_interval: int


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """The options of an engine that serve, generate, chat and evaluate have, too."""

    weights: Annotated[
        Literal["full", "int8", "fp8", "int4", "nf4"],
        Doc(
            "int8, fp8: matrices in one byte per weight, with a scale per row; int4, nf4: in four "
            "bits, with a scale per 128 and 64 columns, too, and a head that is not the embedding in "
            "int8; full: as precision says"
        ),
    ] = "full"
    kv_cache: KVCache = "full"
    speculate: Annotated[
        int,
        Doc(
            "tokens of an answer that are guessed and verified together, at most, where that is "
            "faster (speculative decoding); with batch_invariant no bit of an answer changes; "
            "0: none"
        ),
    ] = 0


@dataclass(frozen=True)
class EngineOptions(SharedOptions):
    """The arguments of Engine after the model, in their order; the shared ones by name."""

    max_batch: MaxBatch = 8
    max_seq_len: MaxSeqLen = None
    batch_invariant: BatchInvariant = False
    reuse_prefix: Annotated[
        bool,
        Doc(
            "sequences that begin with the same tokens share the blocks of the KV cache that hold "
            "them, also after the first of them has ended (earlier turns of a chat). If weights "
            "are written in place, call forget_prefixes"
        ),
    ] = True
    graph: Annotated[
        bool, Doc("capture decoding steps and prefill passes as CUDA graphs, on a GPU")
    ] = True
    prefill_tokens: Annotated[
        int | None,
        Doc(
            "prompt tokens in one forward pass, at most; longer prompts are computed in several "
            "chunks; none: 8192 on a GPU, else 512"
        ),
    ] = None
    gpu_memory: Annotated[
        float,
        Doc("share of the GPU's memory that may be in use, including the KV cache"),
    ] = 0.9
    cache_bytes: Annotated[int | None, Doc("bytes of the KV cache, at most; none: no limit")] = None
    block_tokens: Annotated[int, Doc("tokens of a block of the KV cache: 16, 32, 64 or so on")] = (
        BLOCK_TOKENS
    )
    warm_up: Annotated[
        bool,
        Doc(
            "on a GPU, compile every kernel that a request may need before the constructor "
            "returns, so that no request waits for the compiler (`ready` says how long it took)"
        ),
    ] = False
    prefill_interval: PrefillInterval = None
    logprobs_of: LogprobsOf = "model"
    draft_model: Annotated[
        Transformer | DraftHeads | None,
        Doc(
            "a smaller Transformer with the same tokens, which drafts, or heads of this one; none: "
            "prompt lookup does"
        ),
    ] = None

    def sizes(self, model: Transformer) -> Sizes:
        """Check the options for a model. Return the sizes that None stands for. Raises
        UserError."""
        context = model.config.context
        sizes = Sizes(
            max_seq_len=_default(self.max_seq_len, context),
            prefill_tokens=_default(self.prefill_tokens, PREFILL_TOKENS[model.device]),
            prefill_interval=_default(self.prefill_interval, PREFILL_INTERVAL[model.device]),
        )
        _check_positive(
            max_batch=self.max_batch,
            block_tokens=self.block_tokens,
            cache_bytes=_default(self.cache_bytes, 1),
            **sizes._asdict(),
        )
        if not isinstance(self.speculate, (int, np.integer)) or not (
            0 <= self.speculate <= MAX_DRAFT
        ):
            raise UserError(
                f"speculate must be a whole number from 0 to {MAX_DRAFT}, got {self.speculate!r}"
            )
        if self.draft_model is not None:
            self._check_draft(self.draft_model, model, sizes.max_seq_len)
        if self.max_batch > MAX_BATCH:
            raise UserError(f"max_batch must be at most {MAX_BATCH}, got {self.max_batch}")
        if not 2 <= sizes.max_seq_len <= context:
            raise UserError(
                f"max_seq_len {sizes.max_seq_len} must be at least 2 and at most {context}, the "
                "longest sequence of the model"
            )
        if self.block_tokens < 16 or self.block_tokens & (self.block_tokens - 1):
            raise UserError(f"block_tokens must be 16, 32, 64 or so on, got {self.block_tokens}")
        if not 0 < self.gpu_memory <= 1:
            raise UserError(
                f"gpu_memory must be a share, above 0 and at most 1, got {self.gpu_memory}"
            )
        if self.kv_cache not in CACHE_KINDS:
            raise UserError(
                f"kv_cache {self.kv_cache!r} is not known: choose {', '.join(CACHE_KINDS)}"
            )
        if self.logprobs_of not in ("model", "sampled"):
            raise UserError(
                f"logprobs_of {self.logprobs_of!r} is not known: choose model or sampled"
            )
        if self.batch_invariant and self.kv_cache != "full":
            raise UserError(
                f"batch_invariant and kv_cache {self.kv_cache!r} cannot be combined: leave one of "
                "them out"
            )
        return sizes

    def _check_draft(
        self, draft: Transformer | DraftHeads, model: Transformer, max_seq_len: int
    ) -> None:
        """Raise UserError if the draft model, or the heads, do not fit the model."""
        if not self.speculate:
            raise UserError(
                "without speculate a draft model drafts nothing: set speculate to 1 or more"
            )
        if isinstance(draft, DraftHeads):
            draft.check_fit(model)
            return
        own = draft.config
        if own.vocab_size != model.config.vocab_size or draft.device != model.device:
            raise UserError(
                f"the draft model has {own.vocab_size} tokens on the {draft.device}, the model "
                f"{model.config.vocab_size} on the {model.device}: they must be the same"
            )
        if own.context < max_seq_len:
            raise UserError(
                f"the draft model supports sequences of {own.context} tokens: choose another one, "
                f"or a max_seq_len below {max_seq_len}"
            )


def chosen_seq_len(max_seq_len: int | None, context: int) -> int:
    """Return the max_seq_len of `serve` and `chat` for a model that supports `context`: they
    allocate all of it at the start."""
    return min(context, SERVED_TOKENS) if max_seq_len is None else max_seq_len


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def _check_positive(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name} must be a positive whole number, got {value!r}")


def engine_arguments(options: Any) -> dict[str, Any]:
    """Return the options of a command that Engine has under the same name."""
    names = [field.name for field in fields(EngineOptions)]
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def described() -> str:
    """Return a paragraph for each option of an engine: its name and its text."""
    paragraphs = []
    for name, kind in get_type_hints(EngineOptions, include_extras=True).items():
        (text,) = [x.documentation for x in kind.__metadata__ if isinstance(x, Doc)]
        paragraphs.append(textwrap.fill(f"{name}: {text}", 100, subsequent_indent="    "))
    return "\n".join(paragraphs)


def engine_parameters() -> list[inspect.Parameter]:
    """Return the parameters of EngineOptions as a reader wants them: without the texts."""
    kinds = get_type_hints(EngineOptions)
    parameters = inspect.signature(EngineOptions).parameters.values()
    return [parameter.replace(annotation=kinds[parameter.name]) for parameter in parameters]
