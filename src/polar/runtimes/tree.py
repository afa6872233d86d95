"""File work in folders that an agent has written, done from outside without being fooled.

Nothing here follows a symbolic link, opens a device, a socket or a pipe, or depends on how deep, how wide or
how unreadable a tree was made. Every step goes from an open folder to a name in it, as somebody inside may be
putting links in the way meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_DEPTH = 100
"""Folders in folders that a copy goes down: beyond any real project, within any process's open files."""
MAX_READ = 256 << 20
_WRITER = "is something that prepare started writing there?"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class TreeError(OSError):
    """A tree that can't be copied or a file that can't be written, with the reason in words."""


@contextlib.contextmanager
def _opened(name: str, flags: int, at: int | None = None) -> Iterator[int]:
    """An open file or folder; one of ours that was made unreadable is made readable first."""
    try:
        fd = os.open(name, flags, dir_fd=at)
    except PermissionError:
        _give_back(name, at)
        fd = os.open(name, flags, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)


def _give_back(name: str, at: int | None) -> None:
    """Let its owner read it, and a folder also be changed."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISLNK(mode):
            os.chmod(f"/proc/self/fd/{handle}", stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o400))
    finally:
        os.close(handle)


@contextlib.contextmanager
def _folder_of(root: Path | int, parts: Sequence[str], *, make: bool) -> Iterator[int]:
    """A folder under ``root``, which may be open already. No link is followed on the way."""
    with contextlib.ExitStack() as stack:
        fd = root if isinstance(root, int) else stack.enter_context(_opened(str(root), FOLDER))
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
            fd = stack.enter_context(_opened(part, FOLDER, fd))
        yield fd


def read(root: Path, parts: Sequence[str]) -> bytes:
    """A regular file under ``root``.

    Raises:
        FileNotFoundError: it is not there, is no regular file, or a link is on the way.
        TreeError: it is larger than 256 MiB.
    """
    shown = "/".join(parts)
    try:
        with _folder_of(root, parts[:-1], make=False) as folder, _opened(parts[-1], FILE, folder) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(f"{shown} is no regular file")
            if status.st_size > MAX_READ:
                raise TreeError(f"{shown} is larger than {MAX_READ >> 20} MiB")
            with open(fd, "rb", closefd=False) as file:
                return file.read(MAX_READ)
    except TreeError:
        raise
    except (OSError, IndexError) as error:
        raise FileNotFoundError(f"{shown} is not there, or is no regular file") from error


def write(root: Path, parts: Sequence[str], data: bytes, mode: int) -> None:
    """Put a file under ``root`` in place of whatever file or link was there, in one step.

    Raises:
        TreeError: a link or a file is where a folder should be, or a folder where the file should be.
    """
    shown = "/".join(parts)
    temporary = f".polar-{secrets.token_hex(8)}"
    try:
        with _folder_of(root, parts[:-1], make=True) as folder:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with open(fd, "wb") as file:
                    file.write(data)
                    os.fchmod(file.fileno(), mode)
                os.rename(temporary, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(temporary, dir_fd=folder)
                raise
    except (OSError, IndexError) as error:
        reason = getattr(error, "strerror", None) or "no file name"
        raise TreeError(f"{shown} can't be written: {reason}; a link or a file may be in its way") from error


def copy(source: Path, target: Path) -> None:
    """Copy files, folders and links (as links) into the empty folder ``target``, with modes (no setuid), times,
    holes and hard links. Pipes, sockets and devices are left out.

    Raises:
        TreeError: it is deeper than ``MAX_DEPTH`` folders, or a file could not be read or written.
    """
    try:
        with _opened(str(source), FOLDER) as here, _opened(str(target), FOLDER) as there:
            _copy_folder(here, there, (), {}, there)
    except TreeError:
        raise
    except FileExistsError as error:  # it was empty
        raise TreeError(f"the workspace can't be copied, {_WRITER} {error}") from error
    except OSError as error:
        raise TreeError(f"the workspace can't be copied: {error}") from error


def replace(source: Path, target: Path) -> None:
    """As ``copy``, in place of all that is in ``target``, which itself stays: it may be what a sandbox shows.

    Raises:
        TreeError: as ``copy``, or somebody goes on writing in ``target``.
    """
    try:
        with _opened(str(target), FOLDER) as top:
            _empty(top)
    except OSError as error:
        raise TreeError(f"the workspace can't be emptied for the copy, {_WRITER} {error}") from error
    copy(source, target)


def _copy_folder(
    here: int, there: int, above: tuple[str, ...], seen: dict[tuple[int, int], tuple[str, ...]], top: int
) -> None:
    if len(above) > MAX_DEPTH:
        raise TreeError(f"the workspace can't be copied: {'/'.join(above[:5])}/... is over {MAX_DEPTH} folders deep")
    for name in os.listdir(here):
        status = os.stat(name, dir_fd=here, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=here), name, dir_fd=there)
        elif stat.S_ISDIR(status.st_mode):
            os.mkdir(name, 0o700, dir_fd=there)
            with _opened(name, FOLDER, here) as inner, _opened(name, FOLDER, there) as new:
                _copy_folder(inner, new, (*above, name), seen, top)
                _copy_status(status, new)
        elif stat.S_ISREG(status.st_mode):
            twin = seen.get((status.st_dev, status.st_ino))
            if twin is not None:
                with _folder_of(top, twin[:-1], make=False) as place:
                    os.link(twin[-1], name, src_dir_fd=place, dst_dir_fd=there, follow_symlinks=False)
                continue
            with _opened(name, FILE, here) as old:
                if stat.S_ISREG(os.fstat(old).st_mode):
                    _copy_file(old, name, there, status)
            if status.st_nlink > 1:
                seen[status.st_dev, status.st_ino] = (*above, name)


def _copy_file(old: int, name: str, there: int, status: os.stat_result) -> None:
    new = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=there)
    try:
        size = os.fstat(old).st_size
        os.ftruncate(new, size)
        start = 0
        while start < size:
            try:
                start = os.lseek(old, start, os.SEEK_DATA)
            except OSError:  # only a hole is left
                break
            end = min(size, os.lseek(old, start, os.SEEK_HOLE))
            os.lseek(new, start, os.SEEK_SET)
            while start < end and (sent := os.sendfile(new, old, start, min(end - start, 1 << 24))):
                start += sent
            if start < end:  # it shrank meanwhile
                break
        _copy_status(status, new)
    finally:
        os.close(new)


def _copy_status(status: os.stat_result, fd: int) -> None:
    os.fchmod(fd, stat.S_IMODE(status.st_mode) & 0o777)
    os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it. Folders in folders are moved to the top before they are emptied,
    so depth costs neither stack nor open files. Nobody may be writing there any more, else something is left."""
    try:
        top = os.open(folder, FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        _empty(top)
    finally:
        os.close(top)
    os.rmdir(folder)


def _empty(top: int) -> None:
    os.fchmod(top, stat.S_IMODE(os.fstat(top).st_mode) | 0o700)
    waiting, count = ["."], 0
    while waiting:
        name = waiting.pop()
        with _opened(name, FOLDER, top) as fd:
            for entry in os.listdir(fd):
                if not stat.S_ISDIR(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(entry, dir_fd=fd)
                    continue
                with contextlib.suppress(OSError):  # most are empty
                    os.rmdir(entry, dir_fd=fd)
                    continue
                _give_back(entry, fd)
                count += 1
                moved = f".polar-gone-{secrets.token_hex(4)}-{count}"
                os.rename(entry, moved, src_dir_fd=fd, dst_dir_fd=top)
                waiting.append(moved)
        if name != ".":
            os.rmdir(name, dir_fd=top)
