"""Bytes a process has asked malloc for and not given back, exactly: what leaks, without what fragments."""

import ctypes
import xml.etree.ElementTree as ElementTree

_LIBC = ctypes.CDLL(None)
_LIBC.open_memstream.restype = ctypes.c_void_p
_LIBC.open_memstream.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)]
_LIBC.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
_LIBC.fclose.argtypes = _LIBC.free.argtypes = [ctypes.c_void_p]


def bytes_in_use() -> int:
    """Over all arenas of glibc's malloc; memory mapped past it (Python's small objects, files) is not counted."""
    text, length = ctypes.c_void_p(), ctypes.c_size_t()
    stream = _LIBC.open_memstream(ctypes.byref(text), ctypes.byref(length))
    _LIBC.malloc_info(0, stream)
    _LIBC.fclose(stream)
    totals = ElementTree.fromstring(ctypes.string_at(text, length.value))
    _LIBC.free(text)

    def size(kind: str) -> int:
        return sum(int(entry.get("size", 0)) for entry in totals.findall(kind))

    taken = size("system[@type='current']") + size("total[@type='mmap']")
    return taken - size("total[@type='fast']") - size("total[@type='rest']")
