"""System calls that a sandboxed replica may make, and the seccomp filter that allows them."""

from __future__ import annotations

import errno
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


COMPUTING = _names(
    "read write readv writev pread64 pwrite64 preadv pwritev close close_range fstat lstat stat newfstatat statx "
    "statfs fstatfs lseek access faccessat faccessat2 open openat getdents getdents64 getcwd chdir readlink "
    "readlinkat umask flock dup dup2 dup3 pipe pipe2 eventfd2 "
    "mmap mprotect munmap mremap madvise brk msync mincore mlock mlock2 munlock membarrier "
    "mbind set_mempolicy get_mempolicy "
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigtimedwait rt_sigpending rt_sigsuspend sigaltstack "
    "restart_syscall select pselect6 poll ppoll epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 "
    "sendto recvfrom sendmsg recvmsg shutdown getsockopt setsockopt getsockname getpeername "
    "sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max "
    "sched_get_priority_min getpriority "
    "nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getitimer setitimer alarm "
    "futex futex_waitv set_robust_list get_robust_list set_tid_address rseq arch_prctl "
    "getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid "
    "getrlimit getrusage sysinfo uname getcpu getrandom exit exit_group wait4 waitid"
)
"""System calls that every replica may make, with any arguments."""
CUDA = frozenset(("memfd_create", "ftruncate", "timerfd_create", "timerfd_settime", "fallocate"))
"""Additional system calls that a GPU's driver needs."""
COMPILING = _names(
    "execve execveat fork vfork unlink unlinkat rename renameat renameat2 mkdir mkdirat rmdir link linkat "
    "symlink symlinkat ftruncate truncate fallocate chmod fchmod fchmodat utimensat fsync fdatasync "
    "copy_file_range sendfile fadvise64 fchdir memfd_create"
)
"""Additional system calls that a compiler needs, with any arguments."""

_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_THREAD = 0x00010000
_CLONE_ELSEWHERE = 0x7E020000 | 0x00008000
"""CLONE_NEW*, which make namespaces, and CLONE_PARENT, which makes a child of the parent process."""
_X32 = 0x40000000
_OWNERS = (8, 10, 15)
"""Refused fcntl commands: F_SETOWN, F_SETSIG, F_SETOWN_EX, by which the kernel signals another process."""
_IOCTL_OWNERS = (0x8901, 0x8902, 0x5412)
"""ioctl: FIOSETOWN, SIOCSPGRP; TIOCSTI, which types into a terminal."""
_STREAMS = tuple(kind | flags for kind in (1, 5) for flags in (0, 0x800, 0x80000, 0x80800))
"""socketpair: SOCK_STREAM and SOCK_SEQPACKET. A SOCK_DGRAM socket of a pair can send to any Unix socket by its path."""
_NAMES = (15, 16, 0x53564D41, 23)
"""prctl: PR_SET_NAME, PR_GET_NAME, PR_SET_VMA, PR_CAPBSET_READ."""


@dataclass(frozen=True)
class Architecture:
    """A processor architecture: the kernel's name for it, and its system call numbers."""

    audit: int
    numbers: Mapping[str, int]

    def program(self, names: Collection[str], pid: int, *, compiles: bool = False) -> list[bytes]:
        """Return a filter that allows these calls, and those of `_narrow` with harmless arguments.

        Args:
            names: System calls that are allowed with any arguments.
            pid: The process that the filter is for, the only one that may be signalled.
            compiles: Whether the process may start others.
        """
        code = [_op(_LOAD, 4), _op(_EQUAL, self.audit, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, 0)]
        code += [_op(_ABOVE, _X32, 0, 1), _refuse(errno.EPERM)]
        for number in sorted(self.numbers[name] for name in names if name in self.numbers):
            code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
        for name, checks in (_narrow(pid) | (_narrow_compiling() if compiles else {})).items():
            code += [_op(_EQUAL, self.numbers[name], 0, len(checks)), *checks]
        # glibc then falls back to clone, whose flags a filter can check.
        code += [_op(_EQUAL, self.numbers["clone3"], 0, 1), _refuse(errno.ENOSYS)]
        return [*code, _refuse(errno.EPERM)]


