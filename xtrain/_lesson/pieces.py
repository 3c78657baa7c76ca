"""An array that is handed out in pieces: for exercises that must never look at all of it at once."""

import numpy as np

from .attempt import Wrong


class Pieces(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that hands out at most `most` rows at a time, and takes part in no arithmetic as a whole.

    what, how: its rows, and how to take a piece, in words for the reader. chosen: at most as many single rows, by a list
    asked: how many rows have been handed out
    """

    def __init__(self, x, most, what, how, chosen=0):
        self._x, self._what, self._how, self.asked = x, what, how, 0
        self._most, self._chosen = most, max(most, chosen)
        self.shape, self.dtype, self.ndim, self.size = x.shape, x.dtype, x.ndim, x.size

    def __len__(self):
        return len(self._x)

    def __getitem__(self, key):
        rows = key[0] if isinstance(key, tuple) else key
        if isinstance(rows, slice):
            n, most = len(range(*rows.indices(len(self._x)))), self._most
        else:
            n, most = np.size(rows), self._chosen
        if n > most:
            raise Wrong(f"That asks for {n} {self._what} at once; {most} are allowed: {self._how}.")
        self.asked += n
        return self._x[key]

    def _all(self, *args, **options):
        raise Wrong(f"All {len(self)} {self._what} at once: walk over them, {self._how}.")

    __array__ = __array_ufunc__ = __array_function__ = _all
    T = property(_all)
