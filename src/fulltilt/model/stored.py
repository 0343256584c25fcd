"""Parameters that stay in a model's files until it is known which part of each a worker needs.

Enters: a call of transformers that loads a model, inside `left_in_files`. Leaves: the same model, whose parameters are on the meta device,
and `StoredWeights`, which reads any stretch of any of them into given memory. Guaranteed: the numbers are those that transformers would
have loaded, to the bit, whatever it renames, stacks, joins or rounds while it loads; a stretch is read without the rest of its tensor if
files hold the tensor itself, or the ones it is stacked or joined from; any other tensor is in memory as a whole for a moment. Buffers are
real. Files are mapped into memory, so their pages are shared by all processes of a machine.

transformers loads a model from objects that stand for the tensors of its files. Here these are `StoredTensor`s: they have shape and type,
and record transformers' operations instead of executing them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

WEIGHTS = "fulltilt_stored_weights"  # attribute of a model whose parameters are in its files
READ_WHOLE = "fulltilt_read_whole"  # attribute of a model that was read whole: the reason, if its parameters should be in the files
Box = tuple[range, ...]  # the numbers of a tensor to read: one range of consecutive indices for each dimension
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class NotSliceable(Exception):
    """The files cannot be read in parts, for this reason; the model can only be loaded whole."""


# ---- tensors that record their operations ------------------------------------------------------------------------------------------------


class StoredTensor(torch.Tensor):
    """Shape and type of a tensor in files, or computed from such tensors, and the way to read its numbers."""

    recipe: Recipe

    @staticmethod
    def of(like: torch.Tensor, recipe: Recipe) -> StoredTensor:
        """Make one with the shape and type of `like`, any tensor of the meta device."""
        found: Any = torch.Tensor._make_subclass(StoredTensor, torch.empty(like.shape, dtype=like.dtype, device="meta"))
        found.recipe = recipe
        return found  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func is torch.Tensor.to:
            dtype = kwargs.get("dtype") or next((each for each in args[1:] if isinstance(each, torch.dtype)), first.dtype)
            return StoredTensor.of(torch.empty(first.shape, dtype=dtype, device="meta"), Rounded(first, dtype))
        if func in (torch.Tensor.detach, torch.Tensor.contiguous) or (func is torch.Tensor.__getitem__ and args[1] is Ellipsis):
            return StoredTensor.of(first, first.recipe)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if found is first or not holds_tensor(found):
            return found
        if func in (torch.cat, torch.stack):
            tensors = tuple(kwargs.get("tensors", first))
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % found.ndim
            return StoredTensor.of(found, (Joined if func is torch.cat else Stacked)(tensors, dim))
        if isinstance(found, torch.Tensor):
            return StoredTensor.of(found, Computed(func, args, kwargs))
        return type(found)(StoredTensor.of(each, Computed(func, args, kwargs, place)) for place, each in enumerate(found))

    def copy_into(self, target: torch.Tensor, box: Box) -> None:
        """Fill memory with the shape of the box with these numbers, rounded to this tensor's type and then to the memory's."""
        self.recipe.copy_into(target, box)

    def whole(self) -> torch.Tensor:
        found = torch.empty(self.shape, dtype=self.dtype)
        self.copy_into(found, everything(self.shape))
        return found


def holds_tensor(found: Any) -> bool:
    return isinstance(found, torch.Tensor) or (isinstance(found, tuple | list) and any(isinstance(each, torch.Tensor) for each in found))


def everything(shape: Sequence[int]) -> Box:
    return tuple(map(range, shape))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in box)


def put(target: torch.Tensor, numbers: torch.Tensor) -> None:
    """Copy numbers into memory. Rounding happens on the host, or a device would hold the numbers in both types."""
    target.copy_(numbers if target.device == numbers.device else numbers.to(target.dtype))


@dataclass(frozen=True, eq=False)
class Recipe:
    """A way to read the numbers of a tensor."""

    def copy_into(self, target: torch.Tensor, box: Box) -> None:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class InFile(Recipe):
    """A tensor that is in a file as it is. `get` returns an object that gives a stretch of it, such as a slice of safetensors or a mapped
    tensor."""

    get: Callable[[], Any]

    def copy_into(self, target: torch.Tensor, box: Box) -> None:
        put(target, self.get()[slices(box) if box else ...])


@dataclass(frozen=True, eq=False)
class Rounded(Recipe):
    """Another tensor, rounded to a type."""

    source: StoredTensor
    dtype: torch.dtype

    def copy_into(self, target: torch.Tensor, box: Box) -> None:
        if target.dtype == self.dtype:
            self.source.copy_into(target, box)
            return
        rounded = torch.empty(target.shape, dtype=self.dtype)
        self.source.copy_into(rounded, box)
        put(target, rounded)


@dataclass(frozen=True, eq=False)
class Stacked(Recipe):
    """Tensors of the same shape, stacked along a new dimension."""

    sources: Sequence[StoredTensor]
    dim: int

    def copy_into(self, target: torch.Tensor, box: Box) -> None:
        inner = (*box[: self.dim], *box[self.dim + 1 :])
        for place, number in enumerate(box[self.dim]):
            self.sources[number].copy_into(target.select(self.dim, place), inner)


@dataclass(frozen=True, eq=False)
class Joined(Recipe):
    """Tensors concatenated along a dimension."""

    sources: Sequence[StoredTensor]
    dim: int

    def copy_into(self, target: torch.Tensor, box: Box) -> None:
        begin, wanted = 0, box[self.dim]
        for source in self.sources:
            end = begin + source.shape[self.dim]
            start, stop = max(begin, wanted.start), min(end, wanted.stop)
            if start < stop:
                inner = (*box[: self.dim], range(start - begin, stop - begin), *box[self.dim + 1 :])
                source.copy_into(target.narrow(self.dim, start - wanted.start, stop - start), inner)
            begin = end


@dataclass(frozen=True, eq=False)
class Computed(Recipe):
    """The result of any other function of whole tensors."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    place: int | None = None  # index among several results; None: there is one

    def copy_into(self, target: torch.Tensor, box: Box) -> None:
        found = self.func(*map(with_numbers, self.args), **{name: with_numbers(each) for name, each in self.kwargs.items()})
        put(target, (found if self.place is None else found[self.place])[slices(box)])


