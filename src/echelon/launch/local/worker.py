"""The program that each rank runs: it runs the user's script exactly like ``python script.py`` and records its errors.

The launcher runs this file by its path, and it imports only the standard library: ``python worker.py PARENT DIRECTORY
BOARD|- default|line|debug script|module TARGET ARGS...``. It dies when the process PARENT dies.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import hashlib
import importlib
import importlib.util
import io
import json
import linecache
import os
import re
import signal
import stat
import sys
import threading
import time
from types import CodeType, ModuleType, TracebackType
from typing import IO, Any, NoReturn

ERROR_FILE = "error.json"
STACK_FILE = "stack.txt"

LOG_FILE = "stderr.log"
"""The launcher's log of this rank, if it writes one."""
HIDE, SHOW = "\0echelon: to the log file only", "\0echelon: to the terminal, too"
"""Lines after which the launcher copies stderr to the log file only, and again to both."""

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")
_MAX_RECORDS = 8
_MAX_FRAMES = 40
_MAX_TEXT = 4000
_PR_SET_PDEATHSIG = 1
_CHECK_PARENT_S = 0.5


class Recorder:
    """Writes this process's errors atomically to ``directory/error.json``."""

    def __init__(self, directory: str, reporter: Any = None) -> None:
        self._reporter = reporter
        self.has_failed = False
        self.exit_line: dict[str, Any] | None = None
        """The user's line that ended the program with ``sys.exit()``."""
        self.directory = directory
        self._path = os.path.join(directory, ERROR_FILE)
        self._records: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def add(self, error: BaseException, *, where: str, memory: Any = None) -> None:
        """Record ``error``, which was raised in ``where`` (``main`` or a thread name). Never raises.

        Args:
            memory: what filled the memory (``_memory_report``).
        """
        if os.getpid() != self._pid:
            return  # a child that the script forked; its errors are not errors of the rank
        self.has_failed = self.has_failed or where == "main"
        record = {
            "time_ns": time.monotonic_ns(),
            "where": where,
            "type": _type_name(error),
            "message": _text_with_attribute(error),
            **_parts(error),
            **({} if memory is None else {"do": memory.advice}),
            "chain": [f"{_type_name(cause)}: {_text(cause)}" for cause in _causes(error)],
            "frames": _frames(error.__traceback__),
            "collectives": None if self._reporter is None else self._reporter.collectives(),
        }
        with self._lock:
            if len(self._records) == _MAX_RECORDS:
                del self._records[-1]  # keep the first records and the newest
            self._records.append(record)
            try:
                with open(f"{self._path}.tmp", "w", encoding="utf-8", errors="backslashreplace") as file:
                    json.dump(self._records, file)
                os.replace(f"{self._path}.tmp", self._path)
            except OSError as problem:  # for example a full disk, which must not hide the error
                print(f"echelon: cannot write {self._path}: {problem}", file=sys.stderr)

    def claim(self, error: BaseException) -> bool:
        """Return whether this is the first rank on this machine to print ``error``, which differs at most in its numbers."""
        frames = [(frame["file"], frame["line"]) for frame in _frames(error.__traceback__)]
        causes = [f"{_type_name(one)}: {_text(one)}" for one in (error, *_causes(error))]
        digest = hashlib.sha1(repr((frames, _NUMBER.sub("#", "\n".join(causes)))).encode(), usedforsecurity=False)
        mark = os.path.join(os.path.dirname(self.directory), f".printed-{digest.hexdigest()}")
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:  # for example a full disk
            return True
        return True


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _text_with_attribute(error: BaseException) -> str:
    """Return the text of ``error``; for a pickling error, add the DataLoader attribute that caused it."""
    text = _text(error)
    if "pickle" not in text or "torch.utils.data" not in sys.modules:
        return text
    try:
        from echelon.launch.unpicklable import unpicklable_part  # noqa: PLC0415 - echelon may not be importable in a rank
    except ImportError:
        return text
    part = unpicklable_part(error)
    return f"{text}: {part}" if part else text


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return str(error.code)[:_MAX_TEXT]
    try:
        # The launcher searches the text.
        text = error.in_english() if _is_of_echelon(error) else str(error)  # type: ignore[attr-defined]
    except Exception as problem:  # noqa: BLE001 - a broken __str__ of the user must not prevent the record
        text = f"<its __str__ raised {type(problem).__name__}>"
    if isinstance(error, SyntaxError) and error.filename:
        text = f"{text.partition(' (')[0]} ({error.filename}, line {error.lineno})"
    return text[:_MAX_TEXT]


