"""Functions that reward completions: how they are called, and what they may return.

Two forms, which the names of the parameters tell apart:

    def reward(record, completions):                    once for each prompt: a line of the data
        return [number, ...]                            and the texts of its completions

    def reward(prompts, completions, answer, **more):   once for all completions of a step, as TRL
        return [number, ...]                            calls it: each field of the data is a list

The second has a parameter `prompts` or `**anything`, and no `record`. Both also get, if they have
parameters of these names,

    completion_ids   the tokens of each completion, with those of an environment
    finish_reasons   why each ended (serving/requests.py; "turns": at --max-turns)
    messages         each whole conversation, with the prompt
    step             of the run, counted from 1

Both return one number for each completion, or None: this function says nothing about it. An
`async def` of the first form is called for all prompts at the same time.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..options import one_line
from .calls import Call, CallError, Limits, UserFunction
from .episodes import Episode
from .prompts import Prompt

EXTRAS = ("completion_ids", "finish_reasons", "messages", "step")
EQUAL_REWARDS = 1e-6  # differ by at most this
LARGEST = 1e30  # reward: its advantage is a float32


@dataclass
class Group:
    """The completions of a prompt, and their rewards, NaN where there is none.

    of_tasks: (tasks, G) float64.  rewards: (G,), their weighted sum.
    """

    prompt: Prompt
    episodes: list[Episode]
    of_tasks: np.ndarray = field(default_factory=lambda: np.empty(0))
    rewards: np.ndarray = field(default_factory=lambda: np.empty(0))

    @property
    def is_equal(self) -> bool:
        """Are all rewards equal, so that an algorithm learns nothing from comparing them?"""
        rewards = self.rewards[np.isfinite(self.rewards)]
        return not rewards.size or float(np.ptp(rewards)) <= EQUAL_REWARDS

    def extras(self, step: int) -> dict[str, Any]:
        """Return what a function may ask for by name: EXTRAS."""
        episodes = self.episodes
        return {
            "completion_ids": [list(x.ids) for x in episodes],
            "finish_reasons": [str(x.reason) for x in episodes],
            "messages": [copy.deepcopy(x.messages) for x in episodes],
            "step": step,
        }

    def completions(self) -> list[Any]:
        """Return texts, or of a prompt that is a conversation lists of the messages after it."""
        if self.prompt.conversation is None:
            return [x.text for x in self.episodes]
        n = len(self.prompt.asked)
        return [copy.deepcopy(x.messages[n:]) for x in self.episodes]

    def lines(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield what rollouts.jsonl says about each completion. names: of the tasks."""
        number = lambda reward: None if np.isnan(reward) else float(reward)
        for i, x in enumerate(self.episodes):
            line: dict[str, Any] = {"completion": x.text, "reward": number(self.rewards[i])}
            if len(names) > 1:
                line["rewards"] = dict(zip(names, map(number, self.of_tasks[:, i])))
            yield line | {"finish": x.reason, "turns": x.turns, "tokens": x.n_drawn}


