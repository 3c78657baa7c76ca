"""A connection between a judge and an attempt (process.py), over which both call functions of the other end.

Numbers, text and containers travel as values, as JSON: nothing that arrives is executed. Arrays, and the lists, dicts
and sets among the arguments, are shared: before every message, each end sends those that have changed. Everything
else, such as functions, generators and communicators, travels as a reference; its use is a message.
"""

import builtins
import inspect
import json
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import ml_dtypes
import numpy as np

from xtrain import simulator
from xtrain.simulator import SimArray

from .pieces import Products
from .running import Wrong, set_profile

WAIT = 150  # seconds without an answer until the judge ends an attempt that sleeps
ARRAYS = {kind.__name__: kind for kind in (np.ndarray, SimArray, Products)}
METHODS = (
    "call",
    "getitem",
    "setitem",
    "len",
    "iter",
    "next",
    "array",
    "array_ufunc",
    "array_function",
)
ENDED = "The process of the attempt ended without an answer: by os._exit, by a crash, or because it was killed."


@dataclass
class Shared:
    """Memory that both ends have. sent: its bytes when both were last the same. mine: did this end make it?

    root: id of the array that owns the memory.
    """

    memory: np.ndarray
    sent: bytes
    mine: bool
    root: int


def root_of(a: np.ndarray) -> np.ndarray:
    """The array that owns the memory of a view."""
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


def bytes_of(root: np.ndarray) -> np.ndarray | None:
    """The memory of an array that owns it, as uint8; None if the array has gaps."""
    ordered = root.transpose(np.argsort([-s for s in root.strides], kind="stable"))
    if not ordered.flags.c_contiguous or ordered.dtype.hasobject:
        return None
    return np.asarray(ordered).reshape(-1).view(np.ndarray).view(np.uint8)


def dtype_name(dtype: np.dtype) -> Any:
    if dtype.names:
        return [[name, dtype_name(dtype[name])] for name in dtype.names]
    return dtype.name if hasattr(ml_dtypes, dtype.name) else dtype.str


def dtype_of(name: Any) -> np.dtype:
    if isinstance(name, list):
        return np.dtype([(field, dtype_of(kind)) for field, kind in name])
    return np.dtype(getattr(ml_dtypes, name, name))


class Proxy:
    """An object of the other end. A subclass, made for each, has its special methods."""

    def __init__(self, channel, key):
        self.__dict__.update(_channel=channel, _key=key)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return self._channel.request("get", self, name)

    def __setattr__(self, name, value):
        self._channel.request("set", self, name, value)


def _forwarded(method):
    def forward(self, *args, **options):
        given = () if method.startswith("array") else args
        return self._channel.request("method", self, method, given, options if given else {})

    return forward


def _proxy(channel, key, name, methods):
    bases: tuple[type, ...] = (Proxy,)
    if "array_ufunc" in methods:
        bases += (np.lib.mixins.NDArrayOperatorsMixin,)
    made = type(name, bases, {f"__{m}__": _forwarded(m) for m in methods if m in METHODS})
    return made(channel, key)


def _steps(proxy):
    """A generator of this end for one of the other end."""
    while True:
        try:
            value = proxy.__next__()
        except StopIteration:
            return
        yield value


