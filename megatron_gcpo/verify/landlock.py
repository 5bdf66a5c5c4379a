"""Landlock: a process gives up every part of the file system but the folders it names (Linux 5.13 and newer).

It needs no privilege. Here the named folders may be read; nothing may be written, created, removed or executed. Newer
kernels also take away TCP and signals to processes outside.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of low bits the kernel knows
_TCP_RIGHTS, _SCOPES = 0b11, 0b11


def ruleset(readable: Iterable[str]) -> int | None:
    """A descriptor of rules that leave only these files and folders readable; None where the kernel has no Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE, None, 0, _VERSION_FLAG)
    if version < 1:
        return None
    rights = (1 << _FILE_RIGHTS_BY_VERSION[min(version, 5)]) - 1
    attributes = struct.pack("Q", rights)
    if version >= 4:
        attributes += struct.pack("Q", _TCP_RIGHTS)
    if version >= 6:
        attributes += struct.pack("Q", _SCOPES)
    rules = libc.syscall(_CREATE, ctypes.c_char_p(attributes), len(attributes), 0)
    if rules < 0:
        return None
    for path in readable:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        rule = struct.pack("=Qi", _READ_FILE | (_READ_DIR if is_folder else 0), fd)
        libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, ctypes.c_char_p(rule), 0)
        os.close(fd)
    return rules


def restrict(rules: int) -> bool:
    """Put the calling (single-threaded) process under the rules, for good. Needs no_new_privs or CAP_SYS_ADMIN."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_RESTRICT, rules, 0) == 0
