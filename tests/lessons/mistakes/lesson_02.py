"""Typical mistakes, planted in the solutions of lesson 2: (exercise, old, new, phrase in the answer)."""

MISTAKES = [
    ("2.1", "for i in range(first, y_n.size, step):", "for i in range(first, first + 1):", "loop until y_n.size"),
    ("2.1", "step = cuda.gridDim.x * cuda.blockDim.x", "step = cuda.blockDim.x", "step of the loop is the total number of threads"),
    ("2.1", "step = cuda.gridDim.x * cuda.blockDim.x", "step = 2 * cuda.gridDim.x * cuda.blockDim.x", "The step is too large"),
    (
        "2.1", "    for i in range(first, y_n.size, step):",
        "    each = (y_n.size + step - 1) // step\n    for i in range(first * each, (first + 1) * each):\n      if i < y_n.size:",
        "neighbouring threads must touch neighbouring elements",
    ),
    ("2.1", "range(first, y_n.size, step)", "range(first, y_n.size - 1, step)", "ends before the last element"),
    ("2.2", "    cuda.syncthreads()\n", "", "the barrier is missing"),
    ("2.2", "tile[tx, ty]", "tile[ty, tx]", "not transposed within"),
    ("2.2", "(16, 17)", "(16, 16)", "add one column to the tile"),
    ("2.2", "c = cuda.blockIdx.x * 16 + ty", "c = cuda.blockIdx.y * 16 + ty", "Block (bx, by) of x writes block (by, bx)"),
    ("2.2", "    cuda.syncthreads()\n", "        cuda.syncthreads()\n", "so that every thread reaches it"),
    ("2.3", "if i + 4 <= y_n.size:", "if i + 4 < y_n.size:", "the loop copies a whole group of 4"),
    ("2.3", "if i + 4 <= y_n.size:", "if i < y_n.size:", "may extend past the end"),
    ("2.3", "        for j in range(i, y_n.size):\n            y_n[j] = x_n[j]", "        pass", "incomplete group of 4 is missing"),
    ("2.3", "i = 4 * (", "i = 1 * (", "start at a multiple of 4"),
    (
        "2.3", "        load4(registers, x_n, i)\n        store4(y_n, i, registers)",
        "        for j in range(4):\n            y_n[i + j] = x_n[i + j]",
        "load4 and store4 move 16 bytes per thread at once",
    ),
    ("2.1", "step = cuda.gridDim.x * cuda.blockDim.x", "step = 128", "The step is too large"),
    ("2.3", "cuda.blockDim.x", "64", "Only the first block did its work"),
    ("2.3", "        load4(registers, x_n, i)\n", "        load4(registers, x_n, i)\n        load4(registers, x_n, i)\n", "with 8 instructions"),
    ("2.3", "load4(registers, x_n, i)", "load4(x_n, i)", "too few or too many arguments"),
    ("2.3", "load4(registers, x_n, i)", "load4(x_n, i)", "load4() missing"),
]  # fmt: skip

UNTRUE = [  # mistakes with a phrase that the answer must not contain
    ("2.1", "y_n[i] = x_n[i]", "y_n[i] = x_n[0]", "ends before the last element"),
    ("2.1", "range(first, y_n.size, step)", "range(first + 1, y_n.size, step)", "The step is too large"),
    ("2.2", "if r < x_RC.shape[0] and c < x_RC.shape[1]:\n        y_CR", "if r < x_RC.shape[0] - 1 and c < x_RC.shape[1]:\n        y_CR", "Block (bx, by)"),
    ("2.3", "        store4(y_n, i, registers)\n", "        pass\n", "Only every fourth element"),
]  # fmt: skip

RIGHT = [  # unusual but correct
    ("2.2", "tile", "t"),
    ("2.2", "(16, 17)", "(16, 19)"),
    ("2.3", "x_n", "x"),
]  # fmt: skip