def _narrow(pid: int) -> dict[str, list[bytes]]:
    """Return checks by name: threads but no processes, signals to itself, read-only limits, own threads."""
    oneself = [_op(_EQUAL, 0, 0, 1), _op(_RETURN, _ALLOW), _refuse(errno.EPERM)]
    return {
        "clone": [_argument(0), _op(_ANY_BIT, _CLONE_THREAD, 0, 1), _op(_RETURN, _ALLOW), _refuse(errno.EPERM)],
        "tgkill": [_argument(0), _op(_EQUAL, pid, 0, 1), _op(_RETURN, _ALLOW), _refuse(errno.EPERM)],
        "prlimit64": [
            *(_argument(0), _op(_EQUAL, 0, 1, 0), _refuse(errno.EPERM)),
            *(_argument(2), _op(_EQUAL, 0, 1, 0), _refuse(errno.EPERM)),
            *(_argument(2, 4), *oneself),
        ],
        "sched_setscheduler": [_argument(0), *oneself],
        "sched_setaffinity": [_argument(0), *oneself],
        "setpriority": [_argument(0), _op(_EQUAL, 0, 1, 0), _refuse(errno.EPERM), _argument(1), *oneself],
        "fcntl": [_argument(1), *_none_of(_OWNERS)],
        "ioctl": [_argument(1), *_none_of(_IOCTL_OWNERS)],
        "prctl": [_argument(0), *_one_of(_NAMES)],
    }


def _narrow_compiling() -> dict[str, list[bytes]]:
    """Return checks by name for a process that starts compilers: processes, but in its own process group.

    The server ends that group with the replica, so leaving it has no effect; compilers that try it see no error.
    """
    ignored = [_op(_RETURN, _ERROR)]
    return {
        "clone": [
            *(_argument(0), _op(_ANY_BIT, _CLONE_ELSEWHERE, 0, 1), _refuse(errno.EPERM)),
            _op(_RETURN, _ALLOW),
        ],
        "setsid": ignored,
        "setpgid": ignored,
        "socketpair": [_argument(1), *_one_of(_STREAMS)],
    }


def _none_of(values: Collection[int]) -> list[bytes]:
    refusals = [part for value in values for part in (_op(_EQUAL, value, 0, 1), _refuse(errno.EPERM))]
    return [*refusals, _op(_RETURN, _ALLOW)]


def _one_of(values: Collection[int]) -> list[bytes]:
    allowed = [part for value in values for part in (_op(_EQUAL, value, 0, 1), _op(_RETURN, _ALLOW))]
    return [*allowed, _refuse(errno.EPERM)]


def _argument(index: int, offset: int = 0) -> bytes:
    """Load the low half of an argument, or with offset 4 the high one."""
    return _op(_LOAD, 16 + 8 * index + offset)


def _refuse(error: int) -> bytes:
    return _op(_RETURN, _ERROR | error)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _table(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (entry.split(":") for entry in text.split())}


