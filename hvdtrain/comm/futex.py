"""Sleep until another process says so, on a number that both see in shared memory: Linux's futex(2).

Who sleeps costs nothing, and is awake some ten microseconds after it is woken, however many processes there are.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys

#: of the system call, where it is known
_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}.get(platform.machine(), 0)
_HERE = sys.platform == "linux" and sys.byteorder == "little" and sys.maxsize > 1 << 32
_WAIT, _WAKE = 0, 1
_ALL = (1 << 31) - 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if _HERE and _NUMBER:
    _call = ctypes.CDLL(None, use_errno=True).syscall
    _call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_long,
    )
    _call.restype = ctypes.c_long


def wait(address: int, seen: int, seconds: float) -> bool:
    """Sleep until the 8-byte number at ``address`` is woken, or for ``seconds``; not at all if it is another than ``seen`` by now.

    False: there is no such thing here, and this returned at once.
    """
    if not (_HERE and _NUMBER):
        return False
    whole = int(seconds)
    limit = _Time(whole, int((seconds - whole) * 1e9))
    if _call(_NUMBER, address, _WAIT, seen & 0xFFFFFFFF, ctypes.addressof(limit), None, 0) == 0:
        return True
    return ctypes.get_errno() in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


def wake(address: int) -> None:
    """Wake all who sleep on the number at ``address``, which was changed before."""
    if _HERE and _NUMBER:
        _call(_NUMBER, address, _WAKE, _ALL, None, None, 0)
