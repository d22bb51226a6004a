"""The settings of the MPI library that is loaded, by its own account: control variables of MPI_T (MPI 4.1, chapter 15).

Integers (with the names of enumerated values) and strings are read, which is what Open MPI's are; integers are written.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from commbench.provenance.sources import ROOT, read

_LIBRARY = re.compile(r"/libmpi(?:cxx)?\.so[\w.]*$")
_SUCCESS = 0
_MOST_NAME = 1024
_MOST_VALUE = 4096


def find_mpi_library(root: Path = ROOT) -> str | None:
    """The file of the MPI library that is mapped into this process, or None."""
    lines = (read(root, "proc/self/maps") or "").splitlines()
    paths = [fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6]
    return next((path for path in paths if _LIBRARY.search(path)), None)


class MpiVariables:
    """Control variables by name. Works only where the handles of MPI are pointers, as Open MPI's are.

    Raises OSError where the library cannot be asked.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        if not hasattr(self._library, "MPI_T_init_thread"):
            raise OSError(f"{path} has no MPI_T")
        self._check(self._library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int())))

    def close(self) -> None:
        """Give back what was taken; once, when nothing is to be read any more."""
        self._library.MPI_T_finalize()

    def read(self, name: str) -> str | None:
        """The value as text, the item's name for an enumerated one; None for a variable that there is not."""
        index = ctypes.c_int()
        if self._library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)) != _SUCCESS:
            return None
        with self._handle(index) as (handle, count):
            memory = ctypes.create_string_buffer(max(_MOST_VALUE, 8 * count))
            self._check(self._library.MPI_T_cvar_read(handle, memory))
        if count > 1:
            return memory.value.decode(errors="replace")
        value = ctypes.c_int.from_buffer(memory).value
        return next((item for number, item in self._items(index) if number == value), str(value))

    def write(self, name: str, value: str) -> None:
        """Set an integer, by its item's name where it is enumerated; nothing happens where there is no such item.

        Raises OSError for a variable that there is not or that cannot be set.
        """
        index = ctypes.c_int()
        self._check(self._library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)))
        numbers = [number for number, item in self._items(index) if item == value]
        if value.isdigit():
            numbers.append(int(value))
        if numbers:
            with self._handle(index) as (handle, _):
                self._check(self._library.MPI_T_cvar_write(handle, ctypes.byref(ctypes.c_int(numbers[0]))))

    def names(self, pattern: str) -> tuple[str, ...]:
        """The variables whose whole name matches a regular expression."""
        count = ctypes.c_int()
        self._check(self._library.MPI_T_cvar_get_num(ctypes.byref(count)))
        wanted = re.compile(pattern)
        found = (self._information(ctypes.c_int(index))[0] for index in range(count.value))
        return tuple(name for name in found if name is not None and wanted.fullmatch(name))

    def _information(self, index: ctypes.c_int) -> tuple[str | None, ctypes.c_void_p]:
        """The name (None for a variable that is not there any more) and the enumeration, or a null pointer."""
        name, length = ctypes.create_string_buffer(_MOST_NAME), ctypes.c_int(_MOST_NAME)
        kind, items = ctypes.c_void_p(), ctypes.c_void_p()
        nothing = ctypes.c_int(0)
        verbosity, bind, scope = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        code = self._library.MPI_T_cvar_get_info(
            index, name, ctypes.byref(length), ctypes.byref(verbosity), ctypes.byref(kind), ctypes.byref(items), None,
            ctypes.byref(nothing), ctypes.byref(bind), ctypes.byref(scope),
        )  # fmt: skip
        return (name.value.decode(errors="replace") if code == _SUCCESS else None), items

    @contextmanager
    def _handle(self, index: ctypes.c_int) -> Iterator[tuple[ctypes.c_void_p, int]]:
        handle, count = ctypes.c_void_p(), ctypes.c_int()
        self._check(self._library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)))
        try:
            yield handle, count.value
        finally:
            self._library.MPI_T_cvar_handle_free(ctypes.byref(handle))

    def _items(self, index: ctypes.c_int) -> list[tuple[int, str]]:
        """The values of an enumerated variable with their names; none of another."""
        _, items = self._information(index)
        if not items.value:
            return []
        count, length = ctypes.c_int(), ctypes.c_int(_MOST_NAME)
        name = ctypes.create_string_buffer(_MOST_NAME)
        self._check(self._library.MPI_T_enum_get_info(items, ctypes.byref(count), name, ctypes.byref(length)))
        found = []
        for item in range(count.value):
            number, length = ctypes.c_int(), ctypes.c_int(_MOST_NAME)
            self._check(
                self._library.MPI_T_enum_get_item(items, item, ctypes.byref(number), name, ctypes.byref(length))
            )
            found.append((number.value, name.value.decode(errors="replace")))
        return found

    @staticmethod
    def _check(code: int) -> None:
        if code != _SUCCESS:
            raise OSError(f"MPI_T refuses with error {code}")


OPEN_MPI_PREFIX = "OMPI_MCA_"
NO_SUCH_SETTING = "(this Open MPI has no such setting)"


def read_settings(asked: Iterable[str]) -> dict[str, str]:
    """What the MPI library that is loaded says of its settings, of those of Open MPI's that are among the environment
    variables ``asked``; nothing where none is loaded, or where it cannot be asked. For a library that has started."""
    names = [name.removeprefix(OPEN_MPI_PREFIX) for name in asked if name.startswith(OPEN_MPI_PREFIX)]
    path = find_mpi_library() if names else None
    if path is None:
        return {}
    try:
        variables = MpiVariables(path)
    except OSError:
        return {}
    found = {name: variables.read(name) for name in names}
    variables.close()
    return {name: NO_SUCH_SETTING if value is None else value for name, value in found.items()}
