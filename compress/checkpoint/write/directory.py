"""The output directory of a run, the directory in which it works, and the rules of their ownership.

    OUT             appears in one step when it is complete; holds the files that its record names and nothing else
    OUT.partial/    of a run that works or was stopped
      lock            held by the live process; the kernel releases it when the process dies
      progress.json   the journal of what is on disk (`compress.checkpoint.write.journal`)
      expected.json   names of unusual files in model/, of an export (`compress.checkpoint.leftovers`)
      blocks/         finished blocks, and the data to continue after them
      training/       checkpoints of a run that trains
      model/          the checkpoint as it will be; renamed to OUT at the end
      replaced/       for a moment: the former OUT, which --overwrite replaces

A directory is recognised as a run's own by the content of its record, never by its name, and only files that the record
names are removed with it. Whenever a run is killed, OUT is absent, the former one, or complete: the next run restores a
former OUT that was set aside, and cleans up after a finished one.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from compress.base.collectives import Comm
from compress.base.errors import CheckpointError, InputError, RankLostError, WriteError
from compress.base.regular_files import LOOP, special
from compress.checkpoint.files import RECORD
from compress.checkpoint.leftovers import BLOCKS, EXPECTED, MODEL, TRAINING, clear, holds, strangers_in
from compress.checkpoint.portable_names import command
from compress.checkpoint.scratch import becomes
from compress.checkpoint.write.journal import PROGRESS, Journal
from compress.checkpoint.write.manifest import read_record
from compress.checkpoint.write.shards import SHARD_BYTES

LOCK, REPLACED = "lock", "replaced"
ATTEMPTS = 10  # to take a lock whose file its former holder keeps removing
OF_FOLDERS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)
SHOWN = 200  # characters of a command


class Directory:
    """OUT and OUT.partial. One process works with them; the other ranks of a sharded run only know their names.

    shard_bytes: the most data in one weight file of the output."""

    def __init__(self, output: Path, shard_bytes: int | None = None) -> None:
        self.shard_bytes = shard_bytes or SHARD_BYTES
        # Absolute: a program may change its directory while it runs.
        self.output = (output.resolve() if output.is_symlink() else output).absolute()
        self.partial = self.output.with_name(self.output.name + ".partial")
        self.blocks, self.model = self.partial / BLOCKS, self.partial / MODEL
        self.replaced, self.progress = self.partial / REPLACED, self.partial / PROGRESS
        self.training = self.partial / TRAINING
        self._lock: IO[str] | None = None
        self._made: list[Path] = []

    def claim(self, *, resume: bool, overwrite: bool) -> None:
        """Become the only run that works here. Drop the leftovers of an earlier run unless it is to be resumed.

        Raises InputError, having changed nothing, where another run is at work, and for files in the way.
        """
        self._refuse_strangers()
        if not self.partial.exists():
            self._refuse_output(overwrite)
        try:
            self._take_lock()
            self._recover()
            self._refuse_output(overwrite)
            if not resume:
                if (self.finished() or self.trained()) and not overwrite:
                    raise InputError(
                        f"{self.partial} holds an unfinished run; go on with --resume or drop it with --overwrite"
                    )
                self._clear()
            self.blocks.mkdir(exist_ok=True)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the directory. Leftovers of a run that finished no block are removed, since there is nothing to
        resume. Does nothing where the directory is not held; errors while removing do not hide an error of the run."""
        if self._lock is None:
            return
        try:
            nothing = not self.replaced.exists() and self.finished() == 0 and not self.trained()
            if nothing:
                with suppress(OSError):
                    self._clear()
        finally:
            self._unlock()
        for path in [self.partial, *self._made] if nothing else ():
            with suppress(OSError):  # not empty: the next run has begun, or it holds other files
                path.rmdir()

    def tidy(self) -> None:
        """Remove what is left of a run that was killed once the output had its name. An unfinished run stays."""
        if not self.partial.exists():
            return
        with suppress(InputError):  # it holds a person's files, or another run is at work
            self._refuse_strangers()
            self._take_lock()
            try:
                self._recover()
            finally:
                self.release()

    def take_name(self, overwrite: bool) -> None:
        """Rename model/ to the output. Raises InputError where something took that name while the run worked."""
        self._refuse_output(overwrite)
        if self.output.exists():
            self.output.rename(self.replaced)
        try:
            self.model.rename(self.output)
        except BaseException:
            self._recover()
            raise
        with suppress(OSError):  # the output exists; the next run removes the rest
            self._recover()

    def _recover(self) -> None:
        """Clean up after a run that renamed its output, or was killed meanwhile: the former or the new output stays."""
        if self.replaced.exists() and not self.output.exists():
            self.replaced.rename(self.output)
        elif self.replaced.exists() and self.model.exists():
            raise InputError(
                f"{self.output} came into being while the former one was set aside in {self.replaced}; move one of them"
            )
        elif self.replaced.exists():
            shutil.rmtree(self.replaced)
        if self.progress.exists() and Journal.read(self.progress).complete and not self.model.exists():
            self._clear()

    def finished(self) -> int:
        """The number of finished blocks that a run can resume from."""
        try:
            journal = Journal.read(self.progress) if self.progress.exists() else Journal()
        except CheckpointError:  # a journal that cannot be read is not dropped
            return 1
        return 0 if journal.complete and not self.model.exists() else len(journal.blocks)

    def trained(self) -> bool:
        """True where there is a checkpoint of training that a run can resume from."""
        done = self.progress.exists() and Journal.read(self.progress).complete and not self.model.exists()
        return not done and any(
            self.training.glob("*/step-*[0-9]")
        )  # not those that are unfinished (`train.loop.train_checkpoints`)

    def _clear(self) -> None:
        """Remove all leftovers of runs except the lock. The journal goes first: without all its files it is useless."""
        for path in self.partial.iterdir():
            if path.name.startswith((PROGRESS, f".{PROGRESS}.")):
                path.unlink()
        clear(self.partial)

    def _refuse_output(self, overwrite: bool) -> None:
        if not self.output.exists():
            return
        if not overwrite:
            raise InputError(f"{self.output} exists; choose another output or pass --overwrite")
        if self.output.is_mount() or not os.access(self.output, os.W_OK):
            raise InputError(
                f"{self.output} cannot be renamed (it is a mount point, or not yours); choose an output inside it, or "
                "another one"
            )
        if self.output.is_dir() and not any(self.output.iterdir()):
            return
        if not is_checkpoint(self.output):
            raise InputError(
                f"{self.output} is not a checkpoint of this tool; it is not overwritten: choose another output"
            )
        stranger = stranger_in(self.output)
        if stranger is not None:
            raise InputError(
                f"{self.output} holds {stranger.relative_to(self.output)}, which no run wrote; move it elsewhere or "
                "choose another output"
            )

    def _refuse_strangers(self) -> None:
        """Raises InputError for an OUT.partial that no run left, or into which somebody else put a file."""
        if self.partial.is_symlink() or (self.partial.exists() and not self.partial.is_dir()):
            raise InputError(f"{self.partial} is in the way; move it or choose another output")
        if not self.partial.exists():
            return
        if self.progress.exists():
            Journal.read(self.progress)
        strange = [path for path in sorted(self.partial.iterdir()) if not _is_own(path)]
        for path in strange or strangers_in(self.partial):
            raise InputError(
                f"{self.partial} is in the way: it holds {path.relative_to(self.partial)}, which no run left; move it "
                "or choose another output"
            )
        left = holder_of(self.partial / LOCK) is not None or self.progress.exists()
        if not left and any(path.is_file() for path in self.partial.rglob("*")):
            raise InputError(f"{self.partial} is in the way and no run left it; move it or choose another output")

    def _take_lock(self) -> None:
        path = self.partial / LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(ATTEMPTS):
            self._made = [path for path in self.partial.parents if not path.exists()]
            self.partial.mkdir(parents=True, exist_ok=True)
            try:
                file = os.fdopen(os.open(path, flags, 0o666), "r+", encoding="utf-8")
            except FileNotFoundError:  # the former holder removed the directory just now
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(file.fileno()), path.stat(follow_symlinks=False)):
                    break
                file.close()
            except FileNotFoundError:  # the former holder removed the file just now
                file.close()
            except BlockingIOError:
                file.close()
                raise InputError(
                    f"{self.output} is being written by another run ({_describe(holder_of(path))}); wait for it, stop "
                    "it, or choose another output"
                ) from None
        else:
            raise InputError(f"{self.output} is wanted by many runs at once; choose another output")
        self._lock = file
        holder = {
            "compress": "lock",
            "process": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": (command() or "a Python program")[:SHOWN],
        }
        file.truncate(0)
        json.dump(holder, file)
        file.flush()

    def _unlock(self) -> None:
        assert self._lock is not None
        (self.partial / LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # the words about the holder did not fit on the disk
            self._lock.close()
        self._lock = None


def _is_own(path: Path) -> bool:
    """True for an entry of OUT.partial with a name and a kind that runs create."""
    kind = path.stat(follow_symlinks=False).st_mode
    if path.name in (BLOCKS, MODEL, REPLACED, TRAINING):
        return stat.S_ISDIR(kind)
    return stat.S_ISREG(kind) and (becomes(path.name) or path.name) in (LOCK, PROGRESS, EXPECTED)


def holder_of(lock: Path) -> dict[str, Any] | None:
    """The holder of a lock: {process, host, since, command}; {} for an empty lock file; None for a file that is no
    lock."""
    try:
        text = lock.read_text(encoding="utf-8")
        found = json.loads(text) if text else {"compress": "lock"}
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.pop("compress", None) != "lock":
        return None
    return found


def _describe(holder: dict[str, Any] | None) -> str:
    if not holder:
        return "it has just begun"
    return (
        f"process {holder.get('process')} on {holder.get('host')} since {holder.get('since')}: {holder.get('command')}"
    )


def is_checkpoint(directory: Path) -> bool:
    """True for a directory whose record shows that it is the output of a run."""
    try:
        record = read_record(directory)
    except CheckpointError:
        return False
    return isinstance(record.get("compress"), str) and isinstance(record.get("identity"), dict)


def own_files(directory: Path) -> list[str]:
    """The files of a run's output, without its record."""
    return [*read_record(directory).get("files", ())]


def stranger_in(directory: Path) -> Path | None:
    """The first entry in the output of a run that the run did not write; None where there is none."""
    own = {RECORD, *own_files(directory)}
    for path in sorted(directory.rglob("*")):
        within = path.relative_to(directory).as_posix()
        if path.is_dir() and not path.is_symlink() and holds(within, own):
            continue
        # A process that was killed while it replaced one of our files has left a scratch file for that name.
        ours = within in own or becomes(within) in own
        if not (ours and path.is_file()) or path.is_symlink():
            return path
    return None


def drop_output(output: Path) -> None:
    """Remove an output. Raises InputError, having removed nothing, for one that a run would not replace."""
    Directory(output)._refuse_output(overwrite=True)
    shutil.rmtree(output)


@contextmanager
def claim(
    output: str | Path | None,
    comm: Comm,
    *,
    resume: bool,
    overwrite: bool,
    model: Path | None = None,
    shard_bytes: int | None = None,
) -> Iterator[Directory | None]:
    """Claims the output for this run alone while the body runs; yields its directory, or None where output is None.

    model: the path that the run reads, which must lie elsewhere. shard_bytes: as in `Directory`. Raises InputError as
    `Directory.claim` does. When the body is stopped, a note on the exception says what can be resumed. A collective.
    """
    if output is None:
        yield None
        return
    if not Path(output).name:
        raise InputError(f"output {str(output)!r} is no directory that can be made; give a path with a name")
    problem = directory = None
    try:
        if special(Path(output)) == LOOP:
            raise InputError(f"output {str(output)!r} is {LOOP}; give another path")
        directory = Directory(Path(output), shard_bytes)
        if model is not None and model.absolute().is_relative_to(directory.partial):
            raise InputError(
                f"model {str(model)!r} lies in {directory.partial}, where the run would work; move it first"
            )
        if comm.rank == 0:
            directory.claim(resume=resume, overwrite=overwrite)
    except InputError as error:
        problem = str(error)
    except (OSError, ValueError) as error:  # a name that is too long, or holds a null byte
        problem = f"cannot write {output}: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, OSError) and error.errno in OF_FOLDERS:
            there = next(path for path in Path(output).absolute().parents if path.exists())
            problem = f"cannot write {output}: no folder can be made in {there} ({error.strerror}); give another"
    problem = comm.gather_objects(problem)[0]
    if problem is not None:
        raise InputError(problem)
    assert directory is not None
    try:
        yield directory
    except (KeyboardInterrupt, RankLostError, WriteError) as error:
        again = "make room and run again" if isinstance(error, WriteError) else "run again"
        if finished := directory.finished():
            kept = "1 finished block is" if finished == 1 else f"{finished} finished blocks are"
            error.add_note(f"{kept} kept in {directory.partial}: {again} with --resume")
        elif directory.trained():
            error.add_note(f"what was trained so far is kept in {directory.partial}: {again} with --resume")
        raise
    finally:
        directory.release()