def _parts(error: BaseException) -> dict[str, str | None]:
    """Return the parts of an error of echelon, in the user's language."""
    if not _is_of_echelon(error):
        return {}
    what, place, do = error.what, error.where, error.do  # type: ignore[attr-defined]
    return {"what": what[:_MAX_TEXT], "place": place, "do": do}


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and cause not in found and len(found) < _MAX_RECORDS:
        found.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return found


def _frames(traceback: TracebackType | None) -> list[dict[str, Any]]:
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append(
            {
                "file": code.co_filename,
                "line": traceback.tb_lineno,
                "function": code.co_name,
                "source": linecache.getline(code.co_filename, traceback.tb_lineno).strip()[:200],
                "user": is_user_file(code.co_filename),
            }
        )
        traceback = traceback.tb_next
    return frames[-_MAX_FRAMES:]


def _last_user_line(error: BaseException) -> dict[str, Any] | None:
    """Return the innermost line of user code in the traceback of ``error``, as the fields of a ``CallSite``."""
    users = [frame for frame in _frames(error.__traceback__) if frame["user"]]
    return {name: users[-1][name] for name in ("file", "line", "source")} if users else None


def is_user_file(path: str) -> bool:
    """Return whether ``path`` is user code: not an installed package, the standard library or echelon."""
    if path.startswith("<"):
        return False
    installed = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
    library = os.path.dirname(os.__file__) + os.sep
    echelon = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
    path = os.path.abspath(path)
    return not (any(part in path for part in installed) or path.startswith((library, echelon)))


