"""A script in a rank behaves as under plain ``python``: output, traceback, exit code, ``__main__``."""

from __future__ import annotations

import json
import sys

import pytest

from echelon.launch.local import worker
from echelon.launch.local.parents import own_identity
from tests.launch.conftest import Command, Result

SCRIPTS = {
    "exception": "def f():\n    return 1 / 0\nf()\n",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('outer') from e\n",
    "exit text": "import sys\nsys.exit('text')\n",
    "exit number": "import sys\nsys.exit(5)\n",
    "exit none": "import sys\nsys.exit()\n",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__)\nraise OSError('x')\n",
    "main": "import sys, __main__\nprint(__main__.__dict__ is globals(), sorted(globals()), __spec__, __package__, __doc__)\n",
    "path": "import sys, os\nprint(sys.path[0], sys.argv, __file__, 'echelon' in sys.modules, 'ctypes' in sys.modules or True)\n",
    "atexit": "import atexit\nx = 3\natexit.register(lambda: print('bye', x))\n",
    "pickle": "import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A)) is A)\n",
    "multiprocessing": "import multiprocessing as mp\ndef f(x): return x + 1\nif __name__ == '__main__':\n    with mp.get_context('spawn').Pool(1) as p: print(p.map(f, [1, 2]))\n",
    "future": "from __future__ import annotations\ndef f(x: nowhere): return 1\nprint(f.__annotations__)\n",
    "thread at exit": "import threading, time\nx = 7\ndef f():\n    threading.main_thread().join(); print(x)\nthreading.Thread(target=f).start()\n",
}


def in_worker(command: Command, kind: str, target: str, *args: str) -> Result:
    (command.directory / "records").mkdir()
    return command.run(
        [
            *(sys.executable, worker.__file__, own_identity()),
            *(str(command.directory / "records"), "-", "default", kind, target, *args),
        ]
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_behaves_as_under_plain_python(name: str, command: Command) -> None:
    command.write("sub/script.py", SCRIPTS[name])
    plain = command.run([sys.executable, "sub/script.py", "-a", "b c"])
    ours = in_worker(command, "script", "sub/script.py", "-a", "b c")
    assert (ours.code, ours.err) == (plain.code, plain.err)
    # __builtins__ aside, which every module has, nothing of ours is in the script's names.
    assert ours.out == plain.out


@pytest.mark.parametrize("target", ["package", "package.part", "package.gone", "package.broken"])
def test_module_behaves_as_under_python_m(target: str, command: Command) -> None:
    command.write("package/__init__.py", "")
    text = "import sys\nprint(__name__, __package__, __spec__.name, sys.argv, sys.path[0], __file__)\n"
    command.write("package/__main__.py", text)
    command.write("package/part.py", text)
    command.write("package/broken.py", "raise ValueError('x')\n")
    plain = command.run([sys.executable, "-m", target, "-a"])
    ours = in_worker(command, "module", target, "-a")
    assert (ours.code, ours.out) == (plain.code, plain.out)
    assert ours.err.splitlines()[-1:] == plain.err.splitlines()[-1:]


def test_record_holds_the_users_frames(command: Command) -> None:
    command.write("script.py", "import json\ndef load():\n    json.loads('{')\nload()\n")
    in_worker(command, "script", "script.py")
    (record,) = json.loads((command.directory / "records" / "error.json").read_text())
    assert record["type"] == "json.decoder.JSONDecodeError"
    user = [(f["line"], f["function"], f["source"]) for f in record["frames"] if f["user"]]
    assert user == [(4, "<module>", "load()"), (3, "load", "json.loads('{')")]
    assert not record["frames"][-1]["user"]


def test_forked_child_does_not_write_the_ranks_record(command: Command) -> None:
    command.write("script.py", "import os\nif os.fork() == 0:\n    raise ValueError('child')\nos.wait()\n")
    assert in_worker(command, "script", "script.py").code == 0
    assert not (command.directory / "records" / "error.json").exists()


def test_modules_of_the_current_directory_do_not_shadow_the_workers_own(command: Command) -> None:
    command.write("json.py", "raise SystemExit('shadowed')\n")
    command.write("sub/script.py", "print('ran')\n")
    assert in_worker(command, "script", "sub/script.py").out == "ran\n"
