"""A system-call filter for code that may compute, read files and write to descriptors it holds, and nothing else.

Everything not listed fails with EPERM: no sockets, no new processes or threads, no signals to anyone, nothing opened
for writing, removed, renamed or created, no ptrace, no namespaces, no io_uring. It needs no privilege, works in
containers, and can not be taken off again (Linux seccomp, mode 2). Numbers: Linux system call tables of x86-64, arm64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

# Classic BPF opcodes: load a 32-bit word of seccomp_data, compare, mask, return.
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _AND, _RETURN = 0x20, 0x15, 0x25, 0x54, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_AT_NUMBER, _AT_ARCH, _AT_ARGUMENT = 0, 4, 16

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_PLAIN: dict[str, tuple[int | None, int | None]] = {
    # name: (x86-64, arm64)
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293),
    "close_range": (436, 436),
    "faccessat2": (439, 439),
}

# Allowed only when (argument & mask) is one of the values. Opening: no bit of WRONLY, RDWR, CREAT, TRUNC, APPEND or
# TMPFILE. fcntl: duplicating and flags, because F_SETOWN would send signals. prlimit: this process only.
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | 0o20000000
_CHECKED: dict[str, tuple[int | None, int | None, int, int, tuple[int, ...]]] = {
    # name: (x86-64, arm64, argument, mask, values)
    "open": (2, None, 1, _WRITE_FLAGS, (0,)),
    "openat": (257, 56, 2, _WRITE_FLAGS, (0,)),
    "fcntl": (72, 25, 1, 0xFFFFFFFF, (0, 1, 2, 3, 1030)),
    "prlimit64": (302, 261, 0, 0xFFFFFFFF, (0,)),
}


def program() -> bytes | None:
    """The filter as classic BPF for this processor; None where its system call numbers are not known."""
    machine = platform.machine()
    if machine not in _ARCHES:
        return None
    column = list(_ARCHES).index(machine)
    ops = [
        (_LOAD, 0, 0, _AT_ARCH),
        (_JUMP_EQUAL, 1, 0, _ARCHES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER),
    ]
    if machine == "x86_64":  # the x32 calls carry this bit and would slip past comparisons
        ops += [(_JUMP_ABOVE, 0, 1, 0x3FFFFFFF), (_RETURN, 0, 0, _FAIL)]
    for numbers in _PLAIN.values():
        number = numbers[column]
        if number is not None:
            ops += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for *numbers, argument, mask, values in _CHECKED.values():
        number = numbers[column]
        if number is None:
            continue
        check = [(_LOAD, 0, 0, _AT_ARGUMENT + 8 * argument), (_AND, 0, 0, mask)]
        for value in values:
            check += [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
        check += [(_RETURN, 0, 0, _FAIL)]
        ops += [(_JUMP_EQUAL, 0, len(check), number), *check]
    ops += [(_RETURN, 0, 0, _FAIL)]
    return b"".join(struct.pack("HBBI", *op) for op in ops)


def install(filter_program: bytes) -> bool:
    """Put the calling (single-threaded) process under the filter, for good; False where the kernel has no seccomp.

    Needs no_new_privs or CAP_SYS_ADMIN.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(filter_program, len(filter_program))
    # struct sock_fprog: a 16-bit count, padding, a pointer.
    header = struct.pack("HxxxxxxP", len(filter_program) // 8, ctypes.addressof(buffer))
    libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_ulong)
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0
