"""`cuda.random` without Numba: xoroshiro128+ (Blackman and Vigna 2018), one state per thread.

    states = create_xoroshiro128p_states(threads, seed=1)       on the host
    x = xoroshiro128p_uniform_float32(states, i)                in a kernel

The numbers are those of `numba.cuda.random`. A state is seeded with a step of SplitMix64, and each
further one is 2**64 numbers ahead of the one before.
"""

import math

import numpy as np

from . import own_cuda as cuda
from .own_types import float32, float64, int64, uint32, uint64

xoroshiro128p_dtype = np.dtype([("s0", np.uint64), ("s1", np.uint64)], align=True)
MASK = 2**64 - 1
JUMP = 0xBEAC0467EBA5FACB, 0xD86B048B86AA9922  # 2**64 steps, as a polynomial
UNIT = 2.0**-53
TWO_PI = 2 * math.pi


# ----------------------------------------------------------------------------- on the host
def create_xoroshiro128p_states(n, seed, subsequence_start=0, stream=0):
    """Return a device array of n states."""
    states = cuda.device_array(n, xoroshiro128p_dtype, stream=stream)
    init_xoroshiro128p_states(states, seed, subsequence_start, stream)
    return states


def init_xoroshiro128p_states(states, seed, subsequence_start=0, stream=0):
    """Write the states of a device array, beginning with the subsequence of this number."""
    host = np.empty(states.shape, xoroshiro128p_dtype)
    first = _splitmix(int(seed))
    state = first, first
    for _ in range(subsequence_start):
        state = _jump(state)
    for i in range(len(host)):
        host[i] = state
        state = _jump(state)
    states.copy_to_device(host, stream=stream)


def _splitmix(seed: int) -> int:
    z = (seed + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _rotated(x: int, k: int) -> int:
    return ((x << k) | (x >> (64 - k))) & MASK


def _step(state: tuple) -> tuple:
    s0, s1 = state
    s1 ^= s0
    return _rotated(s0, 55) ^ s1 ^ ((s1 << 14) & MASK), _rotated(s1, 36)


def _jump(state: tuple) -> tuple:
    s0 = s1 = 0
    for word in JUMP:
        for bit in range(64):
            if word >> bit & 1:
                s0 ^= state[0]
                s1 ^= state[1]
            state = _step(state)
    return s0, s1


# ----------------------------------------------------------------------------- in kernels
@cuda.jit(device=True)
def rotl(x, k):
    return (uint64(x) << uint32(k)) | (uint64(x) >> uint32(64 - k))


@cuda.jit(device=True)
def xoroshiro128p_next(states, index):
    """The next 64 random bits."""
    index = int64(index)
    s0 = states[index]["s0"]
    s1 = states[index]["s1"]
    total = s0 + s1
    s1 ^= s0
    states[index]["s0"] = rotl(s0, uint32(55)) ^ s1 ^ (s1 << uint32(14))
    states[index]["s1"] = rotl(s1, uint32(36))
    return total


@cuda.jit(device=True)
def uint64_to_unit_float64(x):
    return (uint64(x) >> uint32(11)) * float64(UNIT)


@cuda.jit(device=True)
def uint64_to_unit_float32(x):
    return float32(uint64_to_unit_float64(x))


@cuda.jit(device=True)
def xoroshiro128p_uniform_float32(states, index):
    """A number in [0, 1)."""
    return uint64_to_unit_float32(xoroshiro128p_next(states, index))


@cuda.jit(device=True)
def xoroshiro128p_uniform_float64(states, index):
    """A number in [0, 1)."""
    return uint64_to_unit_float64(xoroshiro128p_next(states, index))


@cuda.jit(device=True)
def xoroshiro128p_normal_float32(states, index):
    """A normally distributed number (Box and Muller 1958)."""
    u1 = xoroshiro128p_uniform_float32(states, index)
    u2 = xoroshiro128p_uniform_float32(states, index)
    return math.sqrt(-float32(2) * math.log(u1)) * math.cos(float32(TWO_PI) * u2)


@cuda.jit(device=True)
def xoroshiro128p_normal_float64(states, index):
    """A normally distributed number. It uses two float32 numbers, as Numba does."""
    u1 = xoroshiro128p_uniform_float32(states, index)
    u2 = xoroshiro128p_uniform_float32(states, index)
    return math.sqrt(-float64(2) * math.log(u1)) * math.cos(float64(TWO_PI) * u2)
