"""An array that is handed out in pieces: for exercises that must never look at all of it at once."""

import numpy as np

from .attempt import Wrong


class Pieces(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that hands out at most `most` rows at a time, and takes part in no arithmetic as a whole.

    what, how: its rows, and how to take a piece, in words for the reader
    chosen: how many different rows may be taken one by one, or by a list of their numbers, in all; 0: one at a time, any
    asked: how many rows have been handed out
    """

    def __init__(self, x, most, what, how, chosen=0):
        self._x, self._what, self._how, self.asked = x, what, how, 0
        self._most, self._chosen, self._singles = most, chosen, set()
        self.shape, self.dtype, self.ndim, self.size = x.shape, x.dtype, x.ndim, x.size

    def __len__(self):
        return len(self._x)

    def __getitem__(self, key):
        rows = key[0] if isinstance(key, tuple) else key
        picked = np.arange(len(self._x))[rows]
        most = self._most
        if self._chosen and not isinstance(rows, slice):
            most = max(most, self._chosen)
            self._singles.update(np.atleast_1d(picked).tolist())
        if picked.size > most:
            raise Wrong(
                f"That asks for {picked.size} {self._what} at once; {most} are allowed: {self._how}."
            )
        if len(self._singles) > self._chosen:
            raise Wrong(
                f"More than {self._chosen} {self._what} were taken one by one, or by a list: {self._how} gives those of one "
                "segment; single ones are for those that are handed on."
            )
        self.asked += picked.size
        return self._x[key]

    def _all(self, *args, **options):
        raise Wrong(f"All {len(self)} {self._what} at once: walk over them, {self._how}.")

    __array__ = __array_ufunc__ = __array_function__ = _all
    T = property(_all)
