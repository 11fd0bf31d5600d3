"""What a file of torch.save may ask for, and whether its storages are as large as it says.

Shorter than torch's own list, which lets a file call what allocates any amount of memory (`bytearray`, `FloatTensor`,
`UntypedStorage`), and independent of what the process has allowed with `add_safe_globals`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stockpot.pool.pickles import Allowed, PickleError, check_pickle

_STORAGES: dict[str, int] = {  # size of one element in bytes
    **{
        f"torch.{kind}Storage": dtype.itemsize
        for kind, dtype in {
            "Double": torch.float64,
            "Float": torch.float32,
            "Half": torch.float16,
            "BFloat16": torch.bfloat16,
            "Long": torch.int64,
            "Int": torch.int32,
            "Short": torch.int16,
            "Char": torch.int8,
            "Byte": torch.uint8,
            "Bool": torch.bool,
            "ComplexFloat": torch.complex64,
            "ComplexDouble": torch.complex128,
            "QInt8": torch.int8,
            "QUInt8": torch.uint8,
            "QInt32": torch.int32,
        }.items()
    },
    "torch.storage.UntypedStorage": 1,
}
_CALLED = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "_codecs.encode",  # bytes
        "builtins.set",
        "__builtin__.set",
        "builtins.complex",
        "__builtin__.complex",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        # What follows cannot be mixed, but is loaded so that the error can name the tensor.
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_meta_tensor_no_storage",
        "torch._tensor._rebuild_from_type_v2",
    }
)
_DTYPES = {str(value) for value in vars(torch).values() if isinstance(value, (torch.dtype, torch.qscheme))}
_ALLOWED = Allowed(
    known=frozenset({*_CALLED, *_STORAGES, *_DTYPES, "torch.Tensor", "torch.nn.parameter.Parameter"}),
    called=_CALLED,
    built=frozenset({"collections.OrderedDict"}),  # a state dict carries its version in an attribute
)


def check_table(table: bytes, sizes: Mapping[str, int]) -> None:
    """Raise PickleError where the table of tensors asks for anything else, or for bytes its storages do not have."""
    for place in check_pickle(table, _ALLOWED):
        if len(place) != 5 or place[0] != "storage":
            raise PickleError("it refers to something that is not a storage")
        _, kind, key, _, count = place
        if not isinstance(kind, str) or not isinstance(key, str) or not isinstance(count, int):
            raise PickleError("it refers to a storage in an unknown form")
        if kind not in _STORAGES:
            raise PickleError(f"it refers to a storage of the unknown type {kind!r}")
        if sizes.get(key) != count * _STORAGES[kind]:
            found = f"{sizes[key]:,} bytes" if key in sizes else "none"
            raise PickleError(
                f"it says storage {key!r} has {count * _STORAGES[kind]:,} bytes, and there are {found}"
            )
