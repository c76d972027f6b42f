"""List the system calls that programs may make, with their numbers on x86_64 and aarch64 (- where there is none)."""

# Each program may use files by descriptor and path, memory, threads, handling signals, time, polling. The mounts,
# or Landlock, decide where a path may lead.
_ALWAYS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
preadv2 327 286, pwritev2 328 287, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24,
pipe 22 -, pipe2 293 59, fcntl 72 25, ioctl 16 29, fstat 5 80, stat 4 -, lstat 6 -, newfstatat 262 79, statx 332 291,
fstatfs 138 44, statfs 137 43, access 21 -, faccessat 269 48, faccessat2 439 439, open 2 -, openat 257 56,
openat2 437 437, creat 85 -, readlink 89 -, readlinkat 267 78, getcwd 79 17, chdir 80 49, fchdir 81 50,
getdents 78 -, getdents64 217 61, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -,
renameat 264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, ftruncate 77 46,
fallocate 285 47, fadvise64 221 223, fsync 74 82, fdatasync 75 83, sync_file_range 277 84, flock 73 32, umask 95 166,
copy_file_range 326 285, sendfile 40 71, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
llistxattr 195 12, flistxattr 196 13, mmap 9 222, munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233,
brk 12 214, msync 26 227, mincore 27 232, membarrier 324 283, get_mempolicy 239 236, futex 202 98,
futex_waitv 449 449, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293, set_tid_address 218 96,
arch_prctl 158 -, sched_yield 24 124, sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120,
sched_get_priority_max 146 125, sched_get_priority_min 147 126, sched_rr_get_interval 148 127, getpriority 140 141,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, pause 34 -, alarm 37 -, setitimer 38 103, getitimer 36 102,
timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_delete 226 111, timer_getoverrun 225 109,
timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, signalfd 282 -, signalfd4 289 74,
eventfd 284 -, eventfd2 290 19, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, epoll_pwait2 441 441, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, nanosleep 35 101,
clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153,
getrusage 98 165, getrlimit 97 163, setrlimit 160 164, sysinfo 99 179, uname 63 160, getrandom 318 278,
getcpu 309 168, getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgrp 111 -, getpgid 121 155,
getsid 124 156, setsid 112 157, capget 125 90, prctl 157 167, wait4 61 260, waitid 247 95, exit 60 93,
exit_group 231 94, restart_syscall 219 128, socketpair 53 199, sendto 44 206, recvfrom 45 207, recvmsg 47 212,
recvmmsg 299 243, shutdown 48 210, getsockopt 55 209, setsockopt 54 208, getsockname 51 204, getpeername 52 205
"""
# Calls that reach beyond the process, change files in ways that Landlock does not see, or put descriptors where no
# keeper sees them: harmless only where other processes and other files are out of sight, and files are counted.
_WITH_OTHERS = """
fork 57 -, vfork 58 -, kill 62 129, tkill 200 130, tgkill 234 131, setpgid 109 154, truncate 76 45, chmod 90 -,
fchmod 91 52, fchmodat 268 53, chown 92 -, lchown 94 -, fchown 93 55, fchownat 260 54, utime 132 -, utimes 235 -,
futimesat 261 -, utimensat 280 88, mknod 133 -, mknodat 259 33,
sendmsg 46 211, sendmmsg 307 269
"""


_EXECUTING = "execve 59 221"


def numbers(column: int, *, one_process: bool, may_execute: bool = False) -> list[int]:
    """Return the numbers of the allowed calls; column 0 is x86_64, column 1 aarch64.

    one_process: without namespaces, a program must not start processes nor reach others, and so execute nothing.
    """
    lists = (_ALWAYS, "" if one_process else _WITH_OTHERS, _EXECUTING if may_execute and not one_process else "")
    rows = [row.split() for row in ",".join(lists).split(",") if row.strip()]
    return [int(row[1 + column]) for row in rows if row[1 + column] != "-"]
