"""A number that a lesson's text states is the number that the lesson prints: both are looked up here."""

import json
import re

import pytest

from xtrain import ModelConfig, lesson
from xtrain.serving import speculation
from xtrain.training.memory_plan import plan

CLAIMS = [  # lesson, the text with one number, the output with the same number
    ("25", r"all weights need ([\d.]+) GB", r"all weights\n(?:.*\n)*?    in all +([\d.]+) GB\nrank 16"),
    ("25", r"LoRA of rank 16 needs ([\d.]+) GB", r"rank 16\n(?:.*\n)*?    in all +([\d.]+) GB"),
    ("26", r"the clip ignores (\d+) % of the tokens", r"noise 3 .* ignored tokens +(\d+)%"),
    ("39", r"small one would get (\d+) %", r"^ +1 +\S+ +0\.0(\d) "),
    ("39", r"equal shares it is read (\d+) times", r"^ +0 +\S+ +\S+ +\S+ +(\d+)"),
    ("39", r"which is ([\d.]+) epochs", r"^ +0\.5 +\S+ +\S+ +\S+ +(\S+)"),
    ("44", r"(\d+) requests are fewer", r"s = (\d+) in the server"),
    ("44", r"mean wait is ([\d.]+) s with 16 slots", r"^ +0\.80 +([\d.]+) "),
    ("44", r"and\s([\d.]+) s with one", r"one slot, load 0.8: mean wait ([\d.]+) s"),
    ("44", r"Compare it with the (\d+) slots", r", (\d+) slots, "),
    ("46", r"with TILE 128 padding costs (\d+) % of", r"^TILE 128 .* (\d+) %$"),
    ("46", r"fullest expert gets (\d+) % of the tokens, and", r"^without .* (\d+) % of the tokens"),
    ("46", r"and (\d+) of the 8 hardly any", r"^without .*tenth of the mean: (\d+)"),
    ("46", r"balance loss it gets (\d+) %", r"^balance loss .* (\d+) % of the tokens"),
    ("46", r"with the bias (\d+) %", r"^bias .* (\d+) % of the tokens"),
    ("28", r"reaches AdamW's loss in (\d+) % of the steps", r"last loss after (\d+) % of the steps"),
    ("28", r"of the steps and in ([\d.]+) of the time", r"% of the steps, ([\d.]+) of the time"),
    ("36", r"rows take ([\d.]+) times as long", r"32 sequences, k = 3 +a step takes ([\d.]+) times as long"),
]  # fmt: skip


def in_row(output, name, column=0):
    """-> a number of a printed table: the row that begins with this text, the column after it"""
    words = r" +".join(map(re.escape, name.split()))
    row = re.search(rf"^ *{words} (.*)$", output, re.M)[1]
    return float(re.findall(r"[\d.,]*\d", row)[column].replace(",", ""))


def share_of_bound(output, shape):
    return 100 * in_row(output, f"llama 1.1B bf16 {shape}", 1) / in_row(output, f"llama 1.1B bf16 {shape}")  # fmt: skip


def ratios(output, above, below, names):
    """-> the smallest and the largest ratio of two numbers of a row, in these rows"""
    found = [in_row(output, name, above) / in_row(output, name, below) for name in names]
    return min(found), max(found)


def cudnn(output):
    """-> the smallest and the largest ratio of xtrain's TFLOP/s to cuDNN's"""
    rows = re.findall(r"^named fwd.* bf16 +\d+ +\S+ +(\S+) +\S+ +(\S+)$", output, re.M)
    found = [float(ours) / float(theirs) for ours, theirs in rows]
    return min(found), max(found)


def costs_of_many_rows(output):
    """-> the costs of exact mode in lesson 35, without the long prompt and steps of few rows"""
    rows = re.findall(r"^(.+?)  .* ms   cost (\S+)$", output, re.M)
    return [float(x) for name, x in rows if not re.search(r"^1 |\b8 rows", name)]


