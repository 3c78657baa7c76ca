"""Typical mistakes, planted in the solutions of lesson 9: (exercise, old, new, words of the answer)."""

MISTAKES = [
    ("9.1", "first = n // T * T", "first = 0", "The mean includes earlier sequences"),
    ("9.1", "range(first, n + 1)", "range(0, n % T + 1)", "rows of the FIRST sequence"),
    ("9.1", "range(first, n + 1)", "range(first, n)", "Row n itself is missing"),
    (
        "9.1", "range(first, n + 1):\n            acc += x_NC[m, c]\n        y_NC[n, c] = acc / float32(n + 1 - first)",
        "range(first, first + T):\n            acc += x_NC[m, c]\n        y_NC[n, c] = acc / float32(T)", "The mean includes later tokens",
    ),
    ("9.1", "float32(n + 1 - first)", "float32(T)", "divided by T"),
    ("9.1", " / float32(n + 1 - first)", "", "it was not divided by the number of rows"),
    ("9.1", "for c in range(tid, x_NC.shape[1], cuda.blockDim.x):", "for c in range(tid, tid + 1):", "columns start at tid and advance by"),
    ("9.1", "first = n // T * T", "first = n // T", "the NUMBER of the sequence"),
    ("9.1", "first = n // T * T", "first = n % T", "the position in the sequence"),
    ("9.1", "float32(n + 1 - first)", "float32(n + 1)", "divided by n + 1"),
    ("9.1", "float32(n + 1 - first)", "float32(n - first)", "The count is one too small"),
    ("9.1", "range(first, n + 1)", "range(first, first + T)", "The mean includes later tokens"),
    ("9.1", "float32(n + 1 - first)", "(n + 1 - first)", "computed in float64"),
    (
        "9.1", "    for c in range(tid, x_NC.shape[1], cuda.blockDim.x):\n        acc = float32(0.0)\n",
        "    acc = float32(0.0)\n    for c in range(tid, x_NC.shape[1], cuda.blockDim.x):\n", "acc begins at 0 for every column",
    ),
    ("9.2", "acc * scale", "acc / scale", "divided by the scale"),
    ("9.2", "range(D)", "range(D - 1)", "The last product is missing"),
    ("9.2", "if i < T and j < T:", "if i < T and j <= i:", "There is no mask here"),
    ("9.2", "cuda.blockIdx.y * 8", "cuda.blockIdx.y * 16", "were never written: i is"),
    ("9.2", "q_BTHD[b, i, h, d]", "q_BTHD[b, h, i, d]", "sequence, token, head, component"),
    ("9.3", "launched = (i + 1) * launch_us", "launched = launch_us", "launched at the same time"),
    ("9.2", "acc * scale", "acc", "The scale is missing"),
    ("9.2", "b, h = z // H, z % H", "b, h = z % H, z // H", "b, h = z // H, z % H with z"),
    ("9.2", "b, h = z // H, z % H", "b, h = z // H, 0", "Each pair (b, h) has its own z"),
    ("9.2", "if i < T and j < T:", "if True:", "Guard both i and j"),
    ("9.2", "s_BHTT[b, h, i, j]", "s_BHTT[b, h, j, i]", "Query and key are swapped"),
    ("9.2", "acc += q", "acc = q", "Only the last product remains"),
    ("9.3", "launched = (i + 1) * launch_us", "launched = free + launch_us", "A launch does not wait"),
    ("9.3", "free = max(launched, free) + run", "free = launched + run", "Your kernels overlap"),
    ("9.3", "max(launched, free)", "free", "GPU never waits for Python"),
    ("9.3", "(i + 1) * launch_us", "i * launch_us", "their launch BEGINS"),
    ("9.1", "cuda.blockDim.x", "32", "columns from 4 on were never written"),
    ("9.1", "y_NC[n, c] = acc", "y_NC[n, c] += acc", "written with +="),
    (
        "9.2", "    j = cuda.blockIdx.x * 8 + cuda.threadIdx.x\n    i = cuda.blockIdx.y * 8 + cuda.threadIdx.y\n",
        "    i = cuda.blockIdx.x * 8 + cuda.threadIdx.x\n    j = cuda.blockIdx.y * 8 + cuda.threadIdx.y\n", "neighbouring threads write to different rows of s",
    ),
]  # fmt: skip

UNTRUE = [  # words that must not appear in these answers
    ("9.2", "if i < T and j < T", "if i < T - 1 and j < T", "i is cuda.blockIdx.y"),
]  # fmt: skip