ARCHITECTURES: dict[str, Architecture] = {
    "x86_64": Architecture(
        0xC000003E,
        _table(
            "access:21 alarm:37 arch_prctl:158 brk:12 capget:125 capset:126 chdir:80 chmod:90 clock_getres:229 "
            "clock_gettime:228 clock_nanosleep:230 clone:56 clone3:435 close:3 close_range:436 "
            "copy_file_range:326 dup:32 dup2:33 dup3:292 epoll_create1:291 epoll_ctl:233 epoll_pwait:281 "
            "epoll_pwait2:441 epoll_wait:232 eventfd2:290 execve:59 execveat:322 exit:60 exit_group:231 "
            "faccessat:269 faccessat2:439 fadvise64:221 fallocate:285 fchdir:81 fchmod:91 fchmodat:268 fcntl:72 "
            "fdatasync:75 flock:73 fork:57 fstat:5 fstatfs:138 fsync:74 ftruncate:77 futex:202 futex_waitv:449 "
            "get_mempolicy:239 get_robust_list:274 getcpu:309 getcwd:79 getdents:78 getdents64:217 getegid:108 "
            "geteuid:107 getgid:104 getgroups:115 getitimer:36 getpeername:52 getpgid:121 getpgrp:111 getpid:39 "
            "getppid:110 getpriority:140 getrandom:318 getresgid:120 getresuid:118 getrlimit:97 getrusage:98 "
            "getsid:124 getsockname:51 getsockopt:55 gettid:186 gettimeofday:96 getuid:102 ioctl:16 kill:62 "
            "link:86 linkat:265 lseek:8 lstat:6 madvise:28 mbind:237 membarrier:324 memfd_create:319 mincore:27 "
            "mkdir:83 mkdirat:258 mlock:149 mlock2:325 mmap:9 mprotect:10 mremap:25 msync:26 munlock:150 "
            "munmap:11 nanosleep:35 newfstatat:262 open:2 openat:257 pipe:22 pipe2:293 poll:7 ppoll:271 prctl:157 "
            "pread64:17 preadv:295 prlimit64:302 pselect6:270 pwrite64:18 pwritev:296 read:0 readlink:89 "
            "readlinkat:267 readv:19 recvfrom:45 recvmsg:47 rename:82 renameat:264 renameat2:316 "
            "restart_syscall:219 rmdir:84 rseq:334 rt_sigaction:13 rt_sigpending:127 rt_sigprocmask:14 "
            "rt_sigreturn:15 rt_sigsuspend:130 rt_sigtimedwait:128 sched_get_priority_max:146 "
            "sched_get_priority_min:147 sched_getaffinity:204 sched_getparam:143 sched_getscheduler:145 "
            "sched_setaffinity:203 sched_setscheduler:144 sched_yield:24 seccomp:317 select:23 sendfile:40 "
            "sendmsg:46 sendto:44 set_mempolicy:238 set_robust_list:273 set_tid_address:218 setitimer:38 "
            "setpgid:109 setpriority:141 setsid:112 setsockopt:54 shutdown:48 sigaltstack:131 socketpair:53 "
            "stat:4 statfs:137 statx:332 symlink:88 symlinkat:266 sysinfo:99 tgkill:234 time:201 "
            "timerfd_create:283 timerfd_settime:286 times:100 truncate:76 umask:95 uname:63 unlink:87 "
            "unlinkat:263 utimensat:280 vfork:58 wait4:61 waitid:247 write:1 writev:20 "
        ),
    ),
    "aarch64": Architecture(
        0xC00000B7,
        _table(
            "brk:214 capget:90 capset:91 chdir:49 clock_getres:114 clock_gettime:113 clock_nanosleep:115 "
            "clone:220 clone3:435 close:57 close_range:436 copy_file_range:285 dup:23 dup3:24 epoll_create1:20 "
            "epoll_ctl:21 epoll_pwait:22 epoll_pwait2:441 eventfd2:19 execve:221 execveat:281 exit:93 "
            "exit_group:94 faccessat:48 faccessat2:439 fadvise64:223 fallocate:47 fchdir:50 fchmod:52 fchmodat:53 "
            "fcntl:25 fdatasync:83 flock:32 fstat:80 fstatfs:44 fsync:82 ftruncate:46 futex:98 futex_waitv:449 "
            "get_mempolicy:236 get_robust_list:100 getcpu:168 getcwd:17 getdents64:61 getegid:177 geteuid:175 "
            "getgid:176 getgroups:158 getitimer:102 getpeername:205 getpgid:155 getpid:172 getppid:173 "
            "getpriority:141 getrandom:278 getresgid:150 getresuid:148 getrlimit:163 getrusage:165 getsid:156 "
            "getsockname:204 getsockopt:209 gettid:178 gettimeofday:169 getuid:174 ioctl:29 kill:129 linkat:37 "
            "lseek:62 madvise:233 mbind:235 membarrier:283 memfd_create:279 mincore:232 mkdirat:34 mlock:228 "
            "mlock2:284 mmap:222 mprotect:226 mremap:216 msync:227 munlock:229 munmap:215 nanosleep:101 "
            "newfstatat:79 openat:56 pipe2:59 ppoll:73 prctl:167 pread64:67 preadv:69 prlimit64:261 pselect6:72 "
            "pwrite64:68 pwritev:70 read:63 readlinkat:78 readv:65 recvfrom:207 recvmsg:212 renameat:38 "
            "renameat2:276 restart_syscall:128 rseq:293 rt_sigaction:134 rt_sigpending:136 rt_sigprocmask:135 "
            "rt_sigreturn:139 rt_sigsuspend:133 rt_sigtimedwait:137 sched_get_priority_max:125 "
            "sched_get_priority_min:126 sched_getaffinity:123 sched_getparam:121 sched_getscheduler:120 "
            "sched_setaffinity:122 sched_setscheduler:119 sched_yield:124 seccomp:277 sendfile:71 sendmsg:211 "
            "sendto:206 set_mempolicy:237 set_robust_list:99 set_tid_address:96 setitimer:103 setpgid:154 "
            "setpriority:140 setsid:157 setsockopt:208 shutdown:210 sigaltstack:132 socketpair:199 statfs:43 "
            "statx:291 symlinkat:36 sysinfo:179 tgkill:131 timerfd_create:85 timerfd_settime:86 times:153 "
            "truncate:45 umask:166 uname:160 unlinkat:35 utimensat:88 wait4:260 waitid:95 write:64 writev:66 "
        ),
    ),
}
"""Architectures by the kernel's machine name."""