class Task(UserFunction):
    """One reward function, MODULE:FUNCTION."""

    kind = "task"
    option = "--task"
    example = "my_task:reward"

    def __init__(self, name: str):
        super().__init__(name)
        try:
            parameters = inspect.signature(self.function).parameters
        except ValueError:  # of a function in C
            parameters = {}  # type: ignore[assignment]
        self.any_name = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        self.parameters = frozenset(parameters)
        self.batched = "record" not in parameters and (self.any_name or "prompts" in parameters)

    def rewards(
        self, groups: Sequence[Group], step: int, limits: Limits
    ) -> Iterator[list[float] | CallError]:
        """Yield the rewards of each group, NaN for None, or the error of its call. Raises
        Interrupted."""
        if self.batched and groups:
            yield from self._of_a_batch(groups, step, limits)
            return
        calls = [self._call(group, step) for group in groups]
        for group, found in zip(groups, self.results(calls, limits)):
            yield self._checked(found, len(group.episodes), group.prompt.where)

    def _accepted(self, named: dict[str, Any]) -> dict[str, Any]:
        return {x: value for x, value in named.items() if self.any_name or x in self.parameters}

    def _call(self, group: Group, step: int) -> Call:
        arguments = (copy.deepcopy(group.prompt.fields), [x.text for x in group.episodes])
        return Call(group.prompt.where, arguments, self._accepted(group.extras(step)))

    def _of_a_batch(
        self, groups: Sequence[Group], step: int, limits: Limits
    ) -> Iterator[list[float] | CallError]:
        prompts = [group.prompt for group in groups for _ in group.episodes]
        columns = dict.fromkeys(name for x in prompts for name in x.fields)
        named: dict[str, Any] = {}
        for name in columns:
            named[name] = [copy.deepcopy(x.fields.get(name)) for x in prompts]
        named["prompts"] = [
            copy.deepcopy(x.asked) if x.conversation else x.fields.get("prompt") for x in prompts
        ]
        named["completions"] = [x for group in groups for x in group.completions()]
        extras = [group.extras(step) for group in groups]
        for name in EXTRAS[:-1]:
            named[name] = [x for of_group in extras for x in of_group[name]]
        named["step"] = step
        where = groups[0].prompt.where
        if len(groups) > 1:
            where += " and the other prompts of the step"
        (found,) = self.results([Call(where, (), self._accepted(named))], limits)
        checked = self._checked(found, len(prompts), where)
        start = 0
        for group in groups:
            if isinstance(checked, CallError):
                yield checked
            else:
                yield checked[start : start + len(group.episodes)]
            start += len(group.episodes)

    def _checked(self, found: Any, n: int, where: str) -> list[float] | CallError:
        """Return n rewards, or the error of a function that has returned anything else."""
        if isinstance(found, CallError):
            return found
        try:
            if isinstance(found, (str, bytes, dict, set, frozenset)):  # "101" is not a list
                raise TypeError
            found = list(found)
            if any(isinstance(x, (str, bytes)) for x in found):
                raise TypeError
            rewards = [math.nan if x is None else float(x) for x in found]
        except Exception:  # the user's types may raise anything
            what = f"returned {one_line(repr(found))}, not a list of numbers,"
            return self.failure(what, where)
        if len(rewards) != n:
            return self.failure(f"returned {len(rewards)} rewards for {n} completions", where)
        for reward, returned in zip(rewards, found):
            if returned is not None and not math.isfinite(reward):
                return self.failure(f"returned the reward {reward}", where)
            if abs(reward) > LARGEST:
                what = f"returned the reward {reward:g}, which is larger than {LARGEST:g},"
                return self.failure(what, where)
        return rewards


def reward(
    groups: Sequence[Group],
    tasks: Sequence[Task],
    weights: Sequence[float],
    step: int,
    limits: Limits,
    failed: Callable[[CallError], None],
) -> None:
    """Fill in the rewards of the groups. Raises calls.Interrupted.

    weights: of each task.   step: of the run.   limits: of a call.
    failed: is told about errors; it may raise. What they are about has no reward.
    """
    of_tasks = [np.full((len(tasks), len(group.episodes)), np.nan) for group in groups]
    for k, task in enumerate(tasks):
        for group, rewards, found in zip(groups, of_tasks, task.rewards(groups, step, limits)):
            if isinstance(found, CallError):
                failed(found)
                for episode in group.episodes:
                    episode.failed = True
            else:
                rewards[k] = found
    for group, rewards in zip(groups, of_tasks):
        rewards[:, [x.failed for x in group.episodes]] = np.nan
        group.of_tasks = rewards
        group.rewards = weighted_sum(rewards, weights)


def weighted_sum(rewards_F: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the sum over the first axis; a NaN counts as 0, unless all of the functions say NaN.

    rewards_F: (functions, ...) float64.   weights: one per function.
    """
    weighted = np.tensordot(np.array(weights, np.float64), np.nan_to_num(rewards_F), 1)
    return np.where(np.isnan(rewards_F).all(0), np.nan, weighted)


def names_of(tasks: Sequence[str]) -> list[str]:
    """Return short names of MODULE:FUNCTION for logs: those of the functions, if they differ."""
    short = [name.partition(":")[2] for name in tasks]
    return short if len(set(short)) == len(short) else list(tasks)
