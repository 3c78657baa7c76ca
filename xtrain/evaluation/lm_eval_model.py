"""A model for EleutherAI's lm-eval, whose numbers equal those of its `hf` model on the same
weights.

    python -m xtrain.evaluation.lm_eval_model run --model xtrain \\
        --model_args pretrained=FOLDER --tasks arc_easy

takes the arguments of the command `lm_eval`, which finds only models that are registered before it
starts. In a program:

    from xtrain.evaluation.lm_eval_model import register
    register()
    lm_eval.simple_evaluate(model="xtrain", model_args={"pretrained": folder}, tasks=["arc_easy"])

lm-eval is imported when `register` is called: pip install -e '.[eval]'. Written for lm-eval 0.4.13.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from ..cli import command, command_line
from ..errors import UserError
from ..serving.pretrained import load
from .scorer import Scorer, Tokens

MAX_GEN_TOKS = 256  # new tokens, if a task does not say; as in lm-eval
SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # called the same by Engine.stream
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class XtrainModel:
    """The methods of lm_eval.api.model.LM. A request has `args`: texts.

    pretrained: a Hugging Face folder, or the folder of an xtrain run.
    device: "auto", "cpu", "gpu" or "cuda".  dtype: "auto", "fp32", "bf16" or torch's names.
    batch_size: sequences at a time; "auto": 32.
    max_length: tokens of a sequence, None: what the model supports.
    change: MODULE:FUNCTION, with which the model was trained.
    Raises UserError for a folder that cannot be served.
    """

    def __init__(
        self,
        pretrained: str,
        device: str | None = "auto",
        dtype: str = "auto",
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        max_length: int | None = None,
        batch_invariant: bool = False,
        change: str | None = None,
    ):
        super().__init__()
        if str(device).startswith("cuda"):
            device = "gpu"
        else:
            device = device or "auto"
        names: dict[str, Literal["fp32", "bf16"]] = {"float32": "fp32", "bfloat16": "bf16"}
        chosen: Any = names.get(dtype, dtype)
        if chosen not in ("auto", "fp32", "bf16"):
            raise UserError(f"dtype {dtype!r} is not supported: choose auto, fp32 or bf16")
        p = load(str(pretrained), device, chosen, change)
        supported = p.model.config.context
        if max_length is None:
            context = supported
        else:
            context = int(max_length)
        if not 2 <= context <= supported:
            raise UserError(f"max_length must be from 2 to {supported}, got {max_length}")
        if str(batch_size).isdigit():
            size = batch_size
        else:
            size = max_batch_size or 32
        self.scorer = Scorer(p, context, int(size), batch_invariant)

    # ------------------------------------------------------------------------- what lm-eval calls
    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and if greedy decoding would say it.

        The beginning of a sequence that is too long is cut off.
        """
        pairs = [request.args for request in requests]
        sequences = [self._cut(self.scorer.encode_pair(*pair)) for pair in pairs]
        answers = [(score.total, score.greedy) for score in self.scorer.score(sequences)]
        for pair, answer in zip(pairs, answers):
            self._cache("loglikelihood", pair, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of all tokens of each text after begin_token.

        The windows have max_length tokens; the last one has as much context as fits.
        """
        texts = [request.args[0] for request in requests]
        encode_text = self.scorer.pretrained.tokenizer.encode_text
        windows = [self._rolling(encode_text(text)) for text in texts]
        scores = iter(self.scorer.score([tokens for parts in windows for tokens in parts]))
        totals = [sum((next(scores).total for _ in parts), 0.0) for parts in windows]
        for text, total in zip(texts, totals):
            self._cache("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each prompt until a stop string.

        The beginning of a prompt that is too long is cut off.
        """
        groups: dict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[repr(request.args[1])].append(i)
        texts = [""] * len(requests)
        for numbers in groups.values():
            stop, n, sampling = generation_options(requests[numbers[0]].args[1])
            room = self.scorer.context - n
            if room < 1:
                raise UserError(
                    f"max_gen_toks {n} leaves no room for a prompt, the context has "
                    f"{self.scorer.context} tokens: set a smaller one with --gen_kwargs"
                )
            prompts = [self.scorer.encode(requests[i].args[0])[-room:] for i in numbers]
            for i, text in zip(numbers, self.scorer.generate(prompts, n, stop, **sampling)):
                texts[i] = text
                self._cache("generate_until", requests[i].args, text)
        return texts

    @property
    def max_length(self) -> int:
        return self.scorer.context

    @property
    def max_gen_toks(self) -> int:
        return MAX_GEN_TOKS

    @property
    def tokenizer_name(self) -> str:
        return str(self.scorer.pretrained.folder).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the folder's template.

        Raises UserError if there is none, or if another one is asked for by name.
        """
        if not chat_template:
            return ""
        if chat_template is not True:
            raise UserError(
                f"there is no chat template named {chat_template!r}: leave the name out"
            )
        return self._template().source()

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of the conversation"""
        return self._template().render(chat_history, add_generation_prompt)

    def _template(self) -> Any:
        template = self.scorer.pretrained.template
        if template is None:
            raise UserError(
                f"{self.scorer.pretrained.folder} has no chat template: leave "
                "--apply_chat_template out"
            )
        return template

    # ------------------------------------------------------------------------- tokens
    def _cut(self, tokens: Tokens) -> Tokens:
        """Return the last max_length + 1 tokens: the last one is only predicted."""
        if not tokens.continuation or len(tokens.continuation) > self.scorer.context:
            raise UserError(
                f"a continuation has {len(tokens.continuation)} tokens: it must have 1 to "
                f"{self.scorer.context}"
            )
        too_many = max(0, len(tokens) - (self.scorer.context + 1))
        return Tokens(tokens.context[too_many:], tokens.continuation)

    def _rolling(self, ids: list[int]) -> list[Tokens]:
        """Return windows of which each token is predicted once, as
        lm_eval.utils.get_rolling_token_windows with context_len 1."""
        n = self.scorer.context
        whole = [self.scorer.begin_token, *ids]
        windows = []
        for first in range(1, len(whole), n):
            end = min(first + n, len(whole))
            windows.append(Tokens(whole[max(0, end - n - 1) : first], whole[first:end]))
        return windows

    def _cache(self, method: str, arguments: Any, answer: Any) -> None:
        hook = getattr(self, "cache_hook", None)  # of lm-eval's LM
        if hook is not None:
            hook.add_partial(method, arguments, answer)


def generation_options(options: dict[str, Any]) -> tuple[list[str], int, dict[str, Any]]:
    """Return the stop strings, new tokens and options of Engine.stream in a task's
    generation_kwargs.

    Raises UserError for an option that xtrain does not have.
    """
    unused = dict(options)
    stop = unused.pop("until", None) or []
    lengths = [n for n in (unused.pop(name, None) for name in LENGTHS) if n is not None]
    n = int([*lengths, MAX_GEN_TOKS][0])
    sampling = {name: unused.pop(name) for name in SAMPLING if unused.get(name) is not None}
    drawn = unused.pop("do_sample", bool(sampling.get("temperature")))
    unused = {name: value for name, value in unused.items() if value is not None}
    if unused:
        raise UserError(f"generation option {next(iter(unused))!r} is not supported: leave it out")
    if not drawn:
        sampling = {}
    elif "temperature" not in sampling:
        sampling["temperature"] = 1.0
    if isinstance(stop, str):
        stop = [stop]
    return list(stop), n, sampling


def register() -> type:
    """Make "xtrain" a model of lm-eval, and return its class.

    Raises UserError if lm-eval is not installed.
    """
    try:
        # it registers its own models, which it does later only if there are none
        import lm_eval.models  # noqa: F401
        from lm_eval.api.model import LM
        from lm_eval.api.registry import model_registry, register_model
    except ImportError as error:
        raise UserError(f"lm-eval is missing ({error}): pip install -e '.[eval]'") from None
    if "xtrain" in model_registry:
        return model_registry["xtrain"]
    return register_model("xtrain")(type("XtrainLM", (XtrainModel, LM), {}))


@command("xtrain.evaluation.lm_eval_model")
def main(arguments: list[str] | None = None) -> int:
    """Run lm-eval's command line, which knows the model "xtrain". Return the exit code."""
    register()
    from lm_eval.__main__ import cli_evaluate

    if arguments is not None:
        sys.argv[1:] = arguments
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(command_line(main))
