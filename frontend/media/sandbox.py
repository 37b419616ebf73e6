"""A cage for a process that reads strangers' files: after `enter`, it opens no connection and no file for writing, starts no
program, and traces or signals no other process.

It uses no_new_privs and a seccomp filter, which containers allow, unlike most namespaces. The filter is a list of system calls
that fail with EPERM, so that libraries go on; it holds for all threads. A process cannot leave it. x86-64 and AArch64 only.
"""

import ctypes
import os
import platform
import struct

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _TSYNC = 1, 1
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# Classic BPF: load a word of seccomp_data, compare, return.
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_THREAD = 0x00010000

# name: number on x86-64, number on AArch64; None where there is no such call
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "connect": (42, 203), "execve": (59, 221), "execveat": (322, 281), "fork": (57, None),
    "vfork": (58, None), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kill": (62, 129), "tkill": (200, 130), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "rt_sigqueueinfo": (129, 138), "creat": (85, None), "truncate": (76, 45),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35),
    "symlink": (88, None), "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "mknod": (133, None),
    "mknodat": (259, 33), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "utimensat": (280, 88),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "init_module": (175, 105),
    "finit_module": (313, 273), "kexec_load": (246, 104), "open_by_handle_at": (304, 265), "memfd_secret": (447, 447),
}  # fmt: skip
# A filter cannot read the arguments of these calls: libraries then use the older call.
_UNKNOWN: dict[str, tuple[int, int]] = {
    "openat2": (437, 437),
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_OPEN, _OPENAT, _CLONE, _SECCOMP = (2, None), (257, 56), (56, 220), (317, 277)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


class SandboxError(OSError):
    """This machine does not allow the sandbox."""


def enter() -> None:
    """Enter it, with all threads. Raises SandboxError; the process goes on as before then."""
    if (machine := _MACHINES.get(platform.machine())) is None:
        raise SandboxError(f"there is no list of system calls for {platform.machine()}")
    index, arch = machine
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise SandboxError(ctypes.get_errno(), "no_new_privs")
    program = _program(index, arch)
    lines = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    described = ctypes.create_string_buffer(struct.pack("@HxxxxxxQ", len(program), ctypes.addressof(lines)))
    number = ctypes.c_long(_SECCOMP[index])
    libc.syscall.restype = ctypes.c_long
    if libc.syscall(number, ctypes.c_long(_SECCOMP_SET_MODE_FILTER), ctypes.c_long(_TSYNC), described) != 0:
        raise SandboxError(ctypes.get_errno(), "seccomp")


def _program(index: int, arch: int) -> list[bytes]:
    """The filter's instructions. Each test is followed by what it returns, so that no jump is longer than a few lines."""
    refuse, unknown = _ERRNO | _EPERM, _ERRNO | _ENOSYS
    lines = [_line(_LOAD, _ARCH), _line(_EQUAL, arch, 1, 0), _line(_RETURN, refuse), _line(_LOAD, _NUMBER)]
    if index == 0:
        lines += [_line(_AT_LEAST, _X32, 0, 1), _line(_RETURN, refuse)]
    for numbers, answer in ((_REFUSED, refuse), (_UNKNOWN, unknown)):
        for each in numbers.values():  # type: ignore[attr-defined]
            if (number := each[index]) is not None:
                lines += [_line(_EQUAL, number, 0, 1), _line(_RETURN, answer)]
    lines += _by_argument(_OPEN[index], 1, _WRITES, refuse_if_set=True)
    lines += _by_argument(_OPENAT[index], 2, _WRITES, refuse_if_set=True)
    lines += _by_argument(_CLONE[index], 0, _CLONE_THREAD, refuse_if_set=False)
    return [*lines, _line(_RETURN, _ALLOW)]


def _by_argument(number: int | None, argument: int, bits: int, refuse_if_set: bool) -> list[bytes]:
    """Allow or refuse one call by bits of an argument."""
    if number is None:
        return []
    if_set, if_clear = (1, 0) if refuse_if_set else (0, 1)
    return [
        _line(_EQUAL, number, 0, 4),
        _line(_LOAD, _ARGUMENTS + 8 * argument),  # its lower half: these machines are little-endian
        _line(_ANY_BIT, bits, if_set, if_clear),
        _line(_RETURN, _ALLOW),
        _line(_RETURN, _ERRNO | _EPERM),
    ]


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