def main(argv: list[str]) -> None:
    """Run the target in ``argv`` as this process's ``__main__``."""
    parent, directory, board, mode, kind, target, *args = argv
    die_with(parent)
    if hasattr(signal, "SIGHUP"):
        # nohup ignores SIGHUP, but the launcher stops ranks with it. A terminal's SIGHUP does not reach their session.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Open until the process ends, because faulthandler writes the Python stacks there at a crash in native code.
    stack_file = open(os.path.join(directory, STACK_FILE), "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(stack_file, all_threads=True)
    if mode in ("line", "shared"):
        # The launcher or the other ranks write to the same place: write each line at once, as on a terminal, and as a whole, which
        # Python does not do with PYTHONUNBUFFERED.
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    # Registered first, so that these are called last, right before the interpreter exits.
    atexit.register(_wait_for_idle_threads)
    reporter = None if board == "-" else _start_reporter(board, directory, stack_file)
    recorder = Recorder(directory, reporter)
    _hook_threads(recorder)
    if reporter is not None:
        atexit.register(lambda: reporter.close(finished=not recorder.has_failed, exit_line=recorder.exit_line))
    try:
        # The module that replaces libraries with echelon (echelon launch --as), before the program can import them.
        if module := os.environ.get("ECHELON_STARTER"):  # noqa: TID251 - this file imports only the standard library
            importlib.import_module(module).install_for_rank(os.environ["ECHELON_AS"])  # noqa: TID251
        if os.environ.get("ACCELERATE_DEBUG_MODE") == "true":  # noqa: TID251 - as above
            # The reporter names the line of each collective only if it need not import torch's compiler (``stack_reporter.py``).
            with contextlib.suppress(ImportError):
                importlib.import_module("torch._inductor")
        if kind == "module":
            _run_module(target, args)
        else:
            _run_script(target, args)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            recorder.add(_without_worker(stop), where="main")
            if isinstance(stop.code, str) and _log_of(directory) is None:
                if mode == "debug" or recorder.claim(stop):
                    with _progress_bars_cleared():
                        sys.stderr.write(f"{_line_start()}{stop.code}\n")
                sys.exit(1)
        recorder.exit_line = _last_user_line(stop)
        raise
    except KeyboardInterrupt:
        recorder.has_failed = True
        _quiet_interrupt()
    except BaseException as error:  # noqa: BLE001 - record any exception that ends the script
        error = _without_worker(error)
        memory = _memory_report(error)
        recorder.add(error, where="main", memory=memory)
        # Do not re-raise, or the traceback would start with this file. The hook may be the user's (rich, IPython).
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        if mode == "shared":
            _end_last_line()
        _print_traceback(error, recorder, mode=mode)
        if memory is not None:
            print(memory, file=sys.stderr)  # also of other ranks, because each has its own tensors
        if mode == "debug":
            _debug_post_mortem(error)
        # Errors of echelon have an exit code, such as 74 for a checkpoint that cannot be written.
        sys.exit(error.exit_code if _is_of_echelon(error) else 1)  # type: ignore[attr-defined]
    finally:
        if mode == "shared":
            _end_last_line()


def _memory_report(error: BaseException) -> Any:
    """Return what filled the memory of a program with an Accelerator, if ``error`` says that it is full; otherwise None."""
    module = sys.modules.get(
        "echelon.accelerator.out_of_memory"
    )  # loaded by programs with an Accelerator, not by this file
    try:
        return None if module is None else module.explain_out_of_memory(error)
    except Exception as problem:  # noqa: BLE001 - there is little memory left, and the error itself matters more
        print(f"echelon: cannot tell what fills the memory: {type(problem).__name__}: {problem}", file=sys.stderr)
        return None


def _is_of_echelon(error: BaseException) -> bool:
    return type(error).__module__.startswith("echelon.") and hasattr(error, "in_english")


def _end_last_line() -> None:
    """Write the rest of stdout, and end its line if the program has not, so that another rank's line does not follow on it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the program has closed or replaced its stdout
        number = sys.__stdout__.fileno()  # type: ignore[union-attr]
        own, (reader, writer) = os.dup(number), os.pipe()
        os.set_blocking(writer, False)  # the rest of a line is shorter than a pipe is
        os.dup2(writer, number)
        try:
            sys.__stdout__.flush()  # type: ignore[union-attr]
        finally:
            os.dup2(own, number)
            for file in (own, writer):
                os.close(file)
            with open(reader, "rb") as pipe:
                rest = pipe.read()
        if rest:
            os.write(number, rest if rest.endswith(b"\n") else rest + b"\n")


def _print_traceback(error: BaseException, recorder: Recorder, *, mode: str) -> None:
    """Print the traceback: in the terminal once for each distinct error of this machine's ranks, in log files always.

    The launcher's report ends with where the error is from and what to do, so the terminal does not show these lines twice.
    """
    log = _log_of(recorder.directory)
    is_first = mode == "debug" or log == "file" or recorder.claim(error)
    if not is_first and log is None:
        return
    details = ""
    if _is_of_echelon(error) and log != "file":
        lines = str(error).split("\n")
        error.where = error.do = None  # type: ignore[attr-defined]
        details = "".join(f"{line}\n" for line in lines[len(str(error).split("\n")) :])
    with _progress_bars_cleared():
        if log is None:
            sys.stderr.write(_line_start())
        elif log == "both" and not is_first:
            sys.stderr.write(f"{HIDE}\n")
        sys.excepthook(type(error), error, error.__traceback__)
        if log == "both":
            sys.stderr.write(f"{HIDE}\n{details}{SHOW}\n")


def _log_of(directory: str) -> str | None:
    """Return whether stderr is this rank's log file (``file``), a pipe that the launcher copies to it (``both``), or neither."""
    try:
        log, stderr = os.stat(os.path.join(directory, LOG_FILE)), os.fstat(2)
    except OSError:
        return None
    return "file" if (log.st_dev, log.st_ino) == (stderr.st_dev, stderr.st_ino) else "both"


def _line_start() -> str:
    """Return what to write first if another rank's progress bar may have left an unfinished line."""
    try:
        if os.isatty(2):
            return "" if os.environ.get("TERM") == "dumb" else "\r\x1b[K"  # noqa: TID251 - only the standard library
        status = os.fstat(2)
        if not stat.S_ISREG(status.st_mode):  # nobody can know; an empty line does no harm
            return "\n" if "tqdm.std" in sys.modules and os.environ.get("WORLD_SIZE") != "1" else ""  # noqa: TID251
        with open("/proc/self/fd/2", "rb") as file:
            file.seek(max(0, status.st_size - 1))
            return "\n" if file.read(1) not in (b"", b"\n", b"\r") else ""
    except OSError:
        return ""


def _progress_bars_cleared() -> Any:
    """Return a context in which tqdm's bars are cleared, so that a traceback does not begin on the line of a bar."""
    tqdm = sys.modules.get("tqdm.std")
    return contextlib.nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(sys.stderr)


def _debug_post_mortem(error: BaseException) -> None:
    """Open the debugger where ``error`` was raised, unless the user has quit the debugger."""
    import bdb  # noqa: PLC0415 - rarely needed
    import pdb  # noqa: PLC0415

    if error.__traceback__ is not None and not isinstance(error, bdb.BdbQuit):
        pdb.post_mortem(error.__traceback__)


def _start_reporter(board: str, directory: str, stack_file: IO[str]) -> Any:
    """Start the reporter, whose files are loaded by path, like this file."""
    layout, call_site, stack_reporter = map(_load_status_module, ("board", "call_site", "stack_reporter"))
    try:
        reporter = stack_reporter.Reporter(layout, call_site, board, directory, stack_file)
    except OSError as problem:  # for example, /dev/shm was emptied; the program can run without the board
        print(f"echelon: cannot report the status of this rank to the launcher: {problem}", file=sys.stderr)
        return None
    reporter.start()
    return reporter


# Python removes __file__ from the program's first module before it calls the functions that run at exit.
_STATUS_FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "status")


