"""The first process of a sandbox: it starts commands there, keeps their output, and ends them, all of them.

It lives inside because only the inside can do these things simply: whoever is born here has the sandbox's
namespaces, limits and lack of privileges without being told; orphans come back to their first process; and
a socket made here listens in the sandbox's own network. The gateway holds the other end of one socket. When
that end closes, however the gateway died, everything here dies.

This file is run by path, on a bare interpreter, for every sandbox there is: it imports only what is quick to import
(no json, no typing; no socket and no signal, which make enums of their constants), which makes it start in a third of
the time. Messages on the socket are one byte with file descriptors; what has more to say is ``marshal`` towards here,
and lines of text from here:

    x  request (a dict in a file), result, stdout, stderr   run a command; how it ended goes to ``result``
    k  result                                               end every command, then answer
"""

import _signal as signal  # type: ignore[import-not-found]
import _socket
import ctypes
import fcntl
import marshal
import os
import resource
import select
import sys
import termios
import time

KEYCTL = {"x86_64": 250, "aarch64": 219}
"""The number of the system call, by machine."""
KEYCTL_JOIN_SESSION_KEYRING = 1
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
PAGE = os.sysconf("SC_PAGESIZE")
SAMPLE_SECONDS, SELDOM_SECONDS = 0.25, 1.0
"""Between looks at what is used: with a limit on memory, and without one, as a thousand sandboxes look too."""
CHILDREN = "/proc/{0}/task/{1}/children"
CHUNK = 1 << 16
SCM_RIGHTS, INT = _socket.SCM_RIGHTS, 4


def receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    """One message and the file descriptors that came with it."""
    word, ancillary, _, _ = control.recvmsg(16, _socket.CMSG_LEN(8 * INT))
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == SCM_RIGHTS:
            whole = len(data) - len(data) % INT
            fds += memoryview(data[:whole]).cast("i").tolist()
    for fd in fds:
        os.set_inheritable(fd, False)
    return word, fds


class ignoring:
    """These errors are no news."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self.kinds = kinds

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self.kinds)


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
            with ignoring(OSError):  # a full disk must not end the sandbox's first process
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

    def __init__(self, result: _socket.socket, streams: list[Stream]) -> None:
        self.result, self.streams = result, streams

    def answer(self, how: str, why: str | None = None) -> None:
        """``exit CODE``, ``error`` or ``ended``, and a reason on the next line if there is one."""
        with ignoring(OSError):  # nobody waits for it any more
            self.result.send(f"{how}\n{why or ''}".encode())
        self.result.close()


class Supervisor:
    """Serves one control socket until it closes."""

    def __init__(self, control: _socket.socket, limits: dict[str, int]) -> None:
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
                        self.end_all("the gateway is gone")
                        return
                elif fd == self.wake:
                    with ignoring(BlockingIOError):
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
            Command(_socket.socket(fileno=fds[0]), []).answer("ended")
        return True

    def start(self, request: int, result: int, *outputs: int) -> None:
        """Fork a command: a session of its own, no input, output through our pipes."""
        with open(request, "rb") as file:
            want = marshal.loads(file.read())
        command = Command(_socket.socket(fileno=result), [Stream(fd, want["cap"]) for fd in outputs])
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
                with ignoring(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in self.others():
                    with ignoring(ProcessLookupError, PermissionError):
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
        with ignoring(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{each}/task"):
                with ignoring(OSError), open(CHILDREN.format(each, thread), "rb") as file:
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


def main() -> None:
    """``supervisor.py CONTROL_FD PORT PROCESSES MEMORY CPU...``: a port of 0 is none, and so is a memory of 0."""
    fd, port, processes, memory, *cpus = map(int, sys.argv[1:])
    control = _socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody inside may look into this process or take its sockets
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if keyctl := KEYCTL.get(os.uname().machine):
        libc.syscall(keyctl, KEYCTL_JOIN_SESSION_KEYRING, None)  # a keyring is inherited, namespaces or not
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pid 1 can be killed from inside only by what it handles
    if cpus:
        os.sched_setaffinity(0, cpus)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getpid() == 1:  # elsewhere this limit would count the user's other processes too
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        tasks = processes if hard == resource.RLIM_INFINITY else min(processes, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (tasks, tasks))
    fds = [os.pidfd_open(os.getpid())]
    if port:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(512)
        fds.append(listener.detach())
    packed = b"".join(fd.to_bytes(INT, sys.byteorder) for fd in fds)
    control.sendmsg([b"ready"], [(_socket.SOL_SOCKET, SCM_RIGHTS, packed)])
    for fd in fds:
        os.close(fd)
    Supervisor(control, {"processes": processes, "memory": memory}).serve()


if __name__ == "__main__":
    main()
