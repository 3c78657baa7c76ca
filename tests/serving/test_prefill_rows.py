"""Prefill passes of rounded sizes, as CUDA graphs need them: the same bits as without."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observed import Observed, ObservedRunner, check
from test_engine_batch_invariant import GPU_SHAPES, gpu_model, prompts_with_common_beginnings
from twins import random_model, small

from xtrain import Engine
from xtrain.nn.cuda_graph import EAGER_CALLS
from xtrain.serving.prefill_rows import PrefillRows, round_rows, unpack

S = 16


class RoundedRunner(ObservedRunner):
    """Rounds its passes on any device, and calls them as a CUDA graph would be: `passes` by their sizes."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.passes = {}
        self.graphed = self.replay

    def has_rounded_sizes(self, rows, prompt_length, scored):
        return not scored

    def replay(self, *inputs, variant):
        part, *arguments = variant
        if part == self.prefill_pass:
            self.passes[arguments[0]] = self.passes.get(arguments[0], 0) + 1
        return part(*arguments, *inputs)


class Rounded(Observed):
    runner_type = RoundedRunner


def test_rounded_passes_have_the_bits_of_training():
    model = random_model(small(head_dim=8, n_layers=2, max_seq_len=128), device="cpu")
    engine = Rounded(model, 5, max_seq_len=128, block_tokens=S, prefill_tokens=60)
    prompts = prompts_with_common_beginnings(1, [37, 90, 1, 16, 100, 5, 64, 33, 70, 2])
    answers = engine.generate(prompts, 9, temperature=0.7)
    check(model, engine, prompts, answers)
    passes = engine.runner.passes
    assert len(passes) < sum(passes.values()) and {sizes.N for sizes in passes} <= {32, 64}
    again = engine.generate(prompts, 9, temperature=0.7)
    assert again == answers


lengths = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 200)), min_size=1, max_size=9)


@settings(max_examples=50, deadline=None)
@given(lengths, st.integers(1, 12))
def test_the_layout(pairs, n_wanted):
    N = sum(n for n, _ in pairs)
    blocks = [list(range(100 * i, 100 * i + 60)) for i in range(len(pairs))]
    rows = PrefillRows(
        list(range(N)),
        [n for n, _ in pairs],
        [h for _, h in pairs],
        blocks,
        [N - 1] * n_wanted,
        list(range(len(pairs))),
    )
    exact, rounded = rows.sizes(S), rows.rounded_sizes(S)
    assert N <= rounded.N <= max(1.25 * N, 256) and n_wanted <= rounded.W
    assert (exact.A, exact.T, exact.M) <= (rounded.A, rounded.T, rounded.M)
    for sizes in (exact, rounded):
        there = unpack(rows.pack(sizes), sizes)
        A = len(pairs)
        new = np.diff(there.edges_E)
        assert there.ids_N.tolist() == [*range(N), *[0] * (sizes.N - N)]
        assert new[:A].tolist() == rows.lengths and new.max() <= sizes.T and new.sum() == sizes.N
        assert there.history_A.tolist() == rows.history + [-1] * (sizes.A - A)
        assert there.wanted_W[:n_wanted].tolist() == rows.wanted
        assert there.adapters_N[:N].tolist() == np.repeat(np.arange(A), rows.lengths).tolist()
        assert (there.adapters_N[N:] == -1).all() and (there.tables_AM[A:] == -1).all()
        for a, (n, h) in enumerate(pairs):
            used = -(-(n + h) // S)
            assert there.tables_AM[a, :used].tolist() == blocks[a][:used]


def test_few_sizes_serve_all_prompts():
    sizes = [round_rows(n) for n in range(1, 8193)]
    assert len(set(sizes)) == 29 and round_rows(257) == 320 and round_rows(8192) == 8192


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
def test_a_captured_prefill_changes_no_bit(invariant):
    """Prompts of the same rounded sizes: the last ones are replays. Log-probabilities tell bits."""
    served = gpu_model("bf16", False, **next(iter(GPU_SHAPES.values())))
    options = dict(max_batch=4, max_seq_len=1024, batch_invariant=invariant, reuse_prefix=False)
    captured = Engine(served, **options)
    eager = Engine(served, **options, graph=False)
    for seed in range(2 * EAGER_CALLS):
        prompts = prompts_with_common_beginnings(seed, [100 + seed, 260, 33], 1000)
        both = [e.generate(prompts, 2, logprobs=1) for e in (captured, eager)]
        assert [(list(x), x.logprobs) for x in both[0]] == [(list(x), x.logprobs) for x in both[1]]
    recordings = captured.runner.graphed.recordings
    runner = captured.runner
    graphs = [
        r.graph for (variant, *_), r in recordings.items() if variant[0] == runner.prefill_pass
    ]
    assert any(graphs)
