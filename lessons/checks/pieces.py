"""Arrays that watch what is done with them: read in pieces only, or multiplied."""

import numpy as np

from .running import Wrong


class Pieces(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that returns at most `most` rows per access, and refuses arithmetic on the whole array.

    what, how: what its rows are and how to read a piece, as text for the reader
    chosen: how many different rows may be read one by one or with a list of indices, in total; 0: any, one at a time
    asked: how many rows have been read
    """

    def __init__(self, x, most, what, how, chosen=0):
        self._x, self._what, self._how, self.asked = x, what, how, 0
        self._most, self._chosen, self._singles = most, chosen, set()
        self.shape, self.dtype, self.ndim, self.size = x.shape, x.dtype, x.ndim, x.size

    def __len__(self):
        return len(self._x)

    def __getitem__(self, key):
        rows = key[0] if isinstance(key, tuple) else key
        n = len(self._x)
        if isinstance(rows, slice):
            picked = range(n)[rows]
        elif isinstance(rows, (int, np.integer)):  # no array of n numbers for each single row
            picked = [rows % n] if -n <= rows < n else []
        else:
            picked = np.atleast_1d(np.arange(n)[rows]).ravel().tolist()
        most = self._most
        if self._chosen and not isinstance(rows, slice):
            most = max(most, self._chosen)
            self._singles.update(picked)
        if len(picked) > most:
            raise Wrong(
                f"This reads {len(picked)} {self._what} at once; at most {most} are allowed: {self._how}."
            )
        if len(self._singles) > self._chosen:
            raise Wrong(
                f"More than {self._chosen} {self._what} were read one by one or with a list: read a segment with {self._how}; "
                "read single ones only for the candidates that are passed on."
            )
        self.asked += len(picked)
        return np.array(self._x[key])  # not a view, which has all of it as its base

    def _all(self, *args, **options):
        raise Wrong(
            f"All {len(self)} {self._what} at once are not allowed: loop over them with {self._how}."
        )

    __array__ = __array_ufunc__ = __array_function__ = _all
    T = property(_all)


class Products(np.ndarray):
    """An array that notes in `shapes` the shape of every matrix product that it takes part in."""

    shapes: set
    functions = (np.dot, np.inner, np.vdot, np.tensordot, np.einsum, np.linalg.multi_dot)

    def __array_finalize__(self, parent):
        self.shapes = getattr(parent, "shapes", set())

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if out:
            options["out"] = tuple(map(_plain, out))
        result = getattr(ufunc, method)(*map(_plain, inputs), **options)
        if out:
            result = out[0]
        return self._noted(result, ufunc is np.matmul)

    def __array_function__(self, function, types, args, options):
        result = super().__array_function__(function, types, args, options)
        return self._noted(result, function in self.functions)

    def dot(self, other, out=None):
        return self._noted(_plain(self).dot(_plain(other), out=out), True)

    def _noted(self, result, product):
        if product:
            self.shapes.add(np.shape(result))
        if type(result) is np.ndarray:
            result = result.view(Products)
        if isinstance(result, Products):
            result.shapes = self.shapes
        return result


def _plain(x):
    return x.view(np.ndarray) if isinstance(x, Products) else x