class Channel:
    """One end of a connection. trusted: may the other end read and set every attribute that has no underscore?"""

    def __init__(self, connection: Connection, mine: str, trusted: bool, guarded, line_of):
        self.connection, self.mine, self.trusted = connection, mine, trusted
        self.guarded, self.line_of = guarded, line_of
        self.objects: dict[str, Any] = {}  # of this end, which the other one refers to
        self.keys: dict[int, str] = {}  # id of an object or container -> its key
        self.proxies: dict[str, Any] = {}
        self.arrays: dict[str, Shared] = {}
        self.roots: dict[int, str] = {}  # id of an array that owns its memory -> its key
        self.lists: dict[str, tuple[Any, str]] = {}  # containers of both ends -> as sent
        self.received: list[str] = []  # the containers that came with the last message
        self.errors: dict[str, BaseException] = {}
        self.made = 0
        self.operations = {
            "get": self._get,
            "set": self._set,
            "method": self._method,
            "call": self._call,
        }

    def key(self) -> str:
        self.made += 1
        return f"{self.mine}{self.made}"

    # ------------------------------------------------------------------------- messages
    def request(self, operation: str, *arguments) -> Any:
        """Ask the other end. -> its answer, or raises its error. Serves its requests until then."""
        profile = sys.getprofile()
        if profile is None:
            return self._request(operation, arguments)
        set_profile(None)  # it watches the reader's code, not this one
        try:
            return self._request(operation, arguments)
        finally:
            set_profile(profile)

    def _request(self, operation, arguments):
        before = set(self.lists)
        self.send({"do": operation}, list(arguments), share=True)
        while True:
            head, value = self.receive()
            if "do" in head:
                self.answer(head["do"], value)
                continue
            for key in set(self.lists) - before:  # shared for the time of the request
                self._forget(key)
            if "error" in head:
                raise self._error(head["error"])
            return value

    def answer(self, operation: str, arguments: list) -> None:
        """Do what the other end has requested, and send the result."""
        received = self.received
        try:
            value = self.operations[operation](*arguments)
        except BaseException as error:
            self.send({"error": self._described(error)}, None)
        else:
            self.send({}, value)
        for key in received:
            self._forget(key)

    def send(self, head: dict, value: Any, share: bool = False) -> None:
        buffers: list[bytes] = []
        head["value"] = self.encode(value, buffers, share)
        head["lists"] = self._changed_lists(buffers)
        head["memory"] = self._changed_memory(buffers)
        head["dropped"] = self._unused()
        head["buffers"] = len(buffers)
        sys.stdout.flush()
        try:
            self.connection.send_bytes(json.dumps(head).encode())
            for buffer in buffers:
                self.connection.send_bytes(buffer)
        except OSError:
            raise Wrong(ENDED) from None

    def receive(self) -> tuple[dict, Any]:
        try:
            if not self.trusted and not self.connection.poll(WAIT):
                raise Wrong(f"It gave no answer within {WAIT} seconds: does it wait for something?")
            head = json.loads(self.connection.recv_bytes())
            buffers = [self.connection.recv_bytes() for _ in range(head["buffers"])]
        except (EOFError, OSError):
            raise Wrong(ENDED) from None
        for key, number in head["memory"]:
            shared = self.arrays[key]
            shared.memory[:] = np.frombuffer(buffers[number], np.uint8)
            shared.sent = buffers[number]
        self.received = []
        value = self.decode(head["value"], buffers)
        for key, items in head["lists"]:
            self._refill(key, self.decode(items, buffers))
        for key in head["dropped"]:
            self._forget_array(key)
        return head, value

    # ------------------------------------------------------------------------- what both ends share
    def _changed_memory(self, buffers):
        changed = []
        for key, shared in self.arrays.items():
            now = shared.memory.tobytes()
            if now != shared.sent:
                shared.sent = now
                changed.append([key, len(buffers)])
                buffers.append(now)
        return changed

    def _changed_lists(self, buffers):
        changed = []
        for key, (container, sent) in [*self.lists.items()]:
            items = self._items(container, buffers, False)
            if json.dumps(items) != sent:
                self.lists[key] = container, self._state(container)
                changed.append([key, items])
        return changed

    def _state(self, container) -> str:
        """What a container holds, once its arrays have been sent."""
        return json.dumps(self._items(container, [], False))

    def _refill(self, key, items):
        container = self.lists[key][0]
        if isinstance(container, list):
            container[:] = items
        else:
            container.clear()
            container.update(items)
        self.lists[key] = container, self._state(container)

    def _unused(self):
        """Forget memory of the other end that nothing here refers to: only `memory` and the argument do."""
        unused = [
            key for key, s in self.arrays.items() if not s.mine and sys.getrefcount(s.memory) <= 2
        ]
        for key in unused:
            self._forget_array(key)
        return unused

    def _forget_array(self, key):
        if key in self.arrays:
            self.roots.pop(self.arrays.pop(key).root)
            self.objects.pop(key, None)

    def _forget(self, key):
        if key in self.lists:
            self.keys.pop(id(self.lists.pop(key)[0]), None)

    # ------------------------------------------------------------------------- values
    def encode(self, value: Any, buffers: list, share: bool) -> Any:
        """-> JSON. share: containers are shared until the request has its answer."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, np.ndarray):
            return self._encode_array(value, buffers, share)
        if isinstance(value, np.generic):
            return ["number", dtype_name(value.dtype), value.tobytes().hex()]
        if isinstance(value, bytes):
            return ["bytes", value.hex()]
        if isinstance(value, (tuple, frozenset)):
            kind = "tuple" if isinstance(value, tuple) else "frozenset"
            return [kind, [self.encode(x, buffers, share) for x in value]]
        if isinstance(value, (list, dict, set)):
            if id(value) in self.keys:
                return ["same", self.keys[id(value)]]
            items = self._items(value, buffers, share)
            if not share:
                return ["copy", items]
            key = self.keys[id(value)] = self.key()
            self.lists[key] = value, self._state(value)
            return ["shared", key, items]
        if isinstance(value, (range, slice)):
            bounds = [value.start, value.stop, value.step]
            return [type(value).__name__, [self.encode(x, buffers, False) for x in bounds]]
        if value is Ellipsis:
            return ["ellipsis"]
        if (
            isinstance(value, (np.dtype, type))
            and getattr(np, getattr(value, "__name__", ""), None) is value
        ):
            return ["numpy", value.__name__]
        if isinstance(value, np.dtype):
            return ["dtype", dtype_name(value)]
        if isinstance(value, (bool, int, float, str)):  # of a subclass
            return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
        return self._encode_object(value)

    def _items(self, container, buffers, share):
        if isinstance(container, dict):
            return [
                "dict",
                [[self.encode(x, buffers, share) for x in pair] for pair in container.items()],
            ]
        kind = "list" if isinstance(container, list) else "set"
        return [kind, [self.encode(x, buffers, share) for x in container]]

    def _encode_array(self, a, buffers, share):
        root = root_of(a)
        memory = bytes_of(root)
        if a.dtype.hasobject:
            return ["objects", list(a.shape), [self.encode(x, buffers, False) for x in a.flat]]
        if memory is None:
            root = a = np.array(a)
            memory = bytes_of(root)
        key = self.roots.get(id(root))
        size = None
        if key is None:
            key = self.roots[id(root)] = self.key()
            self.objects[key] = root  # keeps its id from being used again
            size = len(buffers)
            buffers.append(memory.tobytes())
            self.arrays[key] = Shared(memory, buffers[-1], True, id(root))
        shared = self.arrays[key].memory
        start = a.__array_interface__["data"][0] - shared.__array_interface__["data"][0]
        kind = next((name for name, kind in ARRAYS.items() if type(a) is kind), "ndarray")
        layout = [dtype_name(a.dtype), list(a.shape), list(a.strides), start]
        shapes = self.encode(a.shapes, buffers, share) if kind == "Products" else None
        return ["array", key, size, kind, layout, a.flags.writeable, shapes]

    def _encode_object(self, value):
        if isinstance(value, Proxy) and value._channel is self:
            return ["yours", value._key]
        key = self.keys.get(id(value))
        if key is None:
            key = self.keys[id(value)] = self.key()
            self.objects[key] = value
        methods = [m for m in METHODS if hasattr(type(value), f"__{m}__")]
        return ["object", key, type(value).__name__, methods, inspect.isgenerator(value)]

    def decode(self, code: Any, buffers: list) -> Any:
        if not isinstance(code, list):
            return code
        return getattr(self, f"_decode_{code[0]}")(buffers, *code[1:])

    def _decode_number(self, buffers, dtype, digits):
        return np.frombuffer(bytes.fromhex(digits), dtype_of(dtype))[0]

    def _decode_bytes(self, buffers, digits):
        return bytes.fromhex(digits)

    def _decode_list(self, buffers, items):
        return [self.decode(x, buffers) for x in items]

    def _decode_tuple(self, buffers, items):
        return tuple(self._decode_list(buffers, items))

    def _decode_set(self, buffers, items):
        return set(self._decode_list(buffers, items))

    def _decode_frozenset(self, buffers, items):
        return frozenset(self._decode_list(buffers, items))

    def _decode_dict(self, buffers, items):
        return {self.decode(k, buffers): self.decode(v, buffers) for k, v in items}

    def _decode_copy(self, buffers, items):
        return self.decode(items, buffers)

    def _decode_shared(self, buffers, key, items):
        value = self.decode(items, buffers)
        self.keys[id(value)] = key
        self.lists[key] = value, self._state(value)
        self.received.append(key)
        return value

    def _decode_same(self, buffers, key):
        return self.lists[key][0]

    def _decode_range(self, buffers, bounds):
        return range(*self._decode_list(buffers, bounds))

    def _decode_slice(self, buffers, bounds):
        return slice(*self._decode_list(buffers, bounds))

    def _decode_ellipsis(self, buffers):
        return ...

    def _decode_numpy(self, buffers, name):
        return getattr(np, name)

    def _decode_dtype(self, buffers, name):
        return dtype_of(name)

    def _decode_objects(self, buffers, shape, items):
        a = np.empty(len(items), object)
        a[:] = self._decode_list(buffers, items)
        return a.reshape(shape)

    def _decode_array(self, buffers, key, number, kind, layout, writeable, shapes):
        if key not in self.arrays:
            memory = np.empty(len(buffers[number]), np.uint8)
            memory[:] = np.frombuffer(buffers[number], np.uint8)
            self.arrays[key] = Shared(memory, buffers[number], False, id(memory))
            self.roots[id(memory)] = key
        dtype, shape, strides, start = layout
        a = np.ndarray(shape, dtype_of(dtype), self.arrays[key].memory, start, strides)
        a = a.view(ARRAYS[kind])
        if kind == "Products":
            a.shapes = self.decode(shapes, buffers)
        a.flags.writeable = writeable
        return a

    def _decode_yours(self, buffers, key):
        return self.objects[key]

    def _decode_object(self, buffers, key, name, methods, generator):
        if key not in self.proxies:
            proxy = _proxy(self, key, name, methods)
            self.proxies[key] = _steps(proxy) if generator else proxy
        return self.proxies[key]

    # ------------------------------------------------------------------------- errors
    def _described(self, error: BaseException) -> dict:
        if getattr(error, "channel", None) is self:  # it came from the other end
            return {"back": error.key}
        key = self.key()
        self.errors[key] = error
        bases = (
            kind for kind in type(error).__mro__ if getattr(builtins, kind.__name__, 0) is kind
        )
        return {
            "key": key, "name": type(error).__name__, "base": next(bases).__name__, "text": str(error),
            "line": self.line_of(error),
        }  # fmt: skip

    def _error(self, told: dict) -> BaseException:
        if "back" in told:
            return self.errors[told["back"]]
        if told["name"] == "Wrong" and not self.trusted:
            return Wrong(told["text"])
        known = getattr(simulator, told["name"], None)
        if isinstance(known, type) and issubclass(known, simulator.KernelError):
            return known(told["text"])
        base = getattr(builtins, told["base"])
        error = type(told["name"], (base,), {"__str__": lambda self: told["text"]})()
        error.channel, error.key, error.line = self, told["key"], told["line"]
        return error

    # ------------------------------------------------------------------------- requests of the other end
    def _get(self, thing, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(thing, name)

    def _set(self, thing, name, value):
        if not (self.trusted or name in getattr(type(thing), "writable", ())):
            raise AttributeError(f"{type(thing).__name__}.{name} cannot be set")
        setattr(thing, name, value)

    def _method(self, thing, method, args, options):
        if method not in METHODS:
            raise AttributeError(method)
        with self.guarded():
            return getattr(thing, f"__{method}__")(*args, **options)

    def _call(self, name, *args):
        raise AttributeError(name)