def _load_status_module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"_echelon_{name}", os.path.join(_STATUS_FOLDER, f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module


def _wait_for_idle_threads() -> None:
    if "torch._C._distributed_c10d" in sys.modules:  # other programs have no threads of process groups
        _load_status_module("idle_threads").wait_for_idle_threads()


def die_with(parent: str, *, by_thread: bool = False) -> None:
    """Make this process die with its parent, so that kill -9 of a launcher leaves no orphans.

    On Linux, the kernel does this (PR_SET_PDEATHSIG), even while native code holds the GIL. It monitors the *thread*
    that started this process; if that thread may end before the parent, use ``by_thread``. Child processes do not
    inherit the setting, and executing a setuid program clears it.

    Args:
        parent: ``PID:START`` from ``parents.own_identity``; if the parent is already dead, ``getppid`` returns another pid.
        by_thread: poll the parent in a thread instead.
    """
    number, _, start = parent.partition(":")
    pid = int(number)
    is_set = sys.platform == "linux" and _set_death_signal(0 if by_thread else int(signal.SIGKILL))
    if os.getppid() != pid and not _is_alive(pid, start):  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)
    if by_thread or not is_set or os.getppid() != pid:
        _thread.start_new_thread(_die_with_parent, (pid, start, os.getppid()))


def _set_death_signal(number: int) -> bool:
    import ctypes  # noqa: PLC0415 - takes a few milliseconds, needed on Linux only

    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) == 0)


def start_of(pid: int) -> str:
    """Return a process's start time, to tell it apart from a later one with the same pid; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # the process name before it may contain anything
    except OSError:  # the process has ended, or the system has no /proc
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _is_alive(pid: int, start: str) -> bool:
    """Return whether the process with this pid and start time is alive."""
    return start_of(pid) == start if start else os.getppid() == pid


def _die_with_parent(pid: int, start: str, above: int) -> None:
    while os.getppid() == above and (above == pid or _is_alive(pid, start)):
        time.sleep(_CHECK_PARENT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _hook_threads(recorder: Recorder) -> None:
    before = threading.excepthook

    def record(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            recorder.add(args.exc_value, where=args.thread.name if args.thread else "a thread")
        before(args)

    threading.excepthook = record


def _without_worker(error: BaseException) -> BaseException:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    return error.with_traceback(traceback)


def _quiet_interrupt() -> NoReturn:
    """Exit through SIGINT like an interrupted Python process, but without printing a traceback on every rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(128 + signal.SIGINT)  # reached only if SIGINT is blocked


def _run_script(path: str, args: list[str]) -> None:
    sys.argv[:] = [path, *args]
    if not getattr(sys.flags, "safe_path", False):  # python -P and PYTHONSAFEPATH omit the script's folder
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    full = os.path.abspath(path)
    module = _new_main(file=full)
    with io.open_code(full) as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _run_module(name: str, args: list[str]) -> None:
    sys.argv[:] = ["-m", *args]  # like python while it searches for the module
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the package was found, but a module that it imports was not
        spec = None
    loader: Any = spec.loader if spec is not None else None
    code: CodeType | None = loader.get_code(name) if hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    module = _new_main(file=spec.origin)
    module.__spec__, module.__loader__, module.__package__ = spec, loader, spec.parent
    module.__cached__ = spec.cached  # type: ignore[attr-defined]
    sys.argv[0] = spec.origin or name
    exec(code, module.__dict__)


def _new_main(file: str | None) -> ModuleType:
    """Replace ``__main__`` permanently, because pickle and multiprocessing look up names there, even at exit."""
    module = ModuleType("__main__")
    module.__file__ = file
    module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    module.__annotations__ = {}
    module.__spec__ = None
    module.__cached__ = None  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__":
    main(sys.argv[1:])
