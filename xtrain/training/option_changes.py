"""What a resumed run may not change: the options that determine the numbers."""

import json
from dataclasses import MISSING, fields
from typing import Any

from ..config import SHAPES, ModelConfig, TrainConfig, may_change
from ..errors import UserError
from ..formats.saved_runs import Saved
from ..run_options import RunOptions


def check_unchanged(
    saved: Saved, now: dict[str, Any], config: RunOptions, world: int
) -> dict[str, str]:
    """Raise UserError if one of the options `now` is not that of the checkpoint, and may not
    differ. Return the changes that are allowed, as option_changes does.

    now: Run.resume_options, or some of them.
    world: the number of ranks.
    """
    made_on = saved.state["made_on"]
    changed = option_changes(saved.state["options"], now, config)
    if made_on.get("ranks") != world:  # the share of each rank has another size
        changed.pop("micro_batch", None)
    if 1 in (made_on.get("ranks"), world):  # one rank communicates no gradients
        changed.pop("grad_comm", None)
    allowed = {name.replace("-", "_") for name in config.allow_change}
    refused = [text for name, text in changed.items() if name not in allowed]
    if not refused:
        return changed
    may = [name for name in changed if name != "tokenizer" or name in allowed]
    advice = ["use the options of its first start"]
    if len(may) < len(changed):  # its tokens would get the embeddings of others
        advice.append("omit --tokenizer, because the weights belong to the checkpoint's tokenizer")
    # no option can make the weights fit another shape, or adapters of another rank
    if may and not changed.keys() & set(SHAPES) and may_change(config).issuperset(changed):
        advice.append(f"or allow the change: --allow-change {' '.join(may)}")
    raise UserError(f"cannot resume {saved.folder}: {'; '.join(refused)}: {', '.join(advice)}")


def option_changes(then: dict[str, Any], now: dict[str, Any], config: RunOptions) -> dict[str, str]:
    """Return {name: sentence about the difference} between two Run.resume_options()."""
    # older checkpoints lack the newer options; their runs used what are the defaults now
    defaults = {f.name: f.default for f in fields(ModelConfig) if f.default is not MISSING}
    for options in (TrainConfig, config):
        keys = config.resume_keys()
        defaults |= {
            f.name: f.default
            for f in fields(options)
            if f.name in keys and f.default is not MISSING
        }
    then = {name: default for name, default in defaults.items() if name in now} | then
    then, now = (json.loads(json.dumps(options)) for options in (then, now))
    changed = {
        name: f"{name} was {then.get(name)}, is {now.get(name)}"
        for name in dict.fromkeys([*then, *now])
        if then.get(name) != now.get(name)
    }
    # missing in one of them: --kl has changed, or the checkpoint is older
    if "reference" not in then or "reference" not in now:
        changed.pop("reference", None)
    for name, what in (("data", "text"), ("tokenizer", "tokenizer"), ("reference", "reference")):
        if name in changed:
            was, is_ = (str(options.get(name))[:16] for options in (then, now))
            changed[name] = f"the {what} is not the same (sha256 was {was}, is {is_})"
    if "seq_len" in changed:
        changed.pop("max_seq_len", None)  # follows seq_len
    return changed
