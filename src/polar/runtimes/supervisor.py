"""The first process of every sandbox: it starts commands there, keeps their output, and ends them, all of them.

It lives inside because only the inside can do these things simply: whoever is born here has the sandbox's
namespaces, limits and lack of privileges without being told, and a socket made here listens in the sandbox's own
network. The gateway holds the other end of one socket. When that end closes, however the gateway died, everything
here dies.

An interpreter takes longer to start than all else that a sandbox needs. So a gateway starts one, by path and bare,
which waits: for each sandbox it forks (``main``), and what it forked builds the walls, moves behind them and serves
(``supervise``). It keeps nothing of any sandbox, and ends when the gateway does.

Behind walls, bubblewrap itself runs nothing but ``cat``, which ends when this process does. This one joins what they
are in, but has a process namespace of its own there, and is the first in it: no signal from inside ends it, whoever
loses his parent comes to it, and what was bubblewrap's is not to be seen. (Whoever is inside can still starve it, by
its limits: the sandbox then ends, and nothing else does.)

Messages on the socket are one byte with file descriptors; what has more to say is ``marshal`` towards here, and lines
of text from here:

    x  request (a dict in a file), result, stdout, stderr   run a command; how it ended goes to ``result``
    k  result                                               end every command, then answer
"""

import contextlib
import ctypes
import fcntl
import gc
import marshal
import os
import resource
import select
import signal
import socket
import sys
import termios
import time

