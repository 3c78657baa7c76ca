"""Typical mistakes, planted in the solutions of lesson 35: (exercise, old, new, words of the answer)."""

LANES = "        for l in range(32):\n            total += cuda.shfl_sync(FULL, part, l)"
BUTTERFLY = "        for step in (16, 8, 4, 2, 1):\n            part += cuda.shfl_xor_sync(FULL, part, step)\n        total += part"
BEGIN = "m_BC[b, 0], l_BC[b, 0], acc_BCD[b, 0, d]"
COUNT = "range(1, (length_B[b] + CHUNK - 1) // CHUNK)"
OF_L = "l = l * keep + l_BC[b, c] * add"
OF_ACC = "acc = acc * keep + acc_BCD[b, c, d] * add"
NEXT = "chunk_sums(q_D, k_SD, v_SD, first, min(first + CHUNK, length))"
BITS = "lambda y: np.ascontiguousarray(y).view(np.int32)"
EVERY = "range(1, N + 1))"

MISTAKES = [
    ("35.1", LANES, BUTTERFLY, "by a butterfly of shuffles"),
    ("35.1", "begin = first + lane * CHUNK", "begin = first + lane", "expected"),
    ("35.1", "range(begin, min(begin + CHUNK, K))", "range(begin, begin + CHUNK)", "columns end before K"),
    ("35.1", "range(begin, min(begin + CHUNK, K))", "range(min(begin + CHUNK, K) - 1, begin - 1, -1)", "The columns of a chunk are added from the last"),
    ("35.1", "range(32)", "range(31, -1, -1)", "other bits"),
    ("35.1", "range(32)", "range(31)", "The last lane is missing"),
    ("35.1", "range(0, K, 32 * CHUNK)", "range(0, 1)", "Only the first 512 columns"),
    ("35.1", LANES, "        total += part", "Only the chunk of lane 0"),
    ("35.1", "    if lane == 0:\n        y_NO[n, o] = total", "    y_NO[n, o] = total", "Only lane 0 writes"),
    ("35.1", "y_NO[n, o] = total", "y_NO[n, 0] = total", "Two blocks write the same element"),
    ("35.2", OF_ACC, "acc = acc + acc_BCD[b, c, d] * add", "acc is not multiplied by exp(m - m')"),
    ("35.2", OF_L, "l = l + l_BC[b, c] * add", "l is not multiplied by exp(m - m')"),
    ("35.2", OF_L, "l = l * keep + l_BC[b, c]", "l_c is not multiplied by exp(m_c - m')"),
    ("35.2", "keep, add = math.exp(m - new), math.exp(m_BC[b, c] - new)", "keep, add = float32(1.0), float32(1.0)", "The chunks have different maxima"),
    ("35.2", "        m = new\n", "", "set m = new after each chunk"),
    ("35.2", "acc / l", "acc", "The division by l is missing"),
    ("35.2", COUNT, "range(1, m_BC.shape[1])", "that the sequence does not have"),
    ("35.2", COUNT, "range(1, length_B[b] // CHUNK)", "the last may be shorter"),
    ("35.2", COUNT, "range((length_B[b] + CHUNK - 1) // CHUNK)", "in the result twice"),
    ("35.2", COUNT, "range(1, (length_B[b] + CHUNK - 1) // CHUNK - 1)", "Only chunk 0"),
    ("35.2", COUNT, "range(0)", "Only chunk 0"),
    ("35.2", COUNT, "range((length_B[b] + CHUNK - 1) // CHUNK - 1, 0, -1)", "After chunk 0 the chunks are merged from the last"),
    ("35.2", "o_BD[b, d] = acc / l", "if d == 0:\n        o_BD[b, d] = acc / l", "every thread writes o[b, d]"),
    ("35.3", NEXT, "chunk_sums(q_D, k_SD, v_SD, first, first + CHUNK)", "Keys beyond the length"),
    ("35.3", "length = length_B[b]", "length = k_BSD.shape[1]", "the last chunk ends at length_B[b]"),
    ("35.3", "range(CHUNK, length, CHUNK)", "range(0)", "Only chunk 0"),
    ("35.3", "range(CHUNK, length, CHUNK)", "range(0, length, CHUNK)", "the loop begins with first = 16"),
    ("35.3", "range(CHUNK, length, CHUNK)", "range(CHUNK, length // CHUNK * CHUNK, CHUNK)", "The last, shorter chunk is missing"),
    ("35.3", "        m = new\n", "", "set m = new after each chunk"),
    ("35.3", "acc = acc * keep + acc_c * add", "acc = acc + acc_c * add", "acc is not multiplied"),
    ("35.3", "l = l * keep + l_c * add", "l = l + l_c * add", "l is not multiplied"),
    ("35.3", "acc / l", "acc", "The division by l is missing"),
    ("35.3", "acc / l", "acc * (float32(1.0) / l)", "is rounded twice"),
    ("35.3", "keep, add = ", "add, keep = ", "or the factors exchanged"),
    ("35.3", "b, d = cuda.blockIdx.x, cuda.threadIdx.x", "b, d = 0, cuda.threadIdx.x", "block b has sequence b"),
    ("35.4", '"per_thread": "row"', '"per_thread": "parts"', "what does N change"),
    ("35.4", '"added": "threads"', '"added": "row"', "if the threads come in one order"),
    ("35.4", '"filled": "parts"', '"filled": "row"', "alone and"),
    ("35.4", '"split": "row"', '"split": "parts"', "Does their number depend on N?"),
    ("35.4", '"tuned": "kernel"', '"tuned": "row"', "among 8 rows"),
    ("35.4", '"tiled": "tile"', '"tiled": "kernel"', "row 4 of 5 rows"),
    ("35.4", '"scaled": "numbers"', '"scaled": "row"', "a row alone"),
    ("35.4", '"scaled": "numbers"', '"scaled": "scale"', "Choose from"),
    ("35.4", '        "scaled": "numbers",\n', "", "There is no answer for scaled"),
    ("35.5", BITS, "lambda y: y", "NaN == NaN is False"),
    ("35.5", EVERY, "range(1, N))", "was tried for n = 5"),
    ("35.5", EVERY, "(1, 2, N))", "was tried for n = 3, 4"),
    ("35.5", "alone[:n])", "bits(product(x_NK[:n])))", "Compare with each row alone"),
    ("35.5", "np.array_equal(bits(product(x_NK[:n])), alone[:n])", "np.array_equal(bits(product(x_NK[:n]))[0], alone[0])", "compare all rows"),
    ("35.5", "np.array_equal(bits(product(x_NK[:n])), alone[:n])", "np.allclose(product(x_NK[:n]), alone[:n].view(np.float32))", "compare bits, not with a tolerance"),
    ("35.5", "return all(", "all(", "Nothing is returned"),
]  # fmt: skip
