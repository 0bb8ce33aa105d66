"""What a value looks like, without what is in it: shapes, strides, dtypes of its tensors, as data that JSON can hold.

A batch, or what a module is called with, is described by `of` and made again by `Schema.make`, with zeros in it. Data
that comes from a file is checked before anything is made of it: it can name a class, but only one that this process
has imported and that is plain data, and neither its constructor nor any other code of it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MOST_NODES = 20_000
"""Values, of all kinds, that data from a file may describe."""
MOST_BYTES = 8 << 30
"""Bytes that all tensors of data from a file may take together."""
MOST_DEPTH = 32
"""How deep values may lie in each other."""
_MOST_TEXT = 4_096
_MOST_DIMENSIONS = 32
_MOST_KEYS = 100_000

_DTYPES = (
    "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
    "int16", "int32", "int64", "int8", "uint8",
)  # fmt: skip
_DEVICES = ("cpu", "cuda", "mps", "xpu")


class SchemaError(ValueError):
    """A value that can't be described, or data that describes none. `place` says where in it."""

    def __init__(self, place: str, problem: str) -> None:
        self.place = place
        self.problem = problem
        super().__init__(f"{place.lstrip('.') or 'the value'}: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.place, self.problem)


class Schema:
    """The description of a value. Frozen, comparable."""

    def make(self, device: torch.device | str) -> Any:
        """Return a value of this description, filled with zeros.

        Tensors of the type of `device` are made there, others on their own type of device (see `on`).
        """
        return self._make(device)

    def to_data(self) -> dict[str, Any]:
        """Return it as JSON data, which `from_data` reads."""
        return self._data()

    def on(self, kind: str) -> Schema:
        """Return the same with all tensors on that type of device."""
        return self._each(lambda part: replace(part, device=kind) if isinstance(part, Tensor) else part)

    def with_counts(self) -> Schema:
        """Return the same with the values of each key counted, so that nothing has to be read from tensors for it."""
        return self._each(_counted)

    def without_counts(self) -> Schema:
        """Return the same without how many values its jagged tensors have, which differs from batch to batch."""
        return self._each(_uncounted)

    def _make(self, device: torch.device | str) -> Any:
        raise NotImplementedError

    def _data(self) -> dict[str, Any]:
        raise NotImplementedError

    def _each(self, change: Callable[[Schema], Schema]) -> Schema:
        return change(self._over(lambda part: part._each(change)))

    def _over(self, change: Callable[[Schema], Schema]) -> Schema:
        """The same with what `change` makes of each of its parts."""
        parts = {name: change(part) for name, part in vars(self).items() if isinstance(part, Schema)}
        return replace(self, **parts) if parts else self  # type: ignore[type-var]


@dataclass(frozen=True)
class Tensor(Schema):
    """A strided tensor. `dtype` and `device` are names, the device's without a number."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    requires_grad: bool = False

    def __post_init__(self) -> None:
        _check(len(self.shape) == len(self.stride), "it needs one stride per dimension")
        _check(self.dtype in _DTYPES, f"dtype {self.dtype!r} is none of {', '.join(_DTYPES)}")
        _check(self.device in _DEVICES, f"device {self.device!r} is none of {', '.join(_DEVICES)}")
        floating = self.dtype.startswith(("float", "bfloat", "complex"))
        _check(floating or not self.requires_grad, f"a tensor of {self.dtype} has no gradient")

    @classmethod
    def dense(cls, *shape: int, dtype: str = "float32") -> Tensor:
        """Return the description of a contiguous tensor on the CPU without a gradient."""
        return cls(shape, tuple(max(1, math.prod(shape[place + 1 :])) for place in range(len(shape))), dtype)

    @property
    def size(self) -> int:
        """Bytes of its storage."""
        if 0 in self.shape:
            return 0
        last = sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * _bytes(self.dtype)

    def _make(self, device: torch.device | str) -> torch.Tensor:
        import torch

        device = torch.device(device)
        where = device if device.type == self.device else torch.device(self.device)
        made = torch.empty_strided(self.shape, self.stride, dtype=getattr(torch, self.dtype), device=where)
        # Flat, because elements that share memory can't be written in place.
        made.as_strided((self.size // made.element_size(),), (1,)).zero_()
        return made.requires_grad_(self.requires_grad)

    def _data(self) -> dict[str, Any]:
        return {"tensor": {**vars(self), "shape": list(self.shape), "stride": list(self.stride)}}


@dataclass(frozen=True)
class Jagged(Schema):
    """A JaggedTensor, described by its tensors. Made again, its rows have about equally many values."""

    values: Tensor
    weights: Tensor | None = None
    lengths: Tensor | None = None
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        _check(bool(self.values.shape), "`values` needs a first dimension")
        rows = _rows(self.lengths, self.offsets)
        _check(rows > 0 or self.values.shape[0] == 0, "it has values, but no rows for them")
        _check_weights(self.values, self.weights)

    def _make(self, device: torch.device | str) -> Any:
        from torchrec.sparse.jagged_tensor import JaggedTensor

        group = (self.values.shape[0], _rows(self.lengths, self.offsets))
        return JaggedTensor(
            values=self.values.make(device),
            weights=None if self.weights is None else self.weights.make(device),
            **_jagged([group], self.lengths, self.offsets, device),
        )

    def _data(self) -> dict[str, Any]:
        return {"jagged": _parts(self)}


@dataclass(frozen=True)
class KeyedJagged(Schema):
    """A KeyedJaggedTensor of the same batch size, `stride`, for all keys.

    `per_key` counts the values of each key where that is known without reading tensors; made again, a tensor with
    other counts has as many in all.
    """

    keys: tuple[str, ...]
    stride: int
    values: Tensor
    weights: Tensor | None = None
    lengths: Tensor | None = None
    offsets: Tensor | None = None
    per_key: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check(bool(self.values.shape), "`values` needs a first dimension")
        rows, count = _rows(self.lengths, self.offsets), self.values.shape[0]
        _check(rows == len(self.keys) * self.stride, f"{len(self.keys)} keys of {self.stride} rows are not {rows} rows")
        _check(rows > 0 or count == 0, "it has values, but no rows for them")
        _check_weights(self.values, self.weights)
        if self.per_key is not None:
            _check(len(self.per_key) == len(self.keys), f"it counts {len(self.per_key)} keys and has {len(self.keys)}")
            _check(sum(self.per_key) == count, f"its keys have {sum(self.per_key)} values, it has {count}")

    @classmethod
    def of_keys(
        cls, keys: Iterable[str], batch_size: int, per_key: Iterable[int], *, lengths: str = "int32"
    ) -> KeyedJagged:
        """Return the description of an unweighted one of int64 ids on the CPU, with lengths of dtype `lengths`."""
        names, counts = tuple(keys), tuple(per_key)
        rows = Tensor.dense(len(names) * batch_size, dtype=lengths)
        return cls(names, batch_size, Tensor.dense(sum(counts), dtype="int64"), lengths=rows, per_key=counts)

    def _make(self, device: torch.device | str) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        counts = self.per_key or _split(self.values.shape[0], len(self.keys))
        return KeyedJaggedTensor(
            keys=list(self.keys),
            values=self.values.make(device),
            weights=None if self.weights is None else self.weights.make(device),
            stride=self.stride,
            length_per_key=None if self.per_key is None else list(self.per_key),
            **_jagged([(count, self.stride) for count in counts], self.lengths, self.offsets, device),
        )

    def _data(self) -> dict[str, Any]:
        per_key = None if self.per_key is None else list(self.per_key)
        about = {"keys": list(self.keys), "stride": self.stride, "per_key": per_key}
        return {"keyed_jagged": {**about, **_parts(self)}}


@dataclass(frozen=True)
class Keyed(Schema):
    """A KeyedTensor: `lengths` are the widths of its keys along dimension `dim`."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    dim: int
    values: Tensor

    def __post_init__(self) -> None:
        _check(len(self.lengths) == len(self.keys), f"it has {len(self.keys)} keys and {len(self.lengths)} widths")
        _check(0 <= self.dim < len(self.values.shape), f"`values` has no dimension {self.dim}")
        width = self.values.shape[self.dim]
        _check(sum(self.lengths) == width, f"its keys are {sum(self.lengths)} wide, its values {width}")

    def _make(self, device: torch.device | str) -> Any:
        from torchrec.sparse.jagged_tensor import KeyedTensor

        return KeyedTensor(list(self.keys), list(self.lengths), self.values.make(device), self.dim)

    def _data(self) -> dict[str, Any]:
        return {"keyed": {"keys": list(self.keys), "lengths": list(self.lengths), "dim": self.dim, **_parts(self)}}


@dataclass(frozen=True)
class Items(Schema):
    """A tuple or a list; with a class path (`module:Name`) a named tuple."""

    kind: str
    items: tuple[Schema, ...]
    path: str = ""

    def _make(self, device: torch.device | str) -> Any:
        made = [item.make(device) for item in self.items]
        if self.path:
            # Not the class itself, which may do more than hold them.
            return tuple.__new__(_class(self.path), made)
        return made if self.kind == "list" else tuple(made)

    def _data(self) -> dict[str, Any]:
        items = [item.to_data() for item in self.items]
        return {"named_tuple": {"class": self.path, "items": items}} if self.path else {self.kind: items}

    def _over(self, change: Callable[[Schema], Schema]) -> Items:
        return replace(self, items=tuple(map(change, self.items)))


@dataclass(frozen=True)
class Entries(Schema):
    """A dict whose keys are strings; with a class path the attributes of an instance, in the order of their names."""

    names: tuple[str, ...]
    items: tuple[Schema, ...]
    path: str = ""

    def _make(self, device: torch.device | str) -> Any:
        made = {name: item.make(device) for name, item in zip(self.names, self.items, strict=True)}
        return _instance(_class(self.path), made) if self.path else made

    def _data(self) -> dict[str, Any]:
        # Pairs, as the order of a JSON object is nobody's promise.
        items = [[name, item.to_data()] for name, item in zip(self.names, self.items, strict=True)]
        return {"object": {"class": self.path, "attributes": items}} if self.path else {"dict": items}

    def _over(self, change: Callable[[Schema], Schema]) -> Entries:
        return replace(self, items=tuple(map(change, self.items)))


@dataclass(frozen=True)
class Constant(Schema):
    """A plain value: it is kept as it is."""

    value: int | float | bool | str | None
    kind: str = field(init=False)

    def __post_init__(self) -> None:
        # As True == 1 == 1.0.
        object.__setattr__(self, "kind", type(self.value).__name__)
        _check(self.kind in ("int", "float", "bool", "str", "NoneType"), f"{self.kind} is no plain value")
        if isinstance(self.value, float):
            _check(math.isfinite(self.value), f"JSON has no {self.value}")
        elif isinstance(self.value, int):
            _check(-(2**63) <= self.value < 2**63, "the number is longer than 64 bits")
        elif isinstance(self.value, str):
            _check(len(self.value) <= _MOST_TEXT, f"the text is longer than {_MOST_TEXT} characters")

    def _make(self, device: torch.device | str) -> Any:
        return self.value

    def _data(self) -> dict[str, Any]:
        return {"constant": self.value}


def of(value: Any) -> Schema:
    """Return the description of a value. Reads no data of a tensor and changes nothing.

    Raises SchemaError for a value that has none, naming the place in it.
    """
    return _of(value, "", 0)


def from_data(data: Any) -> Schema:
    """Read what `Schema.to_data` returned. Raises SchemaError for anything else, naming the place in it."""
    return Reader().schema(data, "")


def _of(value: Any, place: str, depth: int) -> Schema:
    import torch

    if depth > MOST_DEPTH:
        raise SchemaError(place, f"it lies deeper than {MOST_DEPTH} levels, or holds itself")

    def inside(part: Any, step: str) -> Any:
        return None if part is None else _of(part, place + step, depth + 1)

    try:
        if isinstance(value, torch.Tensor):
            return _of_tensor(value)
        if value is None or type(value) in (int, float, bool, str):
            return Constant(value)
        if type(value) in (tuple, list):
            parts = tuple(_of(part, f"{place}[{index}]", depth + 1) for index, part in enumerate(value))
            return Items(type(value).__name__, parts)
        if type(value) is dict:
            names = tuple(value)
            _check(all(type(name) is str for name in names), "a key of the dict is no string")
            return Entries(names, tuple(_of(value[name], f"{place}[{name!r}]", depth + 1) for name in names))
        if jagged := sys.modules.get("torchrec.sparse.jagged_tensor"):
            if type(value) is jagged.KeyedJaggedTensor:
                return _of_keyed_jagged(value, inside)
            if type(value) is jagged.JaggedTensor:
                return Jagged(inside(value.values(), ".values"), **_of_jagged(value, inside))
            if type(value) is jagged.KeyedTensor:
                values = inside(value.values(), ".values")
                return Keyed(tuple(value.keys()), tuple(value.length_per_key()), value.key_dim(), values)
        path = f"{type(value).__module__}:{type(value).__qualname__}"
        _check(_class(path) is type(value), f"{path} is another class than that of the value")
        if isinstance(value, tuple):
            named = zip(type(value)._fields, value, strict=True)  # type: ignore[attr-defined]
            return Items("tuple", tuple(_of(part, f"{place}.{name}", depth + 1) for name, part in named), path)
        held = _attributes(value)
        return Entries(tuple(held), tuple(_of(part, f"{place}.{name}", depth + 1) for name, part in held.items()), path)
    except SchemaError:
        raise
    except ValueError as error:
        raise SchemaError(place, str(error)) from None
    except AttributeError as error:
        raise SchemaError(place, f"{type(value).__name__} is not that of the known torchrec: {error}") from error


def _of_tensor(value: torch.Tensor) -> Tensor:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor  # what a fast batch is made of; there is no public name

    _check(isinstance(value, FakeTensor) or type(value) in (torch.Tensor, torch.nn.Parameter), f"it is a {type(value)}")
    _check(value.layout == torch.strided, f"a tensor of layout {value.layout} can't be described")
    _check(all(type(number) is int for number in (*value.shape, *value.stride())), "its shape depends on data")
    return Tensor(
        tuple(value.shape),
        tuple(value.stride()),
        str(value.dtype).removeprefix("torch."),
        value.device.type,
        value.requires_grad,
    )


def _of_keyed_jagged(value: Any, inside: Callable[[Any, str], Any]) -> KeyedJagged:
    # The public methods compute and keep what is asked for, and code that was compiled for the value guards on that.
    _check(value._stride_per_key_per_rank is None, "its keys have batch sizes of their own, which are not described")
    parts = _of_jagged(value, inside)
    keys, per_key = tuple(value.keys()), value.length_per_key_or_none()
    rows = _rows(parts["lengths"], parts["offsets"])
    return KeyedJagged(
        keys,
        rows // max(len(keys), 1) if value._stride is None else value._stride,
        inside(value.values(), ".values"),
        **parts,
        per_key=None if per_key is None else tuple(map(int, per_key)),
    )


def _of_jagged(value: Any, inside: Callable[[Any, str], Any]) -> dict[str, Any]:
    names = ("weights", "lengths", "offsets")
    return {name: inside(getattr(value, f"{name}_or_none")(), f".{name}") for name in names}


def _attributes(value: Any) -> dict[str, Any]:
    """What an instance holds, by name: never a property, which would run code."""
    try:
        held = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        held = {}
    for name, member in _slots(type(value)).items():
        with contextlib.suppress(AttributeError):  # it has no value
            held[name] = member.__get__(value, type(value))
    return dict(sorted(held.items()))


def _slots(cls: type) -> dict[str, Any]:
    every = {name: member for parent in reversed(cls.__mro__) for name, member in vars(parent).items()}
    return {name: member for name, member in every.items() if isinstance(member, types.MemberDescriptorType)}


def _instance(cls: type, held: Mapping[str, Any]) -> Any:
    made: Any = object.__new__(cls)
    slots = _slots(cls)
    for name, value in held.items():
        if name in slots:
            slots[name].__set__(made, value)
        else:
            # The dictionary, as setting an attribute may be code of the class.
            made.__dict__[name] = value
    return made


def _class(path: str) -> type:
    """The class of that path if it is there already and holds plain data. Raises ValueError, imports nothing."""
    module_name, _, name = path.partition(":")
    module = sys.modules.get(module_name)
    _check(module is not None, f"class {path!r} is of a module that is not imported")
    found: Any = module
    for step in name.split("."):
        # Not `getattr`, for which a module may import something.
        found = found.__dict__.get(step) if isinstance(found, (type, types.ModuleType)) else None
    _check(isinstance(found, type), f"class {path!r} is not there")
    assert isinstance(found, type)
    jagged = sys.modules.get("torchrec.sparse.jagged_tensor")
    described = [getattr(jagged, kind, None) for kind in ("KeyedJaggedTensor", "JaggedTensor", "KeyedTensor")]
    _check(found not in described, f"class {path!r} has a description of its own")
    pipelineable = getattr(sys.modules.get("torchrec.streamable"), "Pipelineable", None)
    if issubclass(found, tuple):
        plain = hasattr(found, "_fields")
    else:
        plain = dataclasses.is_dataclass(found) or (pipelineable is not None and issubclass(found, pipelineable))
        plain = plain and found.__new__ is object.__new__ and not getattr(found, "__abstractmethods__", None)
    _check(plain, f"class {path!r} is no dataclass, NamedTuple or Pipelineable")
    return found


def _jagged(
    groups: Iterable[tuple[int, int]], lengths: Tensor | None, offsets: Tensor | None, device: torch.device | str
) -> dict[str, Any]:
    """Lengths and offsets whose sum is that of the values: each group is a number of values and of rows for them."""
    import torch

    rows = [torch.zeros(0, dtype=torch.int64)]
    for count, among in groups:
        rows.append(torch.full((among,), count // max(among, 1)))
        rows[-1][: count % max(among, 1)] += 1
    each = torch.cat(rows)
    made: dict[str, tuple[Tensor | None, torch.Tensor]] = {
        "lengths": (lengths, each),
        "offsets": (offsets, torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)])),
    }
    return {name: None if part is None else part.make(device).copy_(full) for name, (part, full) in made.items()}