KEYCTL = {"x86_64": 250, "aarch64": 219}
"""The number of the system call, by machine."""
KEYCTL_JOIN_SESSION_KEYRING = 1
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
CAPABILITY_VERSION_3 = 0x20080522
NS_GET_USERNS = 0xB701
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
JOINED = {"cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000, "net": 0x40000000, "mnt": 0x00020000}
"""The flag of ``setns`` for each of these namespaces, by its name in ``/proc``."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
libc = ctypes.CDLL(None, use_errno=True)
PAGE = os.sysconf("SC_PAGESIZE")
SAMPLE_SECONDS, SELDOM_SECONDS = 0.25, 1.0
"""Between looks at what is used: with a limit on memory, and without one, as a thousand sandboxes look too."""
CHILDREN = "/proc/{0}/task/{1}/children"
CHUNK = 1 << 16
KILLED = "the sandbox was killed"
"""Why a command ended that nobody inside ended."""


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """One message and the file descriptors that came with it."""
    word, fds, _, _ = socket.recv_fds(control, 16, 4)
    for fd in fds:
        os.set_inheritable(fd, False)
    return word, fds


def load(request: int) -> dict:  # type: ignore[type-arg]
    """What a request's file says."""
    with open(request, "rb") as file:
        return marshal.loads(file.read())  # type: ignore[no-any-return]


class Stream:
    """One output of a command: a pipe that is copied into a file, up to ``room`` bytes."""

    def __init__(self, file: int, room: int) -> None:
        self.file, self.cap, self.room = file, room, room
        self.pipe, self.writer = os.pipe()
        os.set_blocking(self.pipe, False)

    def copy(self, at_most: int = CHUNK) -> bool:
        """Move what is there; ``False`` once nothing more can come."""
        try:
            data = os.read(self.pipe, at_most)
        except BlockingIOError:
            return True
        if data and self.room:
            kept = data[: self.room]
            self.room -= len(kept)
            if not self.room:
                kept += b"\n[polar: output over %d MiB was cut here]\n" % (self.cap >> 20)
            with contextlib.suppress(OSError):  # a full disk must not end the sandbox's first process
                os.write(self.file, kept)
        return bool(data)

    def settle(self) -> None:
        """Move what was written so far, however much a process in the background goes on writing."""
        waiting = bytearray(4)
        fcntl.ioctl(self.pipe, termios.FIONREAD, waiting)
        left = int.from_bytes(waiting, sys.byteorder)
        while left > 0:
            self.copy(min(left, CHUNK))
            left -= CHUNK

    def close(self) -> None:
        os.close(self.pipe)
        os.close(self.file)


class Command:
    """A command that runs: where its result goes and which streams are its own."""

    def __init__(self, result: socket.socket, streams: list[Stream]) -> None:
        self.result, self.streams = result, streams

    def answer(self, how: str, why: str | None = None) -> None:
        """``exit CODE``, ``error`` or ``ended``, and a reason on the next line if there is one."""
        with contextlib.suppress(OSError):  # nobody waits for it any more
            self.result.send(f"{how}\n{why or ''}".encode())
        self.result.close()


class Supervisor:
    """Serves one control socket until it closes."""

    def __init__(self, control: socket.socket, limits: dict[str, int]) -> None:
        self.control, self.limits = control, limits
        self.alone = os.getpid() == 1
        """First of a process namespace: whatever else is in it is ours to end."""
        self.commands: dict[int, Command] = {}
        self.streams: dict[int, Stream] = {}
        self.poll = select.poll()
        self.poll.register(control, select.POLLIN)
        self.wake, wake = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake, False)
        self.poll.register(self.wake, select.POLLIN)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Until the gateway is gone; then end everything."""
        sampled = time.monotonic()
        every = SAMPLE_SECONDS if self.limits["memory"] else SELDOM_SECONDS
        while True:
            if not self.commands:
                sampled = time.monotonic()
            for fd, _ in self.poll.poll(every * 1000 if self.commands else None):
                if fd == self.control.fileno():
                    if not self.receive():
                        self.end_all(KILLED)
                        return
                elif fd == self.wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake, 4096)
                elif fd in self.streams and not self.streams[fd].copy():
                    self.drop(fd)
            self.reap()
            if self.commands and time.monotonic() - sampled > every:
                if breach := self.over_limit():
                    self.end_all(breach)
                sampled = time.monotonic()

    def receive(self) -> bool:
        """One message; ``False`` when the other end is closed."""
        try:
            word, fds = receive(self.control)
        except ConnectionError:
            return False
        if not word:
            return False
        if word == b"x":
            self.start(*fds)
        elif word == b"k":
            self.end_all(None)
            Command(socket.socket(fileno=fds[0]), []).answer("ended")
        return True

    def start(self, request: int, result: int, *outputs: int) -> None:
        """Fork a command: a session of its own, no input, output through our pipes."""
        want = load(request)
        command = Command(socket.socket(fileno=result), [Stream(fd, want["cap"]) for fd in outputs])
        try:
            pid = os.fork()
        except OSError as error:
            command.answer("error", f"no new process: {error.strerror}")
            for stream in command.streams:
                os.close(stream.writer)
                stream.close()
            return
        if pid == 0:
            become(want, command.streams[0].writer, command.streams[1].writer)
        self.commands[pid] = command
        for stream in command.streams:
            os.close(stream.writer)
            self.streams[stream.pipe] = stream
            self.poll.register(stream.pipe, select.POLLIN)

    def drop(self, pipe: int) -> None:
        self.poll.unregister(pipe)
        self.streams.pop(pipe).close()

    def reap(self, reason: str | None = None) -> bool:
        """Collect who ended, commands and orphans; ``False`` when there is nobody left to end."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if command := self.commands.pop(pid, None):
                for stream in command.streams:
                    if self.streams.get(stream.pipe) is stream:
                        stream.settle()
                command.answer(f"exit {os.waitstatus_to_exitcode(status)}", reason)

    def end_all(self, reason: str | None) -> None:
        """Kill until nobody is left. What a fork made in between is met in the next round."""
        while self.reap(reason):
            if self.alone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in self.others():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            if self.reap(reason):
                time.sleep(0.002)

    def others(self) -> list[int]:
        """Every process that is here because of us."""
        if self.alone:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return below(os.getpid())

    def over_limit(self) -> str | None:
        """Which limit is broken, in words for the user."""
        pids = self.others()
        if len(pids) > self.limits["processes"]:
            return f"{len(pids)} processes, over the limit of {self.limits['processes']}"
        if not self.limits["memory"]:
            return None
        used = sum(private_bytes(pid) for pid in pids)
        if self.alone:
            shared = os.statvfs("/dev")
            used += (shared.f_blocks - shared.f_bfree) * shared.f_frsize
        if used <= self.limits["memory"]:
            return None
        return f"{used >> 20} MiB of memory, over the limit of {self.limits['memory'] >> 20} MiB"


def below(pid: int) -> list[int]:
    """The descendants of a process: as the kernel lists them, since a machine may run thousands of others; where it
    lists none, by looking at everybody's parent."""
    if not os.path.exists(CHILDREN.format(pid, pid)):
        return below_by_parents(pid)
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{each}/task"):
                with contextlib.suppress(OSError), open(CHILDREN.format(each, thread), "rb") as file:
                    found += map(int, file.read().split())
    return found[1:]


def below_by_parents(top: int) -> list[int]:
    parents = {int(name): parent_of(name) for name in os.listdir("/proc") if name.isdigit()}
    found = []
    for pid in parents:
        above, seen = pid, set()
        while above in parents and above not in seen and above != top:
            seen.add(above)
            above = parents[above]
        if above == top and pid != top:
            found.append(pid)
    return found