def with_numbers(given: Any) -> Any:
    if isinstance(given, StoredTensor):
        return given.whole()
    return type(given)(map(with_numbers, given)) if isinstance(given, tuple | list) else given


# ---- a model without memory -------------------------------------------------------------------------------------------------------------


class StoredWeights:
    """The parameters of a model, by the names that they had when it was loaded, and the device on which they are wanted."""

    def __init__(self, device: torch.device, tensors: dict[str, StoredTensor], source: str, key: str) -> None:
        self.device, self.tensors, self.source, self.key = device, tensors, source, key

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredWeights:
        return self  # a copy of the model reads the same files


def stored_weights(model: Any) -> StoredWeights | None:
    """Return where to read the parameters of a model, or of the body of a critic or reward model; None: they are loaded."""
    found: StoredWeights | None = getattr(getattr(model, "body", model), WEIGHTS, None)
    return found


def release(model: Any, *, files: bool = True) -> None:
    """Forget where the parameters of a model are stored, since it has them now. `files`: close the files, too, which copies of the model
    share: an open file takes disk space even after it is deleted."""
    body = getattr(model, "body", model)
    if WEIGHTS in vars(body):
        if files:
            getattr(body, WEIGHTS).tensors.clear()
        delattr(body, WEIGHTS)


@contextlib.contextmanager
def left_in_files() -> Iterator[None]:
    """Give models that transformers loads inside `StoredTensor`s as parameters. Call `take_out` on each."""
    own = PreTrainedModel._load_pretrained_model

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        if state_dict is not None or not checkpoint_files:
            raise NotSliceable("transformers found no files of weights")
        return own(model, tensors_of(checkpoint_files), checkpoint_files, load_config, *args, **kwargs)

    PreTrainedModel._load_pretrained_model = staticmethod(load)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(own)  # type: ignore[method-assign]