def _split(count: int, among: int) -> tuple[int, ...]:
    return tuple(count // among + (place < count % among) for place in range(among))


def _rows(lengths: Tensor | None, offsets: Tensor | None) -> int:
    both = [] if lengths is None else [(lengths, 0)]
    both += [] if offsets is None else [(offsets, 1)]
    _check(bool(both), "it has neither lengths nor offsets")
    _check(all(len(part.shape) == 1 and part.shape[0] >= more for part, more in both), "its lengths are no plain list")
    _check(all("int" in part.dtype for part, _ in both), "its lengths are no integers")
    rows = {part.shape[0] - more for part, more in both}
    _check(len(rows) == 1, "its lengths and offsets are of different numbers of rows")
    return rows.pop()


def _check_weights(values: Tensor, weights: Tensor | None) -> None:
    _check(weights is None or weights.shape[:1] == values.shape[:1], "it has not one weight per value")


def _counted(part: Schema) -> Schema:
    if not isinstance(part, KeyedJagged) or part.per_key is not None:
        return part
    return replace(part, per_key=_split(part.values.shape[0], len(part.keys)))


def _uncounted(part: Schema) -> Schema:
    if not isinstance(part, (Jagged, KeyedJagged)):
        return part
    if isinstance(part, KeyedJagged):
        part = replace(part, per_key=None)
    if part.lengths is not None:
        # They come and go as they are asked for.
        part = replace(part, offsets=None)
    return replace(part, values=_empty(part.values), weights=_empty(part.weights))


def _empty(tensor: Tensor | None) -> Any:
    return None if tensor is None else replace(tensor, shape=(0, *tensor.shape[1:]))


def _parts(schema: Schema) -> dict[str, Any]:
    names = ("values", "weights", "lengths", "offsets") if isinstance(schema, (Jagged, KeyedJagged)) else ("values",)
    parts: dict[str, Tensor | None] = {name: getattr(schema, name) for name in names}
    return {name: part and part.to_data() for name, part in parts.items()}


def _bytes(dtype: str) -> int:
    digits = "".join(filter(str.isdigit, dtype.split("_")[0]))
    return max(1, int(digits or 8) // 8)


def _check(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


class Reader:
    """Reads descriptions from JSON data. What one reader reads is bounded as a whole."""

    def __init__(self) -> None:
        self._nodes = 0
        self._bytes = 0

    def schema(self, data: Any, place: str, depth: int = 0) -> Schema:
        """Read one description. Raises SchemaError, naming the place."""
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise SchemaError(place, f"there are more than {MOST_NODES} values")
        if depth > MOST_DEPTH:
            raise SchemaError(place, f"it lies deeper than {MOST_DEPTH} levels")
        if not isinstance(data, dict) or len(data) != 1:
            raise SchemaError(place, "it is no description: one key names its kind")
        [(kind, about)] = data.items()
        try:
            return self._read(kind, about, place, depth + 1)
        except SchemaError:
            raise
        except ValueError as error:
            raise SchemaError(place, str(error)) from None

    def _read(self, kind: Any, about: Any, place: str, depth: int) -> Schema:
        if kind == "tensor":
            return self._tensor(about)
        if kind in ("tuple", "list"):
            return Items(kind, self._items(about, place, depth))
        if kind == "dict":
            return Entries(*self._entries(about, place, depth))
        if kind == "constant":
            return Constant(about)
        if kind == "named_tuple":
            about = fields(about, "class", "items")
            path = _path(about["class"])
            items = self._items(about["items"], place, depth)
            named = getattr(_class(path), "_fields", None)
            _check(named is not None and len(named) == len(items), f"class {path!r} has not {len(items)} fields")
            return Items("tuple", items, path)
        if kind == "object":
            about = fields(about, "class", "attributes")
            path = _path(about["class"])
            _check(not issubclass(_class(path), tuple), f"class {path!r} is a named tuple")
            names, parts = self._entries(about["attributes"], place, depth)
            _check(all(name.isidentifier() and name[:2] != "__" for name in names), "an attribute has no plain name")
            return Entries(names, parts, path)
        if kind == "jagged":
            return Jagged(**self._parts(fields(about, "values", "weights", "lengths", "offsets"), place, depth))
        if kind == "keyed_jagged":
            names = ("keys", "stride", "per_key", "values", "weights", "lengths", "offsets")
            about = dict(fields(about, *names))
            keys, stride, per_key = _texts(about.pop("keys")), _number(about.pop("stride")), about.pop("per_key")
            counts = None if per_key is None else _numbers(per_key)
            return KeyedJagged(keys, stride, **self._parts(about, place, depth), per_key=counts)
        if kind == "keyed":
            about = fields(about, "keys", "lengths", "dim", "values")
            values = self._parts({"values": about["values"]}, place, depth)["values"]
            return Keyed(_texts(about["keys"]), _numbers(about["lengths"]), _number(about["dim"]), values)
        raise ValueError(f"{kind!r} is no kind of a description")

    def _tensor(self, about: Any) -> Tensor:
        about = fields(about, "shape", "stride", "dtype", "device", "requires_grad")
        shape, stride = _numbers(about["shape"], _MOST_DIMENSIONS), _numbers(about["stride"], _MOST_DIMENSIONS)
        _check(isinstance(about["dtype"], str) and isinstance(about["device"], str), "dtype and device are names")
        _check(type(about["requires_grad"]) is bool, "requires_grad is true or false")
        read = Tensor(shape, stride, about["dtype"], about["device"], about["requires_grad"])
        # The elements, too: strides of 0 make many of few bytes, and a kernel would fill a whole one.
        self._bytes += max(read.size, math.prod(shape) * _bytes(read.dtype))
        _check(self._bytes <= MOST_BYTES, f"the tensors take more than {MOST_BYTES >> 30} GiB")
        return read

    def _items(self, about: Any, place: str, depth: int) -> tuple[Schema, ...]:
        _check(isinstance(about, list), "its items are no list")
        return tuple(self.schema(item, f"{place}[{index}]", depth) for index, item in enumerate(about))

    def _entries(self, about: Any, place: str, depth: int) -> tuple[tuple[str, ...], tuple[Schema, ...]]:
        _check(isinstance(about, list), "its entries are no list")
        _check(all(isinstance(pair, list) and len(pair) == 2 for pair in about), "its entries are no pairs")
        names = _texts([pair[0] for pair in about])
        _check(len(set(names)) == len(names), "two of its entries have one name")
        return names, tuple(self.schema(pair[1], f"{place}[{pair[0]!r}]", depth) for pair in about)

    def _parts(self, about: Mapping[str, Any], place: str, depth: int) -> dict[str, Any]:
        read: dict[str, Any] = {}
        for name, data in about.items():
            read[name] = None if data is None else self.schema(data, f"{place}.{name}", depth)
            optional = name != "values" and read[name] is None
            _check(optional or isinstance(read[name], Tensor), f"its {name} are no tensor")
        return read


def fields(data: Any, *names: str) -> Mapping[str, Any]:
    """Return `data` if it is a mapping of exactly these names. Raises ValueError."""
    _check(isinstance(data, dict) and data.keys() == set(names), f"it has not the entries {', '.join(names)}")
    return data  # type: ignore[no-any-return]


def _number(data: Any) -> int:
    _check(type(data) is int and 0 <= data < 2**48, f"{str(data)[:20]!r} is no number of things")
    return data  # type: ignore[no-any-return]


def _numbers(data: Any, most: int = _MOST_KEYS) -> tuple[int, ...]:
    _check(isinstance(data, list) and len(data) <= most, f"it is no list of at most {most} numbers")
    return tuple(map(_number, data))


def _texts(data: Any) -> tuple[str, ...]:
    _check(isinstance(data, list) and len(data) <= _MOST_KEYS, f"it is no list of at most {_MOST_KEYS} names")
    _check(all(isinstance(one, str) and len(one) <= _MOST_TEXT for one in data), "a name is no text, or a long one")
    return tuple(data)


def _path(data: Any) -> str:
    _check(isinstance(data, str) and len(data) <= _MOST_TEXT, "a class is named by a text")
    return data  # type: ignore[no-any-return]