def parent_of(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def private_bytes(pid: int) -> int:
    """Resident memory of a process that it does not share."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE


def become(want: dict, stdout: int, stderr: int) -> None:  # type: ignore[type-arg]
    """In the forked child: turn into the command. Does not return."""
    argv, env = want["argv"], want["env"]
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.closerange(3, 1 << 16)
        os.chdir(want["cwd"])
        os.execvpe(argv[0], argv, env)
    except FileNotFoundError as error:
        os.write(2, f"polar: not found: {error.filename or argv[0]}\n".encode())
        os._exit(127)
    except BaseException as error:
        os.write(2, f"polar: could not start the command: {error}\n".encode())
        os._exit(126)


def build_walls(line: list[str], control: socket.socket) -> None:
    """Have bubblewrap build a sandbox in which only ``cat`` runs, and go on in there, in another process.

    Raises:
        ConnectionError: it can't be built (bubblewrap has said why), or the gateway is gone.
    """
    info, told = os.pipe()
    stdin, kept = os.pipe()  # kept open as long as this process lives: when it ends, so does cat
    echo, stdout = os.pipe()
    bwrap = os.fork()
    if bwrap == 0:
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.set_inheritable(told, True)
        os.execve(line[0], [line[0], "--info-fd", str(told), *line[1:], "cat"], {})
    for fd in (told, stdin, stdout):
        os.close(fd)
    pid = _first_pid(info)
    first = os.pidfd_open(pid)
    os.write(kept, b"!")  # cat says it back once everything is in its place
    poll = select.poll()
    poll.register(echo, select.POLLIN)
    poll.register(control, select.POLLIN)
    if [fd for fd, _ in poll.poll()] != [echo] or os.read(echo, 1) != b"!":
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        os.waitpid(bwrap, 0)
        raise ConnectionError
    for fd in (info, echo):
        os.close(fd)
    _enter(pid, first)
    _give_up_privileges()


def _first_pid(info: int) -> int:
    """The first process inside, from what bubblewrap tells of it (JSON)."""
    text = b""
    while b"}" not in text:
        more = os.read(info, 4096)
        if not more:
            raise ConnectionError
        text += more
    return int(text.partition(b'"child-pid":')[2].partition(b",")[0].strip(b" \n}"))


def _enter(pid: int, first: int) -> None:
    """Join its namespaces, and be the first of a new one of processes, with a ``/proc`` of that."""
    user, mounts = (os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("user", "mnt"))
    # where bubblewrap had its privileges; what it runs may be one further in
    owner = fcntl.ioctl(mounts, NS_GET_USERNS)
    flags = 0
    for name, flag in JOINED.items():
        if os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"):
            flags |= flag
    check(libc.setns(owner, CLONE_NEWUSER))
    check(libc.setns(first, flags))
    check(libc.unshare(CLONE_NEWPID))
    if os.fork():
        os._exit(0)
    check(libc.mount(b"proc", b"/proc", b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None))
    if os.fstat(user).st_ino != os.fstat(owner).st_ino:
        check(libc.setns(user, CLONE_NEWUSER))
    for fd in (user, mounts, owner, first):
        os.close(fd)


def _give_up_privileges() -> None:
    """Those that joining gave: commands are to have what bubblewrap left to ``cat``, which is none."""
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    capability = 0
    while libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    check(libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()))


def check(result: int) -> None:
    """Raise what the C library's call failed with."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def supervise(request: int, fd: int, log: int) -> None:
    """Be the first process of the sandbox that ``request`` asks for, to its end."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    want, control = load(request), socket.socket(fileno=fd)
    if want["walls"]:
        build_walls(want["walls"], control)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody inside may look into this process or take its sockets
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if keyctl := KEYCTL.get(os.uname().machine):
        libc.syscall(keyctl, KEYCTL_JOIN_SESSION_KEYRING, None)  # a keyring is inherited, namespaces or not
    if want["cpus"]:
        os.sched_setaffinity(0, want["cpus"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getpid() == 1:  # elsewhere this limit would count the user's other processes too
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        processes = want["limits"]["processes"]
        tasks = processes if hard == resource.RLIM_INFINITY else min(processes, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
    fds = [os.pidfd_open(os.getpid())]
    with contextlib.ExitStack() as stack:
        if want["port"]:
            listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", want["port"]))
            listener.listen(512)
            fds.append(listener.fileno())
        socket.send_fds(control, [b"ready"], fds)
    os.close(fds[0])
    Supervisor(control, want["limits"]).serve()


def collect(*_: object) -> None:
    """Whoever has ended: a sandbox's first process, or what outlived one that was killed."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """``supervisor.py FD``: fork for each request (with a control socket and a log) that comes on this socket."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(requests.fileno(), False)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, collect)
    gc.freeze()
    while fds := receive(requests)[1]:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(fds[2], f"no new process: {error.strerror}\n".encode())
            pid = -1
        if pid == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                requests.close()
                supervise(*fds)
            except ConnectionError:
                pass
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)


if __name__ == "__main__":
    main()