def tensors_of(files: Sequence[str]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in files:
        found |= tensors_of_safetensors(file) if file.endswith(".safetensors") else tensors_of_pickle(file)
    return found


def tensors_of_safetensors(file: str) -> dict[str, StoredTensor]:
    opened, found = safe_open(file, framework="pt"), dict[str, StoredTensor]()
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        if (dtype := TYPES.get(part.get_dtype())) is None:
            raise NotSliceable(f"{name} has numbers of the type {part.get_dtype()}")
        like = torch.empty(part.get_shape(), dtype=dtype, device="meta")
        found[name] = StoredTensor.of(like, InFile(lambda name=name: opened.get_slice(name)))  # type: ignore[misc]
    return found


def tensors_of_pickle(file: str) -> dict[str, StoredTensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:  # the file has the format of torch before 1.6
        raise NotSliceable(f"{file} has a format that cannot be mapped into memory") from error
    return {
        name: StoredTensor.of(torch.empty_like(own, device="meta"), InFile(lambda own=own: own))  # type: ignore[misc]
        for name, own in tensors.items()
        if isinstance(own, torch.Tensor)
    }


@torch.no_grad()
def take_out(model: PreTrainedModel, device: torch.device, source: str, key: str) -> None:
    """Give a model that was loaded inside `left_in_files` plain parameters on the meta device and buffers on the given one, and record
    where its parameters are stored. `source`, `key`: the folder, and the setting that names it, for messages."""
    tie_equal(model)
    tensors: dict[str, StoredTensor] = {}
    plain: dict[int, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for leaf, own in list(module.named_parameters(recurse=False)):
            if isinstance(own, StoredTensor):
                tensors[f"{prefix}.{leaf}" if prefix else leaf] = own
                without = torch.empty(own.shape, dtype=own.dtype, device="meta")
                setattr(module, leaf, plain.setdefault(id(own), torch.nn.Parameter(without, requires_grad=own.requires_grad)))
        for leaf, buffer in module.named_buffers(recurse=False):
            module._buffers[leaf] = (buffer.whole() if isinstance(buffer, StoredTensor) else buffer).to(device)
    setattr(model, WEIGHTS, StoredWeights(device, tensors, source, key))


def tie_equal(model: Any) -> None:
    """Tie tied tensors that files hold twice. transformers ties them if they are equal, but does not compare tensors without memory."""
    for target, source in list(getattr(model, "all_tied_weights_keys", {}).items()):
        one, other = model.get_parameter(target), model.get_parameter(source)
        if one is other or not (isinstance(one, StoredTensor) and isinstance(other, StoredTensor)):
            continue
        if one.shape == other.shape and torch.equal(one.whole(), other.whole()):
            home, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(home), leaf, other)
        else:
            model.all_tied_weights_keys.pop(target)


@contextlib.contextmanager
def standing_in(model: torch.nn.Module) -> Iterator[None]:
    """Give parameters that are in files a device, a type, and one number of memory inside the context: for code that creates tensors beside
    them."""
    stored = stored_weights(model)
    if stored is None:
        yield
        return
    made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}  # replacements, by the parameter that is replaced
    for module in model.modules():
        for leaf, own in list(module.named_parameters(recurse=False)):
            if own.is_meta:
                number = torch.zeros((), dtype=own.dtype, device=stored.device).expand(own.shape)
                made.setdefault(id(own), (own, torch.nn.Parameter(number, requires_grad=own.requires_grad)))
                module._parameters[leaf] = made[id(own)][1]
    try:
        yield
    finally:
        originals = {id(other): own for own, other in made.values()}
        for own, other in made.values():
            own.requires_grad_(other.requires_grad)
        for module in model.modules():
            for leaf, given in list(module.named_parameters(recurse=False)):
                module._parameters[leaf] = originals.get(id(given), given)