FUSED = [f"{name} bf16" for name in ("residual_rmsnorm_fwd", "qk_norm_rope_fwd", "swiglu_fwd", "cross_entropy_both")]  # fmt: skip
SHAPES = [f"B={B} context={n}" for n in (128, 4096) for B in (1, 32)]
DERIVED = [  # lesson, the text with numbers, the same numbers from the output
    (
        "2",
        r"copy is (\d+) times as fast as the one with a chunk per thread; 16-byte accesses come within (\d+) % of a plain copy; the tile makes the transpose ([\d.]+) times",
        lambda o: (
            in_row(o, "copy_chunk fp32") / in_row(o, "copy_grid_stride fp32"),
            100 * (in_row(o, "copy_four fp32") / in_row(o, "copy_four fp32", 2) - 1),
            in_row(o, "transpose_naive fp32") / in_row(o, "transpose_tiled fp32"),
        ),
    ),
    ("11", r"op by op, takes ([\d.]+) to (\d+) times", lambda o: ratios(o[o.index("torch eager") :], 2, 0, FUSED)),
    ("11", r"other two it takes ([\d.]+) to ([\d.]+) times", lambda o: ratios(o, 3, 0, FUSED[1::2])),
    (
        "16",
        r"fragmentation: (\d+) % in the first row, (\d+) % in the third",
        lambda o: [100 * (1 - in_row(o, f"fp32 {kind}", 1) / in_row(o, f"fp32 {kind}")) for kind in ("none", "block")],
    ),
    (
        "16",
        r"from ([\d.]+) to ([\d.]+) GB. With the whole block recomputed: ([\d.]+) GB",
        lambda o: [in_row(o, f"fp32 {kind}") for kind in ("none", "attention", "block")],
    ),
    (
        "18",
        r"reach (\d+) to (\d+) % of the speed that the bound allows",
        lambda o: [f(share_of_bound(o, shape) for shape in SHAPES) for f in (min, max)],
    ),
    (
        "18",
        r"is (\d+) % above that for one, and the measured step takes (\d+) % longer",
        lambda o: [100 * (in_row(o, f"llama 1.1B bf16 {SHAPES[1]}", i) / in_row(o, f"llama 1.1B bf16 {SHAPES[0]}", i) - 1) for i in (1, 0)],
    ),
    ("23", r"wgmma are ([\d.]+) to ([\d.]+) times as fast as cuDNN", cudnn),
    ("26", r"needs about (\d+) times the samples", lambda o: [(in_row(o, "reward + 10, no baseline") / in_row(o, "either, baseline J")) ** 2]),
    ("28", r"somewhere between ([\d.]+) and", lambda o: [min(map(float, re.findall(r"^iteration [2-5].* (\S+)\]$", o, re.M)))]),
    ("29", r"int8 is ([\d.]+) times as accurate", lambda o: [in_row(o[o.index("worst row:") :], "normal", 1) / in_row(o[o.index("worst row:") :], "normal")]),
    ("30", r"The sort costs (\d+) µs", lambda o: re.findall(r"the sort alone: (\S+) µs", o)),
    ("33", r"with 128 keys takes (\d+) µs", lambda o: [1000 * float(re.search(r"B=1 context=128 +separate (\S+) ms", o)[1])]),
    ("35", r"from 32 rows on the order costs at most (\d+) %", lambda o: [100 * (max(costs_of_many_rows(o)) - 1)]),
    ("36", r"takes only (\d+) % longer", lambda o: [100 * (in_row(o, "8 rows") / in_row(o, "1 rows") - 1)]),
    ("36", r"the estimate is (\d+) % above", lambda o: [100 * (in_row(o, "this run", 2) / float(re.search(r"^acceptance.* (\S+) times", o, re.M)[1]) - 1)]),
    ("40", r"the one with (\d) more right answers of 200", lambda o: [in_row(o, "400 steps:") - in_row(o, "300 steps:")]),
    ("33", r"in the best case (\d+) % faster", lambda o: [-min(int(x) for x in re.findall(r"\(([+-]\d+)%\)", o))]),
]  # fmt: skip


def texts(number):
    """-> the text of a lesson in one line, everything that its notebook printed"""
    path = lesson.lesson_file(number)
    cells = lesson.cells(path.read_text(encoding="utf-8"))
    prose = [re.sub(r"^# ?", "", body, flags=re.M) for head, body in cells if "[markdown]" in head]
    book = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    outputs = [output for cell in book["cells"] for output in cell.get("outputs", [])]
    printed = ["".join(output.get("text", [])) for output in outputs]
    return " ".join(" ".join(prose).split()), "\n".join(printed)


@pytest.mark.parametrize("number, stated, printed", CLAIMS)
def test_the_text_states_what_the_lesson_prints(number, stated, printed):
    text, output = texts(number)
    [said] = re.findall(stated, text)
    assert re.findall(printed, output, re.M)[:1] == [said]


@pytest.mark.parametrize("number, stated, computed", DERIVED)
def test_the_text_states_what_follows_from_the_output(number, stated, computed):
    text, output = texts(number)
    [said] = re.findall(stated, text)
    said = [said] if isinstance(said, str) else list(said)
    decimals = [len(x.partition(".")[2]) for x in said]
    assert [f"{float(x):.{n}f}" for x, n in zip(computed(output), decimals)] == said


