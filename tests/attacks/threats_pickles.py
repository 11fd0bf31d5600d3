"""Pickles that carry code, or that hang, crash or fill whatever unpickles them."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from attacks.kit import FLOATS, Threat, archive, command, marker_in, number, table, tensor, text, threat

PICKLES: list[Threat] = []
_CODE = "opening it would run code from the file, so it was refused and nothing was run"


def _in_a_table(call: bytes) -> bytes:
    """The payload as a value beside an honest tensor."""
    return table((text(b"w"), tensor()), (text(b"x"), call))


def _reduce(folder: Path) -> bytes:
    return b"cposix\nsystem\n" + text(command(folder)) + b"\x85R"


def _build(folder: Path) -> bytes:
    # The first BUILD plants a __setstate__, the second calls it.
    return (
        b"ctypes\nSimpleNamespace\n)R}" + text(b"__setstate__") + b"cposix\nsystem\nsb" + text(command(folder)) + b"b"
    )


def _stack_global(folder: Path) -> bytes:
    return b"\x8c\x05posix\x8c\x06system\x93" + text(command(folder)) + b"\x85R"


def _inst(folder: Path) -> bytes:
    return b"(S'" + command(folder) + b"'\niposix\nsystem\n"


def _obj(folder: Path) -> bytes:
    # OBJ calls a class: one whose constructor runs a command.
    return b"(csubprocess\nPopen\n(l" + text(b"touch") + b"a" + text(str(marker_in(folder)).encode()) + b"ao"


def _evaluated(folder: Path) -> bytes:
    code = f"__import__('pathlib').Path({str(marker_in(folder))!r}).touch()"
    return b"cbuiltins\neval\n" + text(code.encode()) + b"\x85R"


def _by_getattr(folder: Path) -> bytes:
    # The function is never named as a whole: getattr(os, "system").
    return (
        b"cbuiltins\ngetattr\ncimportlib\nimport_module\n"
        + text(b"os")
        + b"\x85R"
        + text(b"system")
        + b"\x86R"
        + text(command(folder))
        + b"\x85R"
    )


def _as_key(folder: Path) -> bytes:
    return table((_reduce(folder), tensor()))


def _loadable(call: Callable[[Path], bytes]) -> Callable[[Path], bytes]:
    return lambda folder: b"\x80\x02" + call(folder) + b"."


for _name, _call, _words in (
    ("pickle: REDUCE calls os.system", _reduce, "asks for posix.system"),
    ("pickle: BUILD plants a __setstate__", _build, "asks for types.SimpleNamespace"),
    ("pickle: STACK_GLOBAL of protocol 4", _stack_global, "the instruction SHORT_BINUNICODE"),
    ("pickle: INST of protocol 0", _inst, "the instruction STRING"),
    ("pickle: OBJ of protocol 1", _obj, "asks for subprocess.Popen"),
    ("pickle: eval", _evaluated, "asks for builtins.eval"),
    ("pickle: a function found by getattr", _by_getattr, "asks for builtins.getattr"),
):

    def _make(folder: Path, call: Callable[[Path], bytes] = _call) -> Path:
        return archive(folder / "m.pt", _in_a_table(call(folder)))

    PICKLES.append(Threat(_name, _make, _words, _loadable(_call)))


@threat("pickle: code in the key of a tensor", "asks for posix.system", PICKLES, _loadable(_reduce))
def code_in_a_key(folder: Path) -> Path:
    return archive(folder / "m.pt", _as_key(folder))


@threat("pickle: no container at all", "a pickle outside the zip format", PICKLES, _loadable(_reduce))
def bare_pickle(folder: Path) -> Path:
    (folder / "m.bin").write_bytes(_loadable(_reduce)(folder))
    return folder / "m.bin"


@threat("legacy: magic number, then code", "a pickle outside the zip format", PICKLES, _loadable(_reduce))
def legacy_magic(folder: Path) -> Path:
    start = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    (folder / "m.pt").write_bytes(b"".join(start) + _loadable(_reduce)(folder) + pickle.dumps([], 2))
    return folder / "m.pt"


@threat("legacy: tar with pickles in it", "bytes of no known checkpoint format", PICKLES, _loadable(_reduce))
def legacy_tar(folder: Path) -> Path:
    with tarfile.open(folder / "m.pt", "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("sys_info", "storages", "tensors", "pickle"):
            content = _loadable(_reduce)(folder)
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return folder / "m.pt"


@threat("archive: TorchScript", "a TorchScript program; " + _CODE, PICKLES, _loadable(_reduce))
def torchscript(folder: Path) -> Path:
    payload = b"\x80\x02c__torch__\nModel\n)\x81}b."
    more = {"constants.pkl": _loadable(_reduce)(folder), "code/__torch__.py": b"import os"}
    return archive(folder / "m.pt", payload, more)


@threat("archive: a zip where the table should be", "no valid pickle", PICKLES, _loadable(_reduce))
def nested_archive(folder: Path) -> Path:
    inner = archive(folder / "inner.pt", _in_a_table(_reduce(folder))).read_bytes()
    return archive(folder / "m.pt", inner)


@threat("text: an escape that Python warns of", "no valid pickle", PICKLES)
def unknown_escape(folder: Path) -> Path:
    return archive(folder / "m.pt", b"S'\\s'\n.")


@threat("text: an escape of what cannot be printed", "no valid pickle: invalid escape sequence", PICKLES)
def unprintable_escape(folder: Path) -> Path:
    return archive(folder / "m.pt", b"S'\\\x80'\n.")


@threat("archive: a whole checkpoint as one record", None, PICKLES, _loadable(_reduce))
def inner_checkpoint(folder: Path) -> Path:
    inner = archive(folder / "inner.pt", _in_a_table(_reduce(folder))).read_bytes()
    return archive(folder / "m.pt", table((text(b"w"), tensor())), {"inner.pt": inner, "evil.pkl": inner})


@threat("archive: two tables, one of them with code", "two records have the same name", PICKLES, _loadable(_reduce))
def second_table(folder: Path) -> Path:
    path = archive(folder / "m.pt", table((text(b"w"), tensor())))
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("m/DATA.PKL", _in_a_table(_reduce(folder)))
    return path


@threat("persistent id: a module instead of a storage", "not a storage", PICKLES)
def persistent_module(folder: Path) -> Path:
    place = b"(" + text(b"module") + text(b"os") + text(b"source.py") + text(b"import os") + b"tQ"
    return archive(folder / "m.pt", table((text(b"w"), tensor()), (text(b"x"), place)))


@threat("persistent id: a storage larger than its record", "and there are 16 bytes", PICKLES)
def storage_too_large(folder: Path) -> Path:
    """Memory-mapped, it would read on into the next record."""
    return archive(folder / "m.pt", table((text(b"w"), tensor(count=400))), {"data/1": FLOATS * 1000})


@threat("persistent id: a path as key", "and there are none", PICKLES)
def storage_elsewhere(folder: Path) -> Path:
    return archive(folder / "m.pt", table((text(b"w"), tensor(key=b"../../version"))))


@threat("allowed by torch: a bytearray of 100 GB", "asks for __builtin__.bytearray", PICKLES)
def large_bytearray(folder: Path) -> Path:
    return archive(folder / "m.pt", _in_a_table(b"c__builtin__\nbytearray\n" + number(10**11) + b"\x85R"))


@threat("allowed by torch: an empty tensor of 4 TB", "asks for torch.FloatTensor", PICKLES)
def large_tensor(folder: Path) -> Path:
    return archive(folder / "m.pt", _in_a_table(b"ctorch\nFloatTensor\n" + number(10**12) + b"\x85R"))


@threat("allowed by torch: any function by _rebuild_from_type_v2", "asks for torch.storage.UntypedStorage", PICKLES)
def by_type(folder: Path) -> Path:
    call = (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch.storage\nUntypedStorage\nctorch\nTensor\n"
        + number(10**12)
        + b"\x85}tR"
    )
    return archive(folder / "m.pt", _in_a_table(call))


@threat("allowed by torch: attributes that hide the methods of a dict", None, PICKLES)
def hidden_methods(folder: Path) -> Path:
    names = (b"get", b"items", b"values", b"keys", b"__iter__")
    state = b"}(" + b"".join(text(name) + b"ccollections\nOrderedDict\n" for name in names) + b"ub"
    inside = b"ccollections\nOrderedDict\n)R" + text(b"w") + tensor() + b"s" + state
    return archive(folder / "m.pt", b"\x80\x02" + inside + b".")


@threat("allowed by torch: attributes that hide the methods of a tensor", None, PICKLES)
def hidden_tensor_methods(folder: Path) -> Path:
    names = (b"detach", b"numel", b"resolve_conj", b"to", b"contiguous")
    state = b"}(" + b"".join(text(name) + b"ccollections\nOrderedDict\n" for name in names) + b"u"
    call = (
        b"ctorch._utils\n_rebuild_parameter_with_state\n("
        + tensor()
        + b"\x89ccollections\nOrderedDict\n)R"
        + state
        + b"tR"
    )
    return archive(folder / "m.pt", table((text(b"w"), call)))


def _doubled(levels: int) -> bytes:
    """A tuple of a tuple twice, of a tuple twice, ...: each one is hashed twice by the next."""
    return b"K\x01" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(levels))


@threat("time: a key that takes 2 ** 60 steps to hash", "too long to hash", PICKLES)
def slow_key(folder: Path) -> Path:
    return archive(folder / "m.pt", table((text(b"w"), tensor()), (_doubled(60), b"N")))


@threat("crash: tuples nested a million deep", "nested more than 100 deep", PICKLES)
def deep_key(folder: Path) -> Path:
    return archive(folder / "m.pt", table((text(b"w"), tensor()), (b"K\x01" + b"\x85" * 10**6, b"N")))


@threat("crash: pairs nested a hundred thousand deep on one side", "nested more than 100 deep", PICKLES)
def lopsided_key(folder: Path) -> Path:
    pairs = b"K\x01" + b"K\x01\x86" * 10**5
    return archive(folder / "m.pt", table((text(b"w"), tensor()), (pairs, b"N")))


@threat("memory: a value numbered four billion", "more than it can have", PICKLES)
def large_memo(folder: Path) -> Path:
    return archive(folder / "m.pt", _in_a_table(b"Nr\xff\xff\xff\xff"))


@threat("memory: a text of four gigabytes that is not there", "no valid pickle", PICKLES)
def missing_text(folder: Path) -> Path:
    return archive(folder / "m.pt", b"\x80\x02X\xff\xff\xff\xff.")


@threat("memory: a table of 17 MB", "too many to be a table", PICKLES)
def large_table(folder: Path) -> Path:
    return archive(folder / "m.pt", b"\x80\x02" + b"]" * (17 * 2**20) + b".")


@threat("shape: a terabyte in strides of zero", "with more data than the whole file", PICKLES)
def strided_terabyte(folder: Path) -> Path:
    shape, stride = number(10**12) + b"\x85", b"K\x00\x85"
    return archive(folder / "m.pt", table((text(b"w"), tensor(shape=shape, stride=stride))))


@threat("shape: three hundred names for more than the file", "times as many bytes of tensors as the file has", PICKLES)
def many_names(folder: Path) -> Path:
    shape, stride = number(100_000) + b"\x85", b"K\x00\x85"
    pairs = [(text(b"w%d" % k), tensor(shape=shape, stride=stride)) for k in range(300)]
    return archive(folder / "m.pt", table(*pairs), {"padding": b"\0" * 400_000})


@threat("shape: more than its storage", "cannot read as weights", PICKLES)
def beyond_the_storage(folder: Path) -> Path:
    return archive(folder / "m.pt", table((text(b"w"), tensor(shape=b"K\x05\x85"))))


@threat("shape: negative", "cannot read as weights", PICKLES)
def negative_shape(folder: Path) -> Path:
    return archive(folder / "m.pt", table((text(b"w"), tensor(shape=number(-4) + b"\x85"))))


@threat("shape: a product that overflows", "cannot read as weights", PICKLES)
def overflowing_shape(folder: Path) -> Path:
    shape = number(2**32) + number(2**32) + b"\x86"
    return archive(folder / "m.pt", table((text(b"w"), tensor(shape=shape, stride=number(2**32) + b"K\x01\x86"))))


@threat("name: bytes that are no text", "cannot read as weights", PICKLES)
def bytes_as_name(folder: Path) -> Path:
    return archive(folder / "m.pt", table((text(b"w"), tensor()), (b"U\x02\xff\xfe", tensor())))


@threat("name: half of a surrogate pair", "expected names of tensors that are valid text", PICKLES)
def surrogate_name(folder: Path) -> Path:
    return archive(folder / "m.pt", table((text("w\ud800".encode("utf-8", "surrogatepass")), tensor())))


@threat("name: a storage, whose text would list all of its numbers", None, PICKLES)
def storage_as_name(folder: Path) -> Path:
    place = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + number(4) + b"tQ"
    return archive(folder / "m.pt", table((text(b"w"), tensor()), (place, b"N")))


@threat("pickle: a protocol that does not exist", "protocol 34", PICKLES)
def future_protocol(folder: Path) -> Path:
    return archive(folder / "m.pt", b"\x80\x22" + table((text(b"w"), tensor()))[2:])


@threat("time: a table that contains itself", None, PICKLES)
def circular_table(folder: Path) -> Path:
    inside = b"}q\x00(" + text(b"w") + tensor() + text(b"again") + b"h\x00u"
    return archive(folder / "m.pt", b"\x80\x02" + inside + b".")


@threat("time: a text that takes for ever to encode", "encodes bytes in another way", PICKLES)
def slow_codec(folder: Path) -> Path:
    long = text("".join(chr(0x4E00 + k % 20_000) for k in range(200_000)).encode())
    return archive(folder / "m.pt", _in_a_table(b"c_codecs\nencode\n" + long + text(b"punycode") + b"\x86R"))