def test_muon_and_adamw_are_best_at_the_edge_of_the_rates_as_the_text_says():
    assert "best at the largest of the four rates" in texts("28")[0]
    for name in ("adamw", "muon"):
        losses = lesson.record(f"bench_muon/dim384/{name}/bf16")["final_losses"]
        assert len(losses) == 4 and min(losses, key=losses.get) == max(losses, key=float)


def test_fewer_requests_are_in_the_server_than_it_has_slots():
    text, output = texts("44")
    [there] = re.findall(r"s = (\d+) in the server", output)
    assert "so at this rate none waits long for a slot" in text and int(there) < 256


def test_two_schedules_have_the_same_bits_and_one_product_passes_the_check_wrongly():
    text, output = texts("35")
    assert "several share: the same bits: True" in output
    [differ] = re.findall(r"merged at once: (\d+) of 64 elements have other bits", output)
    assert int(differ) > 0
    passed = re.findall(r"^(\w+) +(\w+) +passes the check: (True|False)$", output, re.M)
    assert len(passed) == 7
    wrong = [name for name, cause, passes in passed if (cause == "row") != (passes == "True")]
    assert wrong == ["added"] and "`added` passes" in text


def test_the_cost_of_the_same_bits_in_lessons_26_and_35_is_that_of_the_newest_record():
    kinds = ("exact", "no-exact")
    times = [lesson.record(f"bench_reinforce/dim512x8/{kind}/bf16")["ms"] for kind in kinds]
    for number in ("26", "35"):
        assert f"{times[0] / times[1]:.2f} times as long" in texts(number)[0]


def test_the_engine_looks_for_n_grams_as_lesson_36_says():
    said = re.search(
        r"xtrain looks for (\d) tokens first, then for (\d), then for (\d)", texts("36")[0]
    )
    assert tuple(map(int, said.groups())) == speculation.NGRAMS


def test_drafts_do_not_change_an_answer_and_do_not_always_pay():
    text, output = texts("36")
    assert re.findall(r"the same \w+: +(True|False)", output) == ["True"] * 6
    pays = {int(n): float(p) for n, p in re.findall(r"^(\d+) sequences?, .* from p = (\S+) on", output, re.M)}  # fmt: skip
    assert pays[1] < 0.2 and "With one sequence nearly any guess pays" in text
    assert pays[32] > 0.5 and "must be right more often than not" in text
    share = {int(n): int(s) for n, s in re.findall(r"edited code +n = (\d): .* (\d+)% of", output)}
    assert share[1] < share[2] < share[4] and "n = 4 has the better drafts" in text


def test_the_stages_of_one_kernel_are_those_of_the_note():
    source = lesson.lesson_file("33").read_text(encoding="utf-8")
    stages = re.findall(
        r'^    "[^"]+": (\d+),$', source.partition("ALONE = {")[2].partition("}")[0], re.M
    )
    note = (lesson.LESSONS / "notes" / "one_kernel.md").read_text(encoding="utf-8")
    assert stages == re.findall(r"\d+", re.search(r"^\| first \|(.*)$", note, re.M)[1])


def test_the_cost_of_the_same_bits_is_that_of_the_records():
    page = (lesson.LESSONS / "howto" / "serve.md").read_text(encoding="utf-8")
    table = (
        page.partition("### The same bits")[2].partition("times as long")[2].partition("\n\n")[0]
    )
    said = re.findall(r"\d\.\d\d", re.sub(r".*GRPO.*", "", table))  # which has its own records
    lines = (lesson.records.RESULTS / "bench_exact.jsonl").read_text(encoding="utf-8").splitlines()
    costs = {f"{record['cost']:.2f}" for record in map(json.loads, lines) if "cost" in record}
    assert len(said) > 8 and set(said) <= costs


def test_the_memory_of_lora_is_that_of_the_plan():
    page = (lesson.LESSONS / "howto" / "finetune.md").read_text(encoding="utf-8")
    shape = dict(dim=2048, n_layers=22, n_heads=32, n_kv_heads=4, head_dim=64, hidden_dim=5632)
    config = ModelConfig(vocab_size=32000, max_seq_len=2048, qk_norm=False, **shape)
    one = plan(config, 1, 1024, "bf16", lora=16)
    two = plan(config, 2, 2048, "bf16", "block", lora=16)
    assert f"{one.reserved / 1e9:.1f} GB for a Llama of 1.1 B parameters" in page
    assert f"{two.reserved / 1e9:.1f} GB for two rows of 2048 tokens" in page
